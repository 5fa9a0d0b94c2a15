"""A split held against the whole module, on made-up records: it must give the same, and keep records apart."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from fedspa.examples import Examples, Tree, leaves, mapped
from fedspa.learning.flat import FlatModel
from fedspa.learning.frozen.cut import random_states
from fedspa.learning.frozen.traced import Untraced
from fedspa.learning.tasks import Task
from fedspa.learning.traces.state import close

_TOLERANCE = 1e-3  # of the largest number: float32, and on a GPU other sums
_SEED = 2023
_close = partial(close, tolerance=_TOLERANCE)

Body = Callable[[Tree], Tree]


def require_same(module: nn.Module, head: nn.Module, body: Body, examples: list[Examples], task: Task) -> None:
    """Outputs and gradients are those of the whole, at two θ and with the same randomness."""
    whole, rest = FlatModel(module, task), FlatModel(head, task)
    theta = whole.flatten()
    elsewhere = theta + 0.05 * torch.randn(theta.shape, generator=torch.Generator().manual_seed(1)).to(theta)
    tried = [_tried(whole, rest, body, at, example) for at in (theta, elsewhere) for example in examples]
    if not any(tried):
        raise Untraced("no record that was made up has a gradient")


def _tried(whole: FlatModel, rest: FlatModel, body: Body, theta: Tensor, example: Examples) -> bool:
    """Whether the whole has a gradient there; what was made up need not have one."""
    try:
        expected = _found(whole, theta, *example)
    except Exception:  # the user's forward may raise anything
        return False
    before = random_states()
    features = body(example.x)
    if not all(map(torch.equal, before, random_states())):
        raise Untraced("the frozen part draws random numbers")
    kept = mapped(lambda leaf: leaf.clone(), features)
    if not all(map(_close, expected, _found(rest, theta, features, example.y))):
        raise Untraced("cut in two, it gives something else")
    if not all(map(_equal, leaves(kept), leaves(features))):
        raise Untraced("what is trained changes the features in place")
    return True


def _found(model: FlatModel, theta: Tensor, x: Tree, y: Tree) -> list[Tensor]:
    """Outputs and gradient, from the same seed."""
    torch.manual_seed(_SEED)
    outputs = model.outputs(theta, x).detach()
    torch.manual_seed(_SEED)
    return [outputs, model.gradient(theta, x, y)]


def require_apart(body: Body, alone: list[Tree], several: Tree) -> None:
    """A record has the same features each time, and, as near as rounding lets them, the same among others."""
    together = body(several)
    for place, x in enumerate(alone):
        for one, again, many in zip(leaves(body(x)), leaves(body(x)), leaves(together)):
            if not _equal(one, again):
                raise Untraced("the frozen part gives a record something else each time")
            if not _close(one, many[place : place + 1]):
                raise Untraced("the frozen part mixes records")


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())
