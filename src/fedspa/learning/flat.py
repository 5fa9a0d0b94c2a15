"""A module as a function of one flat parameter vector θ ∈ ℝ^d, and the loss of examples at θ.

The layout of θ is the module's `named_parameters()` in order; frozen parameters are constants and no part of θ.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from fedspa.examples import Tree, count, single_examples
from fedspa.learning import forward
from fedspa.learning.forward import Switches, one_example_a_time
from fedspa.learning.layers import check_layers, plain_values
from fedspa.learning.tasks import Classification, Task

T = TypeVar("T")

_SUMS = 4
NUMBERS = 1 + _SUMS
_CHUNK = 2**18
# Far below what another body differs by, far above what rounding on another processor does.
_TOLERANCE = 1e-3


class FlatModel:
    """Forward pass, loss and parameter layout of a module, without state of its own."""

    def __init__(self, module: nn.Module, task: Task | None = None) -> None:
        """The task is classification where none is given."""
        check_layers(module)
        self.module, self.task = module, task if task is not None else Classification()
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._names = list(trained)
        # A parameter may be registered several times, and a layer stand under several names: each slot counts once.
        names = {id(parameter): name for name, parameter in trained.items()}
        self._slots = [
            (layer, key, names[id(parameter)])
            for layer in module.modules()
            for key, parameter in layer._parameters.items()
            if id(parameter) in names
        ]
        self._shapes = [p.shape for p in trained.values()]
        self._sizes = [p.numel() for p in trained.values()]

    @property
    def sizes(self) -> list[int]:
        """Return how many coordinates of θ each parameter tensor has, in θ's order."""
        return list(self._sizes)

    @property
    def names(self) -> list[str]:
        """The names of the trained parameters, in θ's order."""
        return list(self._names)

    def parameters(self) -> list[Tensor]:
        """Return the trained parameters themselves, in θ's order."""
        named = dict(self.module.named_parameters())
        return [named[name] for name in self._names]

    @property
    def dimension(self) -> int:
        """d."""
        return sum(self._sizes)

    @property
    def device(self) -> torch.device:
        """Return the device of its trained parameters."""
        return next(p for p in self.module.parameters() if p.requires_grad).device

    def flatten(self) -> Tensor:
        """θ as the module holds it now (a copy, float32)."""
        return torch.cat([parameter.detach().reshape(-1) for parameter in self.parameters()]).to(torch.float32)

    def load(self, theta: Tensor) -> None:
        """Write θ back into the module."""
        with torch.no_grad():
            for parameter, value in zip(self.parameters(), self.parts(theta).values()):
                parameter.copy_(value)

    def outputs(self, theta: Tensor, x: Tree) -> Tensor:
        return self._at(self.parts(theta), lambda module: forward.outputs(module, x))

    def mean_loss(self, theta: Tensor, x: Tree, y: Tree) -> Tensor:
        return self._at(self.parts(theta), lambda module: self.task.loss(module, x, y))

    def loss_at(self, parameters: Sequence[Tensor], x: Tree, y: Tree) -> Tensor:
        """Return the same with θ in pieces, one per parameter tensor."""
        return self._at(dict(zip(self._names, parameters)), lambda module: self.task.loss(module, x, y))

    def gradient(self, theta: Tensor, x: Tree, y: Tree) -> Tensor:
        """Return the gradient of the mean loss."""
        theta = theta.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(self.mean_loss(theta, x, y), theta)
        return gradient

    def per_example_gradients(self, theta: Tensor, x: Tree, y: Tree) -> Tensor:
        """Gradients [b, d] of the examples, each taken by itself: of shapes, strides, memory alignment and threads that
        are always the same, so that a row is a function of its example and θ to the bit. In a batch it is not: torch
        chooses the order of a sum by the batch's size and an example's place in it, and where θ makes a sum cancel, its
        rounding is all that is left.

        Where the model raises for an example, that row is NaN: it counts as zero where it is clipped.
        """
        parts = {name: part.clone().requires_grad_() for name, part in self.parts(theta.detach()).items()}
        rows = theta.new_empty(count(y), self.dimension)
        with one_example_a_time():
            self._at(parts, lambda module: self._fill(rows, module, list(parts.values()), x, y))
        return rows

    def _fill(self, rows: Tensor, module: nn.Module, parameters: list[Tensor], x: Tree, y: Tree) -> None:
        switches = Switches()
        for row, one, target in zip(rows, single_examples(x), single_examples(y)):
            try:
                loss = self.task.loss(module, one, target)
                parts = torch.autograd.grad(loss, parameters, materialize_grads=True)
                torch.cat([part.reshape(-1) for part in parts], out=row)
            except (Exception, SystemExit):  # whatever a record makes the model raise: no refusal may reveal it
                row.fill_(torch.nan)
            finally:
                switches.put_back()

    def at(self, theta: Tensor, function: Callable[[nn.Module], T]) -> T:
        """`function` of the module while its trained parameters are θ."""
        return self._at(self.parts(theta), function)

    def _at(self, parameters: dict[str, Tensor], function: Callable[[nn.Module], T]) -> T:
        """`function` of the module while these tensors are registered in place of its trained parameters.

        Unlike torch.func.functional_call, this restores a layer that is registered under several names.
        """
        before = [layer._parameters[key] for layer, key, _ in self._slots]
        try:
            for layer, key, name in self._slots:
                layer._parameters[key] = parameters[name]  # type: ignore[assignment]
            with forward.differentiable(self.module):
                return function(self.module)
        finally:
            for (layer, key, _), parameter in zip(self._slots, before):
                layer._parameters[key] = parameter

    def parts(self, theta: Tensor) -> dict[str, Tensor]:
        """θ's pieces by the names of the parameters whose values they are."""
        parts = torch.split(theta, self._sizes)
        return {name: part.view(shape) for name, part, shape in zip(self._names, parts, self._shapes)}


