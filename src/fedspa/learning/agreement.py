"""Gradients by an engine compared with plain autograd on the module itself, on synthetic examples.

An engine computes at a θ that the module does not hold: it registers other tensors in place of the parameters, reads a
model by its layers, or runs a trace. What a module reaches by another way than its registration (through a dict, a
closure, another object) keeps its old value there and has no gradient: it would be trained by noise alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fedspa.examples import (
    Examples,
    Tree,
    count,
    in_float64,
    joined,
    layout,
    leaves,
    mapped,
    moved,
    named_leaves,
    taken,
)
from fedspa.learning.flat import FlatModel, copied
from fedspa.learning.forward import (
    Switches,
    attributes_kept,
    differentiable,
    generators_kept,
    in_float32,
    is_large,
    one_example_a_time,
)
from fedspa.learning.tasks import Classification, PerPerson, Task
from fedspa.learning.tasks.base import OutputTask

# Synthetic examples of the shapes and types of a record, to try a model where no private record may be looked at.

_MADE, _GIVEN = 7, 4  # synthetic examples, and at most so many of those given
_ANY = 2**16 - 1  # where a leaf takes this, it is no index
_LARGE = 1000  # integers of a leaf that takes any
_BYTE = 255
_HUGE = 5  # the one with very large numbers

Largest = dict[str, int]
_FOUND: WeakKeyDictionary[nn.Module, dict[tuple[str, ...], Largest]] = WeakKeyDictionary()


def synthetic_examples(
    example_spec: Examples, module: nn.Module, task: Task | None = None, *, every: bool = False
) -> list[Examples]:
    """Return examples of the shapes and types of `example_spec`, then its own, each with a first dimension of 1.

    Floats have the same values in another order, larger and smaller, negative and very large ones, and whole numbers.
    None is constant, for models that divide by an example's own spread. Integers cover the range that the module
    accepts: the whole vocabulary of an Embedding, for example. The first example has few zeros. Where the range of its
    target is not known it has that of `example_spec`, which is valid whatever the task. A large module is given the
    first, the very large one and the last only, unless `every` is asked for: each costs several gradients.
    """
    if isinstance(task, PerPerson):
        return _synthetic_persons(example_spec, module, task, every)
    first = Examples(_row(example_spec.x, 0), _row(example_spec.y, 0))
    largest = _Probe(module, task, first).largest()
    words = max(_vocabularies(module), default=_BYTE + 1) - 1
    made = [
        Examples(
            _varied(first.x, n, "x", largest, words),
            _varied(first.y, n, "y", largest, words) if n or largest.get("y", 1) > 1 else first.y,
        )
        for n in range(_MADE)
    ]
    given = range(min(_GIVEN, count(example_spec.x)))
    made += [Examples(_row(example_spec.x, n), _row(example_spec.y, n)) for n in given]
    return [made[0], made[_HUGE], made[-1]] if is_large(module) and not every else made


def _synthetic_persons(example_spec: Examples, module: nn.Module, task: PerPerson, every: bool) -> list[Examples]:
    """Return persons of as many synthetic records as may count, of one, of two, and so on, each beginning with
    another record."""
    assert isinstance(example_spec.x, dict)
    slots = next(leaves(example_spec.y)).shape[1]
    spec = Examples(*(mapped(lambda leaf: leaf[:, 0], tree) for tree in (example_spec.x["records"], example_spec.y)))
    records = synthetic_examples(spec, module, task.task, every=every)
    x, y = (joined([each[i] for each in records]) for i in range(2))

    def person(first: int) -> Examples:
        own = (first + torch.arange(slots)).unsqueeze(0) % len(records)
        number = torch.tensor([first % slots or slots])
        return Examples({"records": taken(x, own), "count": number}, taken(y, own))

    return [person(first) for first in range(len(records))]


def _row(tree: Tree, n: int) -> Tree:
    return mapped(lambda leaf: leaf.cpu().clone(), taken(tree, slice(n, n + 1)))


def _varied(tree: Tree, n: int, root: str, largest: Largest, words: int) -> Tree:
    return _named(tree, root, lambda name, leaf: _leaf(leaf, n, largest.get(name, 1), words, "mask" in name))


def _named(tree: Tree, name: str, function: Callable[[str, Tensor], Tensor]) -> Tree:
    """Return the same tree with `function` of each tensor's name and value."""
    if isinstance(tree, Tensor):
        return function(name, tree)
    if isinstance(tree, dict):
        return {key: _named(part, f"{name}.{key}", function) for key, part in tree.items()}
    return tuple(_named(part, f"{name}.{place}", function) for place, part in enumerate(tree))


