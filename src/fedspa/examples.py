"""An example is what is protected: a tree of tensors, and many examples are the same tree with a first dimension.

Leaves are float, integer or bool tensors; dicts and tuples hold them together, as in {"input_ids": …, "attention_mask":
…}. Inputs are x and targets y; with one dict for both, the targets are named by one of `TARGETS`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from fedspa.errors import DataError, quoted

Tree: TypeAlias = "Tensor | dict[str, Tree] | tuple[Tree, ...]"
# A person is an example of up to c records, a public number. Up to so many, an engine may fill up each person to c.
MOST_SLOTS = 64
TARGETS = ("labels", "label", "target", "targets", "y")
_LEAF = re.compile(r"(?:([^()]+) )?\(([\d, ]*)\) (float32|int64|bool)(?:, |$)")  # of a layout


class Examples(NamedTuple):
    """Inputs and targets of as many examples as their first dimension says."""

    x: Tree
    y: Tree


def leaves(tree: Tree) -> Iterator[Tensor]:
    """Its tensors, in order."""
    for _, leaf in named_leaves(tree):
        yield leaf


def named_leaves(tree: Tree, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Its tensors with the way to each, as in `inputs.mask` or `0`; "" where the tree is a tensor."""
    if isinstance(tree, Tensor):
        yield name, tree
        return
    items = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
    for key, part in items:
        yield from named_leaves(part, f"{name}.{key}" if name else str(key))


def in_order(tree: Tree, like: Tree) -> list[Tensor]:
    """Its tensors in the order of another that is made alike: dicts need not have their keys in one order."""
    found = dict(named_leaves(tree))
    return [found[name] for name, _ in named_leaves(like)]


def mapped(function: Callable[[Tensor], Tensor], tree: Tree) -> Tree:
    """Return the same tree with `function` of each of its tensors."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, dict):
        return {key: mapped(function, part) for key, part in tree.items()}
    return tuple(mapped(function, part) for part in tree)


def joined(trees: list[Tree]) -> Tree:
    """Examples of several trees, one after another; the trees must be made alike."""
    first = trees[0]
    if isinstance(first, Tensor):
        return torch.cat([tree for tree in trees if isinstance(tree, Tensor)])
    if isinstance(first, dict):
        return {key: joined([tree[key] for tree in trees if isinstance(tree, dict)]) for key in first}
    return tuple(joined([tree[place] for tree in trees if isinstance(tree, tuple)]) for place in range(len(first)))


def count(tree: Tree) -> int:
    """Return how many examples."""
    return len(next(leaves(tree)))


def taken(tree: Tree, index: Tensor | slice) -> Tree:
    return mapped(lambda leaf: leaf[index], tree)


def moved(tree: Tree, device: torch.device | str) -> Tree:
    return mapped(lambda leaf: leaf.to(device), tree)


def in_float64(tree: Tree) -> Tree:
    """Floats in double precision; integers and bools as they are."""
    return mapped(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, tree)


def split(tree: Tree, size: int) -> Iterator[Tree]:
    """Parts of `size` examples each, the last one perhaps smaller."""
    for start in range(0, count(tree), size):
        yield taken(tree, slice(start, start + size))


def single_examples(tree: Tree) -> Iterator[Tree]:
    """One example after another, as contiguous copies: a view lies among its neighbours, and its strides
    tell how they lay, by which torch chooses the order of a sum."""
    for part in split(tree, 1):
        yield mapped(lambda leaf: leaf.clone(memory_format=torch.contiguous_format), part)


def blank(shape: tuple[int, ...]) -> Examples:
    """One example made of zeros: a float tensor of that shape, and class 0."""
    return Examples(torch.zeros(1, *shape), torch.zeros(1, dtype=torch.int64))


def zero_examples(tree: Tree, size: int = 1) -> Tree:
    """Examples of zeros that are made like those."""
    return mapped(lambda leaf: leaf.new_zeros(size, *leaf.shape[1:]), tree)


def tensors(x: Tree, y: Tree) -> tuple[Tensor, Tensor]:
    """Inputs and targets that are one tensor each, as the engines for chains of layers take them."""
    assert isinstance(x, Tensor)
    assert isinstance(y, Tensor)
    return x, y


def layout(tree: Tree) -> str:
    """What one example is made of, for people: `(1, 8, 8) float32`, or `input_ids (64,) int64, mask (64,) bool`."""
    return ", ".join(
        f"{name} {tuple(leaf.shape[1:])} {leaf.dtype}".replace("torch.", "").strip()
        for name, leaf in named_leaves(tree)
    )


def of_layout(text: str) -> Tree:
    """One example of zeros, made as `layout` said by this text of others. Keys that are numbers are places in a
    tuple."""
    root: dict[str, Tree] = {}
    end = 0
    while end < len(text) or not root:
        found = _LEAF.match(text, end)
        if found is None:
            raise DataError(f"{quoted(text)} does not say what an example is made of")
        *way, last = (found[1] or "").split(".")
        branch = root
        for key in way:
            deeper = branch.setdefault(key, {})
            branch = deeper if isinstance(deeper, dict) else {}
        sides = [int(side) for side in found[2].replace(",", " ").split()]
        branch[last] = torch.zeros(1, *sides, dtype=getattr(torch, found[3]))
        end = found.end()
    return _with_tuples(root)


def _with_tuples(tree: Tree) -> Tree:
    if not isinstance(tree, dict):
        return tree
    if list(tree) == [""]:
        return tree[""]
    parts = {key: _with_tuples(part) for key, part in tree.items()}
    return tuple(parts.values()) if all(key.isdecimal() for key in parts) else parts


def require_aligned(tree: Tree, what: str) -> None:
    """Raise where the leaves do not have one example per row of each other, or hold what no example may."""
    found = list(named_leaves(tree))
    if not found:
        raise DataError(f"{what} has no tensors in it: an example is a tensor, or a dict or tuple of tensors")
    for name, leaf in found:
        if leaf.ndim == 0:
            raise DataError(f"{what}{_at(name)} is a single number: the first dimension must count the examples")
        if len(leaf) != len(found[0][1]):
            raise DataError(
                f"{what}{_at(name)} has {len(leaf)} examples, and {len(found[0][1])} are in{_at(found[0][0]) or ' x'}"
            )
        if leaf.is_complex():
            raise DataError(f"{what}{_at(name)} holds complex numbers: real ones are needed")


def _at(name: str) -> str:
    return f" '{name}'" if name else ""
