"""A program held against plain autograd before it is used, on made-up examples.

A trace is right where torch's rules for vmap are, and where a module does for mapped tensors what it does for others:
one that catches an exception by which vmap refuses something, for example, does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fedspa.engine.traced.capture import Untraceable
from fedspa.examples import Examples, Tree, joined, moved, taken
from fedspa.learning.flat import FlatModel
from fedspa.learning.forward import Modes, in_modes
from fedspa.learning.made_up import made_up

aten = torch.ops.aten
# Other numbers of examples than those of the trace, below them and above.
_SIZES = 1, 7
_MADE = 4  # examples of which these are made: each costs a backward pass by itself
_COLUMNS = 2048  # of a layer, half of them its largest
# Of a layer's gradient, and of an example's whole one: much more than rounding, and less than any error of a rule.
_NEAR, _NEAR_WHOLE = 1e-2, 1e-5


def require_agreement(
    model: FlatModel, modes: Modes, like: Examples, rows: Callable[[Tensor, Tree, Tree, Tensor], Tensor]
) -> None:
    """`rows(theta, x, y, coordinates)` are the gradients by the program, where Dropout keeps everything."""
    examples = made_up(like)
    examples = examples[: _MADE - 1] + examples[-1:]
    # Where weights start at zero, what lies behind them does not show in a gradient; where they are huge and cancel,
    # nothing shows but rounding.
    theta = model.flatten().nan_to_num(0).clamp(-1, 1)
    theta += 0.02 * torch.randn(theta.shape, generator=torch.Generator().manual_seed(1)).to(theta)
    x, y = (moved(joined([one[i] for one in examples]), theta.device) for i in range(2))
    alone, coordinates = _alone(model, modes, theta, x, y)
    for size in _SIZES:
        index = torch.arange(size, device=theta.device) % len(examples)
        found = rows(theta, taken(x, index), taken(y, index), coordinates)
        _require_near(found, alone[index], torch.bucketize(coordinates, _ends(model).to(theta.device), right=True))


def _alone(model: FlatModel, modes: Modes, theta: Tensor, x: Tree, y: Tree) -> tuple[Tensor, Tensor]:
    """Each example's gradient by itself, and the coordinates on which."""
    found: list[Tensor] = []
    coordinates = torch.empty(0, dtype=torch.int64, device=theta.device)
    for number in range(_MADE):
        one = slice(number, number + 1)
        with in_modes(modes), torch.random.fork_rng(devices=[]), _KeepAll():  # type: ignore[no-untyped-call]
            gradient = model.gradients_alone(theta, taken(x, one), taken(y, one))[0]
        if not number:
            coordinates = _looked_at(gradient, model.sizes)
        found.append(gradient[coordinates])
    return torch.stack(found), coordinates


def _looked_at(gradient: Tensor, sizes: list[int]) -> Tensor:
    """Of each layer the coordinates with the largest gradients, and some all over it: all B × d would be much."""
    chosen, first = [], 0
    for part in torch.split(gradient.abs().nan_to_num(0, 0), sizes):
        each = max(1, min(len(part), _COLUMNS // 2))
        spread = torch.arange(0, len(part), -(-len(part) // each), device=gradient.device)
        chosen += [first + part.topk(min(each, len(part))).indices, first + spread]
        first += len(part)
    found: Tensor = torch.cat(chosen).unique()  # type: ignore[no-untyped-call]
    return found


def _ends(model: FlatModel) -> Tensor:
    return torch.tensor(model.sizes).cumsum(0)


def _require_near(found: Tensor, alone: Tensor, layers: Tensor) -> None:
    known = alone.isfinite().all(1)
    far = (found - alone)[known].double()
    whole = alone[known].double().norm(dim=1)
    for layer in range(int(layers[-1]) + 1):
        columns = layers == layer
        allowed = _NEAR * alone[known][:, columns].double().norm(dim=1) + _NEAR_WHOLE * whole
        if not bool((far[:, columns].norm(dim=1) <= allowed).all()):
            raise Untraceable("its gradients of examples that are taken together are not those of single ones")


class _KeepAll(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bernoulli variables are all one, as in a program without a generator."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is aten.bernoulli_.float:
            return aten.fill_.Scalar(args[0], 1)
        return function(*args, **(kwargs or {}))