def _leaf(leaf: Tensor, n: int, largest: int, words: int, mask: bool) -> Tensor:
    place = torch.arange(leaf.numel()).view(leaf.shape)
    if leaf.is_floating_point():
        ramp = torch.linspace(0, 1, leaf.numel()).view(leaf.shape)
        whole = (7 * place + 3) % (words + 1)
        made = [ramp, 1 - ramp, ramp.square() / 3, 3 * ramp + 1, -2 * ramp, 1e6 * (ramp - 0.5), whole]
    elif leaf.dtype != torch.bool and mask:
        # A mask that hides everything would make every output the same: none is made.
        there, late = torch.ones_like(place), (4 * place < 3 * place.numel()).long()
        made = [there, late, (place + 1) % 2, 1 - place % 3 % 2, there, late, there]
    elif largest == 1:
        thirds = place % 3 % 2
        made = [
            (place + 1) % 2,
            thirds,
            1 - thirds,
            torch.ones_like(place),
            leaf.flip(-1),
            leaf.roll(1),
            1 - place % 2,
        ]
    else:
        middle, all_of_them = largest // 2 + place % (largest - largest // 2 + 1), (7 * place + 3) % (largest + 1)
        made = [1 + place % largest, all_of_them, largest - place % (largest + 1), middle]
        made += [leaf.flip(-1), leaf.roll(1), all_of_them.flip(-1)]
    return made[n].to(leaf.dtype)


def _vocabularies(module: nn.Module) -> set[int]:
    return {layer.num_embeddings for layer in module.modules() if isinstance(layer, nn.Embedding | nn.EmbeddingBag)}


class _Probe:
    """The largest integer that a module accepts in each leaf of an example, found by trying on a copy."""

    def __init__(self, module: nn.Module, task: Task | None, first: Examples) -> None:
        self._module, self._task, self._first = module, task, first

    def largest(self) -> Largest:
        layouts = layout(self._first.x), layout(self._first.y), "" if self._task is None else self._task.name
        found = _FOUND.setdefault(self._module, {})
        if layouts not in found:
            found[layouts] = self._largest()
        return found[layouts]

    def _largest(self) -> Largest:
        known: Largest = {}
        if isinstance(self._task, Classification) and self._task.classes is not None:
            known["y"] = max(1, self._task.classes - 1)
        names = [name for name in self._integers() if name not in known]
        if not names:
            return known
        try:
            model = FlatModel(copied(self._module).to("cpu"), self._task)
        except Exception:  # torch cannot copy all that a module may hold; a trial refuses it by name
            return known
        theta = model.flatten()
        with generators_kept(), one_example_a_time(), torch.no_grad():
            for name in names:
                takes = partial(self._accepts, model, theta, known, name)
                most = next(filter(takes, self._candidates(model, theta)), 1)
                known[name] = _LARGE if most == _ANY else most
        return known

    def _integers(self) -> Iterator[str]:
        """Yield the names of leaves that may be indices. A task that makes targets of inputs has none of its own."""
        for root, tree in (("x", self._first.x), ("y", self._first.y)):
            for name, leaf in named_leaves(tree, root):
                integers = not leaf.is_floating_point() and leaf.dtype != torch.bool
                if integers and leaf.numel() and "mask" not in name:
                    yield name

    def _candidates(self, model: FlatModel, theta: Tensor) -> list[int]:
        """Return integers to try, from above: what only a leaf that is no index accepts, then the last row of each
        Embedding, and the last class of the outputs."""
        sizes = {_ANY + 1, *_vocabularies(model.module)}
        if isinstance(model.task, OutputTask):
            with suppress(Exception):  # the user's forward may raise anything
                sizes |= {*model.outputs(theta, _varied(self._first.x, 0, "x", {}, 1)).shape[1:]}
        return sorted({size - 1 for size in sizes if size > 2}, reverse=True)

    def _accepts(self, model: FlatModel, theta: Tensor, known: Largest, name: str, value: int) -> bool:
        def leaf_at(other: str, leaf: Tensor) -> Tensor:
            if other != name:
                return _leaf(leaf, 0, known.get(other, 1), 1, "mask" in other) if other.startswith("x") else leaf
            made = _leaf(leaf, 0, value, 1, mask=False)
            made.view(-1)[0] = value
            return made

        switches = Switches()
        try:
            x, y = (_named(tree, root, leaf_at) for root, tree in (("x", self._first.x), ("y", self._first.y)))
            with in_float32(model.module):
                return bool(model.mean_loss(theta, x, y).isfinite())
        except Exception:  # the user's forward may raise anything
            return False
        finally:
            switches.put_back()


