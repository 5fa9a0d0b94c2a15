"""Examples made up to be like one that was given, for trying a model where no private record may be looked at."""

from __future__ import annotations

import torch
from torch import Tensor

from fedspa.examples import Examples, Tree, count, mapped, taken

_MADE, _GIVEN = 6, 4  # examples made up, and at most so many of those given


def made_up(like: Examples) -> list[Examples]:
    """Examples of the shapes and types of `like`, and then those of `like` itself, each with a first dimension of 1.

    Floats have the same values in another order, larger and smaller, negative and very large ones. None is constant,
    for models that divide by an example's own spread. Whole numbers are 0 and 1, which every vocabulary has, and those
    of `like` in another order. The first target is that of `like`: whatever the task, it is a fitting one.
    """
    first = Examples(_row(like.x, 0), _row(like.y, 0))
    made = [Examples(_varied(first.x, n), _varied(first.y, n) if n else first.y) for n in range(_MADE)]
    return made + [Examples(_row(like.x, n), _row(like.y, n)) for n in range(min(_GIVEN, count(like.x)))]


def _row(tree: Tree, n: int) -> Tree:
    return mapped(lambda leaf: leaf.cpu().clone(), taken(tree, slice(n, n + 1)))


def _varied(tree: Tree, n: int) -> Tree:
    return mapped(lambda leaf: _leaf(leaf, n), tree)


def _leaf(like: Tensor, n: int) -> Tensor:
    if like.is_floating_point():
        ramp = torch.linspace(0, 1, like.numel()).view(like.shape)
        made = [ramp, 1 - ramp, ramp.square() / 3, 3 * ramp + 1, -2 * ramp, 1e6 * (ramp - 0.5)][n]
    else:
        place = torch.arange(like.numel()).view(like.shape)
        # A mask that hides everything would make every output the same: none is made.
        made = [(place + 1) % 2, place % 3 % 2, 1 - place % 3 % 2, torch.ones_like(place), like.flip(-1), like.roll(1)][
            n
        ]
    return made.to(like.dtype)
