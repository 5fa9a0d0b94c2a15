"""Trees of tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedspa.examples import (
    Tree,
    count,
    joined,
    layout,
    leaves,
    mapped,
    single_examples,
    split,
    taken,
    zero_examples,
)

IDS, MASK, IMAGE = torch.arange(12).view(4, 3), torch.ones(4, 3, dtype=torch.bool), torch.rand(4, 1, 2, 2)
TREES: list[Tree] = [IMAGE, {"ids": IDS, "mask": MASK}, (IMAGE, {"text": (IDS, MASK)})]


@pytest.mark.parametrize("tree", TREES)
def test_parts_put_together_are_the_whole(tree: Tree) -> None:
    for size in (1, 3, 4, 9):
        again = joined(list(split(tree, size)))
        assert layout(again) == layout(tree)
        assert all(map(torch.equal, leaves(again), leaves(tree)))


@pytest.mark.parametrize("tree", TREES)
def test_each_alone_is_a_copy_of_its_own(tree: Tree) -> None:
    ones = list(single_examples(tree))
    assert len(ones) == count(tree) == 4
    for place, one in enumerate(ones):
        for copy, whole in zip(leaves(one), leaves(tree)):
            assert torch.equal(copy, whole[place : place + 1])
            assert copy.untyped_storage().nbytes() == copy.nbytes  # nothing of its neighbours lies beside it


def test_how_all_lie_does_not_show_in_one() -> None:
    """Images that came with their channels last, and the same in order."""
    turned = torch.rand(4, 5, 5, 3).permute(0, 3, 1, 2)
    for whole in (turned, turned[1:3], turned.contiguous(), taken(turned, torch.tensor([2, 0]))):
        assert {one.stride() for one in single_examples(whole) if isinstance(one, torch.Tensor)} == {(75, 25, 5, 1)}


def test_taking_and_blanks_keep_the_layout() -> None:
    tree: Tree = (IMAGE, {"text": (IDS, MASK)})
    assert layout(taken(tree, torch.tensor([2, 0]))) == layout(tree) == layout(zero_examples(tree, 7))
    assert torch.equal(next(leaves(taken(tree, torch.tensor([2, 0])))), IMAGE[[2, 0]])
    assert count(zero_examples(tree, 7)) == 7
    assert not any(leaf.any() for leaf in leaves(zero_examples(tree)))


def test_mapped_sees_every_leaf_once() -> None:
    seen: list[Tensor] = []
    mapped(lambda leaf: seen.append(leaf) or leaf, (IMAGE, {"text": (IDS, MASK)}))  # type: ignore[func-returns-value]
    assert [id(leaf) for leaf in seen] == [id(IMAGE), id(IDS), id(MASK)]