SEED = 20  # of all that a forward pass draws
_EXAMPLES = 4  # each costs a backward pass by itself
_COLUMNS = 2048  # of a parameter, half of them where its gradient is largest: all B × d would be much
# Rounding of one operation in float32, of which the next are multiples: of a parameter's gradient, of the whole one,
# and of weights.
_UNIT = 2.0**-24
_NEAR, _NEAR_WHOLE, _MOVED = 2.0**14, 2.0**4, 2.0**4
# What differs by more must be rounding that the model amplifies. An engine rounds in another order than autograd, which
# is as if each weight were changed by a few units in the last place: the difference is compared with what such changes
# do to autograd's own gradient. One change is not enough, since behind a ReLU or a maximum the gradient jumps, and each
# change decides anew whether it does. So the largest effect counts, of as many changes as are needed, up to these.
_MOVES, _AMPLIFIED = 16, 4.0

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
) -> None:
    """Raise a `Disagreement` unless `rows(θ, x, y, coordinates)` are the gradients of the examples by plain autograd on
    `model.module`. The module must be in the modes that it is trained in, and `mode` is entered for each of its passes
    and for the engine's. The rows are asked for as many examples at a time as `sizes` say."""
    theta = _elsewhere(model.flatten())
    chosen = [*examples[:-1][: _EXAMPLES - 1], examples[-1]]
    x, y = (moved(joined([one[i] for one in chosen]), theta.device) for i in range(2))
    with generators_kept(theta.device), attributes_kept(model.module), _full_precision(theta.device):
        plain = _Plain(model, mode, theta, x, y)
        if not bool(plain.alone.isfinite().all(1).any()):
            raise Disagreement([])
        if lost := plain.lost():
            raise Disagreement(lost)

        def found(index: Tensor) -> Tensor:
            _seed(theta.device)
            with mode():
                return rows(theta, taken(x, index), taken(y, index), plain.coordinates).to(plain.alone)

        for size in sizes:
            numbers = torch.arange(len(chosen) if size == 1 else size, device=theta.device) % len(chosen)
            for index in torch.split(numbers, size):
                far = plain.far(found(index), index)
                if far:
                    # With θ in the module, only those differ that have no gradient or a part of one.
                    with plain.holding(theta):
                        own = plain.far(found(index), index)
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
    """Return a θ that the module does not hold. Where weights are zero, what lies behind them does not show in a
    gradient; where they are huge and cancel, nothing shows but rounding."""
    theta = theta.nan_to_num(0).clamp(-1, 1)
    return theta + 0.02 * torch.randn(theta.shape, generator=torch.Generator().manual_seed(1)).to(theta)