def copied(module: nn.Module) -> nn.Module:
    """Return a deep copy. Tensors that a layer made of its parameters (torch.nn.utils.weight_norm) are copied as
    values: torch has no copy of a tensor with a history, and the layer makes them anew in each forward pass."""
    made = [v for layer in module.modules() for v in vars(layer).values() if isinstance(v, Tensor) and not v.is_leaf]
    return copy.deepcopy(module, {id(value): value.detach().clone() for value in made})


def sketch(module: nn.Module) -> tuple[float, ...]:
    """Return the norm of all that is constant, and its sums under four rows of public random signs; empty where nothing
    is.

    Values count by asinh(10⁴·v), so that no mask of −10³⁸ hides the weights beside it.
    """
    if not (constants := list(_constants(module))):
        return ()
    signs, squares, sums = np.random.PCG64(0), 0.0, torch.zeros(_SUMS, dtype=torch.float64)
    for values in constants:
        for chunk in torch.split(values.detach().reshape(-1), _CHUNK):
            shown = chunk.to("cpu", torch.float64).nan_to_num().clamp(-1e30, 1e30).mul(1e4).asinh()
            words = signs.random_raw(_SUMS * -(-len(shown) // 64))
            bits = np.unpackbits(words.view(np.uint8)).reshape(_SUMS, -1)[:, : len(shown)]
            sums += (2.0 * torch.from_numpy(bits).double() - 1.0) @ shown
            squares += float(shown @ shown)
    return (math.sqrt(squares), *sums.tolist())


def alike(ours: Sequence[float], theirs: Sequence[float]) -> bool:
    """Return whether two sketches can be of the same values."""
    if len(ours) != len(theirs):
        return False
    return all(abs(a - b) <= _TOLERANCE * ours[0] for a, b in zip(ours, theirs))


def _constants(module: nn.Module) -> Iterator[Tensor]:
    frozen = (p for p in module.parameters() if not p.requires_grad)
    for values in map(plain_values, (*frozen, *module.buffers())):
        yield torch.view_as_real(values) if values.is_complex() else values
