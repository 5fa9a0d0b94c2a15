"""Gradients by an engine compared with plain autograd on the module itself, on synthetic examples.

An engine computes at a θ that the module does not hold: it registers other tensors in place of the parameters, reads a
model by its layers, or runs a trace. What a module reaches by another way than its registration (through a dict, a
closure, another object) keeps its old value there and has no gradient: it would be trained by noise alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from fedspa.examples import Examples, Tree, count, in_float64, joined, moved, taken
from fedspa.learning import forward
from fedspa.learning.flat import FlatModel
from fedspa.learning.threads import Switches, generators_kept, one_example_a_time

SEED = 20  # of all that a forward pass draws
_EXAMPLES = 4  # each costs a backward pass by itself
_COLUMNS = 2048  # of a parameter, half of them where its gradient is largest: all B × d would be much
# Of a parameter's gradient, and of the whole one. What differs by more must be rounding that the model amplifies: then
# weights that are changed by a few units in the last place move the gradient by as much.
_NEAR, _NEAR_WHOLE = 2.0**14, 2.0**4
_MOVED, _AMPLIFIED = 2.0**6, 8.0
# Of rounding, of which all these are multiples.
FLOAT32_UNIT, TF32_UNIT = 2.0**-24, 2.0**-18

Rows = Callable[[Tensor, Tree, Tree, Tensor], Tensor]
Mode = Callable[[], AbstractContextManager[object]]


class Disagreement(Exception):
    """The names of parameters whose gradients differ; none where no synthetic example has a finite gradient."""

    def __init__(self, parameters: list[str]) -> None:
        super().__init__(", ".join(f"'{name}'" for name in parameters))
        self.parameters = parameters


def require_agreement(
    model: FlatModel,
    examples: list[Examples],
    rows: Rows,
    *,
    sizes: tuple[int, ...] = (1,),
    mode: Mode = nullcontext,
    unit: float = FLOAT32_UNIT,
) -> None:
    """Raise a `Disagreement` unless `rows(θ, x, y, coordinates)` are the gradients of the examples by plain autograd on
    `model.module`. The module must be in the modes that it is trained in, and `mode` is entered for each of its passes.
    The rows are asked for as many examples at a time as `sizes` say."""
    theta = _elsewhere(model.flatten())
    chosen = [*examples[: _EXAMPLES - 1], examples[-1]]
    x, y = (moved(joined([one[i] for one in chosen]), theta.device) for i in range(2))
    with generators_kept(theta.device), forward.attributes_kept(model.module), _full_precision(theta.device):
        plain = _Plain(model, mode, unit, x, y)
        alone, coordinates = plain.gradients(theta)
        if not bool(alone.isfinite().all(1).any()):
            raise Disagreement([])
        if lost := plain.lost():
            raise Disagreement(lost)

        def found(index: Tensor) -> Tensor:
            _seed(theta.device)
            return rows(theta, taken(x, index), taken(y, index), coordinates).to(alone)

        for size in sizes:
            numbers = torch.arange(len(chosen) if size == 1 else size, device=theta.device) % len(chosen)
            for index in torch.split(numbers, size):
                far = plain.far(found(index), alone[index], coordinates)
                if far:
                    near = plain.moved(theta, coordinates)[index]
                    far = plain.far(found(index), alone[index], coordinates, near)
                if far:
                    # With θ in the module, only those differ that have no gradient or a part of one.
                    with plain.holding(theta):
                        own = plain.far(found(index), alone[index], coordinates)
                    raise Disagreement([model.names[place] for place in own or far])


def _seed(device: torch.device) -> None:
    """Begin anew all that a forward pass draws: on a GPU it draws there."""
    torch.default_generator.manual_seed(SEED)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(SEED)


@contextmanager
def _full_precision(device: torch.device) -> Iterator[None]:
    """On a GPU, torch rounds the factors of convolutions to 10 bits unless it is forbidden."""
    if device.type != "cuda":
        yield
        return
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.allow_tf32, matmul.allow_tf32
    cudnn.allow_tf32 = matmul.allow_tf32 = False
    try:
        yield
    finally:
        cudnn.allow_tf32, matmul.allow_tf32 = before


def _elsewhere(theta: Tensor) -> Tensor:
    """A θ that the module does not hold. Where weights are zero, what lies behind them does not show in a gradient;
    where they are huge and cancel, nothing shows but rounding."""
    theta = theta.nan_to_num(0).clamp(-1, 1)
    return theta + 0.02 * torch.randn(theta.shape, generator=torch.Generator().manual_seed(1)).to(theta)


class _Plain:
    """Gradients by autograd, of the module's own parameters, with θ written into them for the time."""

    def __init__(self, model: FlatModel, mode: Mode, unit: float, x: Tree, y: Tree) -> None:
        self._model, self._mode, self._unit = model, mode, unit
        # An engine passes parameters of float32 even to a module that holds others.
        double = all(parameter.dtype == torch.float64 for parameter in model.parameters())
        self._x, self._y = (in_float64(tree) if double else tree for tree in (x, y))
        self._leaves: dict[int, Tensor] = {}
        self._ends = torch.tensor(model.sizes).cumsum(0)

    @contextmanager
    def holding(self, theta: Tensor) -> Iterator[None]:
        """Within it the module holds θ."""
        before = [parameter.detach().clone() for parameter in self._model.parameters()]
        try:
            self._model.load(theta)
            yield
        finally:
            with torch.no_grad():
                for parameter, value in zip(self._model.parameters(), before):
                    parameter.copy_(value)

    def gradients(self, theta: Tensor, coordinates: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """A row for each example, NaN where the module raises for it; and the coordinates of the columns."""
        with self.holding(theta):
            rows = [self._gradient(slice(number, number + 1), theta) for number in range(count(self._y))]
        if coordinates is None:
            coordinates = _looked_at(torch.stack(rows).nan_to_num(0, 0, 0).abs().sum(0), self._model.sizes)
        return torch.stack([row[coordinates] for row in rows]), coordinates

    def moved(self, theta: Tensor, coordinates: Tensor) -> Tensor:
        """The gradients at a θ that differs by a few units in the last place."""
        signs = torch.randn(theta.shape, generator=torch.Generator().manual_seed(2)).to(theta).sign()
        return self.gradients(theta * (1 + _MOVED * self._unit * signs), coordinates)[0]

    def _gradient(self, one: slice, theta: Tensor) -> Tensor:
        parameters, switches = self._model.parameters(), Switches()
        _seed(theta.device)
        try:
            with self._mode(), one_example_a_time(), forward.differentiable(self._model.module), torch.enable_grad():
                loss = self._model.task.loss(self._model.module, taken(self._x, one), taken(self._y, one))
                self._leaves.update((id(leaf), leaf) for leaf in _leaves(loss))
                parts = torch.autograd.grad(loss, parameters, materialize_grads=True)
            return torch.cat([part.reshape(-1) for part in parts]).to(theta)
        except (Exception, SystemExit):  # the user's forward may raise anything for what is synthetic
            return torch.full_like(theta, torch.nan)
        finally:
            switches.put_back()

    def lost(self) -> list[str]:
        """The parameters without a part in any loss, where a trainable tensor of the same shape has one that is not
        registered: a copied module whose closures lead to the parameters of the original."""
        registered = {id(parameter) for parameter in self._model.module.parameters()}
        stray = {leaf.shape for key, leaf in self._leaves.items() if key not in registered}
        named = zip(self._model.names, self._model.parameters())
        return [name for name, each in named if id(each) not in self._leaves and each.shape in stray]

    def far(self, found: Tensor, alone: Tensor, coordinates: Tensor, near: Tensor | None = None) -> list[int]:
        """The parameters whose gradients differ by more than rounding."""
        known = alone.isfinite().all(1) if near is None else (alone + near).isfinite().all(1)
        found, alone = found[known].double(), alone[known].double()
        whole, of = alone.norm(dim=1), torch.bucketize(coordinates, self._ends.to(coordinates), right=True)
        far = []
        for place in range(len(self._model.sizes)):
            columns = of == place
            allowed = self._unit * (_NEAR * alone[:, columns].norm(dim=1) + _NEAR_WHOLE * whole)
            if near is not None:
                allowed += _AMPLIFIED * (near[known].double() - alone)[:, columns].norm(dim=1)
            if not bool(((found - alone)[:, columns].norm(dim=1) <= allowed).all()):
                far.append(place)
        return far


def _leaves(loss: Tensor) -> Iterator[Tensor]:
    """The tensors that autograd would give a gradient of this loss."""
    left, seen = [loss.grad_fn], set()
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(leaf := getattr(node, "variable", None), Tensor):
            yield leaf
        left += [each for each, _ in node.next_functions]


def _looked_at(gradient: Tensor, sizes: list[int]) -> Tensor:
    """Return, of each parameter, the coordinates where `gradient` is largest, and some all over it."""
    chosen, first = [], 0
    for part in torch.split(gradient, sizes):
        each = max(1, min(len(part), _COLUMNS // 2))
        spread = torch.arange(0, len(part), -(-len(part) // each), device=gradient.device)
        chosen += [first + part.topk(min(each, len(part))).indices, first + spread]
        first += len(part)
    found: Tensor = torch.cat(chosen).unique()  # type: ignore[no-untyped-call]
    return found


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same to the bit; NaN equals NaN."""
    alike = one.dtype == other.dtype and one.shape == other.shape and one.device == other.device
    return alike and torch.equal(_bits(one), _bits(other))


def close(one: Tensor, other: Tensor, tolerance: float) -> bool:
    """Whether two tensors differ by at most that share of the largest number; NaN is close to NaN."""
    if one.shape != other.shape or not one.is_floating_point():
        return torch.equal(one, other)
    scale = float(one.nan_to_num(0, 0, 0).abs().max()) if one.numel() else 0.0
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


def _bits(values: Tensor) -> Tensor:
    return values.detach().contiguous().reshape(-1).view(torch.uint8)