class _Plain:
    """Gradients by autograd, of the module's own parameters, with θ written into them for the time: `alone` has a row
    for each example, and the `coordinates` of its columns."""

    def __init__(self, model: FlatModel, mode: Mode, theta: Tensor, x: Tree, y: Tree) -> None:
        self._model, self._mode, self._theta = model, mode, theta
        # An engine passes parameters of float32 even to a module that holds others.
        double = all(parameter.dtype == torch.float64 for parameter in model.parameters())
        self._x, self._y = (in_float64(tree) if double else tree for tree in (x, y))
        self._leaves: dict[int, Tensor] = {}
        rows = self._gradients(theta)
        self.coordinates = _looked_at(rows.nan_to_num(0, 0, 0).abs().sum(0), model.sizes)
        self.alone = rows[:, self.coordinates]
        ends = torch.tensor(model.sizes).cumsum(0).to(theta.device)
        self._of = torch.bucketize(self.coordinates, ends, right=True)
        self._spreads = [torch.zeros_like(self._norms(self.alone))]  # by how much as many changes moved the gradient

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

    def _gradients(self, theta: Tensor) -> Tensor:
        """Return a row for each example, NaN where the module raises for it."""
        with self.holding(theta):
            return torch.stack([self._gradient(slice(n, n + 1), theta) for n in range(count(self._y))])

    def _spread(self, moves: int) -> Tensor:
        """Return the largest distance from `alone`, by example and parameter, of gradients at so many other θ."""
        while len(self._spreads) <= moves:
            generator = torch.Generator().manual_seed(1 + len(self._spreads))
            signs = torch.randn(self._theta.shape, generator=generator).to(self._theta).sign()
            near = self._gradients(self._theta * (1 + _MOVED * _UNIT * signs))[:, self.coordinates]
            by = self._norms(near.double() - self.alone).nan_to_num(0, 0)
            self._spreads.append(self._spreads[-1].maximum(by))
        return self._spreads[moves]

    def _norms(self, rows: Tensor) -> Tensor:
        """Return the norm of each parameter's part of each row."""
        squares = rows.new_zeros(len(rows), len(self._model.sizes), dtype=torch.float64)
        return squares.index_add(1, self._of, rows.double().square()).sqrt()

    def _gradient(self, one: slice, theta: Tensor) -> Tensor:
        parameters, switches = self._model.parameters(), Switches()
        _seed(theta.device)
        try:
            with self._mode(), one_example_a_time(), differentiable(self._model.module), torch.enable_grad():
                loss = self._model.task.loss(self._model.module, taken(self._x, one), taken(self._y, one))
                self._leaves.update((id(leaf), leaf) for leaf in _leaves(loss))
                parts = torch.autograd.grad(loss, parameters, materialize_grads=True)
            return torch.cat([part.reshape(-1) for part in parts]).to(theta)
        except (Exception, SystemExit):  # the user's forward may raise anything for what is synthetic
            return torch.full_like(theta, torch.nan)
        finally:
            switches.put_back()

    def lost(self) -> list[str]:
        """Return the parameters without a part in any loss, where a trainable tensor of the same shape has one that is
        not registered: a copied module whose closures lead to the parameters of the original."""
        registered = {id(parameter) for parameter in self._model.module.parameters()}
        stray = {leaf.shape for key, leaf in self._leaves.items() if key not in registered}
        named = zip(self._model.names, self._model.parameters())
        return [name for name, each in named if id(each) not in self._leaves and each.shape in stray]

    def far(self, found: Tensor, index: Tensor) -> list[int]:
        """Return the parameters whose gradients of the examples at `index` differ by more than rounding."""
        known = self.alone[index].isfinite().all(1)
        found, index = found[known], index[known]
        alone = self.alone[index]
        distance, own, whole = self._norms(found.double() - alone), self._norms(alone), alone.double().norm(dim=1)
        rounding = _UNIT * (_NEAR * own + _NEAR_WHOLE * whole.unsqueeze(1))
        far: list[int] = []
        for moves in range(_MOVES + 1):
            near = distance <= rounding + _AMPLIFIED * self._spread(moves)[index]
            far = (~near).any(0).nonzero().flatten().tolist()
            if not far:
                break
        return far


def _leaves(loss: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that autograd would give a gradient of this loss."""
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
    """Return whether two tensors are the same to the bit; NaN equals NaN."""
    alike = one.dtype == other.dtype and one.shape == other.shape and one.device == other.device
    return alike and torch.equal(_bits(one), _bits(other))


def close(one: Tensor, other: Tensor, tolerance: float) -> bool:
    """Return whether two tensors differ by at most that share of the largest number; NaN is close to NaN."""
    if one.shape != other.shape or not one.is_floating_point():
        return torch.equal(one, other)
    scale = float(one.nan_to_num(0, 0, 0).abs().max()) if one.numel() else 0.0
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


def _bits(values: Tensor) -> Tensor:
    return values.detach().contiguous().reshape(-1).view(torch.uint8)
