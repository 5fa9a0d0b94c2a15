"""A model's per-example gradients, written down as a graph of torch's own operations.

vmap sees to it that no example has a part in another's gradient. What is traced is `vmap(grad(loss))`, and with agents
`vmap` of it over θ. The graph holds for one number of examples: two of them give the graph for every number (`sizes`).
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fedspa.engine.traced import ops, recurrent
from fedspa.errors import first_line
from fedspa.examples import Examples, Tree, leaves, mapped, moved, zero_examples
from fedspa.learning.flat import FlatModel
from fedspa.learning.forward import Modes, attributes_kept, in_modes
from fedspa.learning.tasks import PerPerson


class Untraceable(Exception):
    """Why there is no graph."""


def capture(
    model: FlatModel, modes: Modes, like: Examples, size: int, agents: int | None = None, *, layers: bool = False
) -> fx.GraphModule:
    """(parameters, x, y) → per-example gradients of each parameter, [size, …], and which examples could be read.

    With agents everything has one more dimension, in front. Arguments are flat lists of tensors. `layers` keeps
    convolutions, linear layers and the loss of classes whole, as a GPU runs them.
    """
    loss = (_loss_of_person if isinstance(model.task, PerPerson) else _loss)(model, layers)
    mapping = torch.func.vmap(torch.func.grad(loss, has_aux=True), in_dims=(None, 0, 0), randomness="different")
    arguments = _arguments(model, like, size)
    if agents is not None:
        mapping = torch.func.vmap(mapping, in_dims=(0, 0, 0), randomness="different")
        arguments = pytree.tree_map(lambda leaf: leaf.expand(agents, *leaf.shape).clone(), arguments)
    return _traced(model, mapping, modes, arguments, layers)


Loss = Callable[[list[Tensor], Tree, Tree], tuple[Tensor, Tensor]]


def _loss(model: FlatModel, layers: bool) -> Loss:
    """(parameters, x, y) → the loss of one example, and whether it could be read."""

    def loss(parameters: list[Tensor], x: Tree, y: Tree) -> tuple[Tensor, Tensor]:
        one, target = (mapped(lambda leaf: leaf.unsqueeze(0), tree) for tree in (x, y))
        with _Guard(layers) as guard:
            found = model.loss_at(parameters, one, target)
        return found, guard.readable(found)

    return loss


def _loss_of_person(model: FlatModel, layers: bool) -> Loss:
    """The same of a person: the mean over the records that count, each taken by itself. In the slots behind them the
    first record is computed again, whatever lies there, and counts nothing."""
    assert isinstance(model.task, PerPerson)
    of_record = _loss(FlatModel(model.module, model.task.task), layers)
    of_records = torch.func.vmap(of_record, in_dims=(None, 0, 0), randomness="different")

    def loss(parameters: list[Tensor], x: Tree, y: Tree) -> tuple[Tensor, Tensor]:
        assert isinstance(x, dict)
        slots = torch.arange(len(next(leaves(y))), device=model.device)
        counts = slots < cast(Tensor, x["count"])
        records, targets = (mapped(partial(_or_first, counts), tree) for tree in (x["records"], y))
        losses, readable = of_records(parameters, records, targets)
        return torch.where(counts, losses, 0).sum() / counts.sum().clamp(min=1), readable.all()

    return loss


def _or_first(counts: Tensor, leaf: Tensor) -> Tensor:
    return torch.where(counts.view(-1, *[1] * (leaf.ndim - 1)), leaf, leaf[:1])


def _arguments(model: FlatModel, like: Examples, size: int) -> list[Any]:
    theta = model.flatten()
    return [list(model.parts(theta).values()), *(moved(zero_examples(tree, size), theta.device) for tree in like)]


def _traced(
    model: FlatModel, function: Callable[..., Any], modes: Modes, arguments: list[Any], layers: bool
) -> fx.GraphModule:
    """With all tensors of the arguments as arguments of its own, and those of the result as a list."""
    flat, spec = pytree.tree_flatten(arguments)
    with (
        _quiet(),
        _compiling(),
        _weights_as_they_lie(),
        in_modes(modes),
        attributes_kept(model.module),
        sdpa_kernel(SDPBackend.MATH),
        torch.random.fork_rng(devices=[]),
    ):
        try:
            return record(
                lambda *given: pytree.tree_leaves(function(*pytree.tree_unflatten(given, spec))), flat, in_order=layers
            )
        except Exception as error:  # a user's forward may raise anything where it cannot be mapped
            raise Untraceable(_first_sentence(error)) from error


class _Guard(TorchFunctionMode):
    """Indices that an example brings are held within what they index: on a CPU one outside would end the whole batch,
    on a GPU the process. The example counts as one that could not be read."""

    def __init__(self, layers: bool) -> None:
        super().__init__()
        self.layers = layers
        self._found: list[Tensor] = []

    def readable(self, like: Tensor) -> Tensor:
        """Whether all indices of this example were inside."""
        if not self._found:
            return torch.ones_like(like, dtype=torch.bool)
        return reduce(torch.Tensor.logical_and, self._found)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        rule = _GUARDED.get(function)
        if rule is not None:
            return rule(self, function, *args, **kwargs)
        whole = (
            self.layers and function in _LAYERS and args and args[0].dtype == torch.float32
        )  # as the kernels have it
        return (_LAYERS[function] if whole else function)(*args, **kwargs)

    def held(self, index: Tensor, size: int, allowed: int | None = None) -> Tensor:
        lines = self.layers and index.ndim and len(index) == 1
        self._found.append(ops.all_inside(index, size, allowed)[0] if lines else ops.inside(index, size, allowed).all())
        return cast(Tensor, ops.within(index, size, allowed))


def _embedding(
    guard: _Guard, function: Any, input: Tensor, weight: Tensor, padding_idx: int | None = None, *rest: Any, **more: Any
) -> Any:
    """The row of the padding has no gradient. vmap would leave it out of the first example's only."""
    held = guard.held(input, len(weight))
    found = function(held, weight, None, *rest, **more)
    if padding_idx is None:
        return found
    return torch.where((held == padding_idx % len(weight)).unsqueeze(-1), found.detach(), found)


def _class_loss(
    guard: _Guard, function: Any, input: Tensor, target: Tensor, weight: Tensor | None = None, *rest: Any, **named: Any
) -> Any:
    if not target.is_floating_point():
        classes = input.shape[1 if input.ndim > 1 else 0]
        ignored = rest[1] if len(rest) > 1 else named.get("ignore_index", -100)
        target = guard.held(target, classes, ignored)
        settings = {"reduction": "mean", "label_smoothing": 0.0, "ignore_index": ignored}
        plain = function is functional.cross_entropy and weight is None and not rest and settings | named == settings
        if guard.layers and plain and input.ndim == 2 and len(input) == 1:
            return ops.class_loss(input, target, ignored)
    return function(input, target, weight, *rest, **named)


def _along(guard: _Guard, function: Any, input: Tensor, dim: int, index: Tensor, **named: Any) -> Any:
    return function(input, dim, guard.held(index, input.shape[dim]), **named)


def _item(guard: _Guard, function: Any, input: Tensor, index: Any) -> Any:
    """`input[index]`. Whole numbers that pick may count from the end."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if not any(isinstance(part, Tensor) and part.dtype in _WHOLE for part in parts):
        return function(input, index)
    if any(part is Ellipsis or part is None or getattr(part, "dtype", None) == torch.bool for part in parts):
        return function(input, index)  # which dimension is which is not plain: what is not checked is refused
    for dimension, part in enumerate(parts):
        if isinstance(part, Tensor):
            size = input.shape[dimension]
            parts[dimension] = guard.held(torch.where(part < 0, part + size, part), size)
    return function(input, tuple(parts))


def _group_norm(guard: _Guard, function: Any, input: Tensor, *rest: Any, **named: Any) -> Any:
    return ops.group_norm(input, *rest, **named, layers=guard.layers)


def _recurrent(rule: Callable[..., Any], guard: _Guard, function: Any, *given: Any, **named: Any) -> Any:
    return rule(*given, **named)


_WHOLE = torch.int64, torch.int32
_GUARDED: dict[Any, Callable[..., Any]] = {
    functional.embedding: _embedding,
    functional.cross_entropy: _class_loss,
    functional.nll_loss: _class_loss,
    torch.gather: _along,
    Tensor.gather: _along,
    torch.index_select: _along,
    Tensor.index_select: _along,
    Tensor.__getitem__: _item,
    functional.group_norm: _group_norm,
    **{getattr(torch._VF, rule.__name__): partial(_recurrent, rule) for rule in recurrent.RULES},
}


def _convolved(x: Tensor, *rest: Any, **named: Any) -> Tensor:
    return ops.conv2d(x, *rest, **named) if x.ndim == 4 else functional.conv2d(x, *rest, **named)


_LAYERS: dict[Any, Callable[..., Any]] = {
    functional.conv2d: _convolved,
    functional.linear: ops.linear,
    functional.layer_norm: ops.layer_norm,
    functional.scaled_dot_product_attention: ops.attention,
    functional.max_pool2d: ops.max_pool2d,
    torch.max_pool2d: ops.max_pool2d,
}


@contextmanager
def _compiling() -> Iterator[None]:
    """Make torch.compiler.is_compiling() true. Modules then leave out decisions by a tensor's values that only save
    time: transformers' models look whether a mask hides anything."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


@contextmanager
def _weights_as_they_lie() -> Iterator[None]:
    """On a GPU, recurrent layers lay their weights side by side for cuDNN, which mapped ones cannot be."""
    before = nn.RNNBase.flatten_parameters
    nn.RNNBase.flatten_parameters = lambda self: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.RNNBase.flatten_parameters = before  # type: ignore[method-assign]


@contextmanager
def _quiet() -> Iterator[None]:
    """vmap warns where it falls back to a loop, which is noticed anyway."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _first_sentence(error: Exception) -> str:
    if "data-dependent control flow" in str(error):
        return "it has data-dependent control flow (an `if` by a tensor's values, or `.item()`)"
    return first_line(error).split(". ")[0][:160]


aten = torch.ops.aten


def record(
    function: Callable[..., Sequence[Tensor]], given: Sequence[Tensor], *, in_order: bool = False
) -> fx.GraphModule:
    """(given) → list of tensors. Tensors that come from elsewhere are held as they are. Nodes know shapes and types.
    `in_order` copies what an operation makes in another order than its dimensions': a GPU reads that slowly, and a sum
    of a transposed tensor would hand its order on through all layers."""
    recorder = _Recorder(given, in_order)
    with recorder:
        found = function(*given)
    return recorder.module(found)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, given: Sequence[Tensor], in_order: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._in_order = in_order
        self._graph, self._root = fx.Graph(), nn.Module()
        self._nodes: dict[int, fx.Node] = {}
        self._alive: list[Tensor] = []  # a tensor is known by its address, which another may have after it
        for number, tensor in enumerate(given):
            self._know(tensor, self._graph.placeholder(f"given_{number}"))

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is aten.lift_fresh.default:
            return self._fresh(*args)
        wanted = pytree.tree_map_only(Tensor, self._node, (args, kwargs))
        found = function(*args, **kwargs)
        made = self._graph.call_function(function, *wanted)
        if self._in_order and isinstance(found, Tensor) and not (found.is_contiguous() or _keeps_order(function)):
            found = found.contiguous()
            made = self._graph.call_function(aten.clone.default, (made,), {"memory_format": torch.contiguous_format})
        if isinstance(found, Tensor):
            self._know(found, made)
        elif isinstance(found, tuple | list):
            for place, each in enumerate(found):
                if isinstance(each, Tensor):
                    self._know(each, self._graph.call_function(operator.getitem, (made, place)))
        return found

    def _fresh(self, tensor: Tensor) -> Tensor:
        """What torch.tensor makes is made anew each time: a program that wrote into it would else find that again."""
        constant = self._node(tensor.detach().clone())
        self._know(tensor, self._graph.call_function(aten.clone.default, (constant,)))
        return tensor

    def module(self, found: Sequence[Tensor]) -> fx.GraphModule:
        self._graph.output([self._node(each) for each in found])
        self._nodes, self._alive = {}, []
        return fx.GraphModule(self._root, self._graph)

    def _know(self, tensor: Tensor, node: fx.Node) -> None:
        node.meta["shape"], node.meta["dtype"] = tuple(tensor.shape), tensor.dtype
        self._nodes[id(tensor)] = node
        self._alive.append(tensor)

    def _node(self, tensor: Tensor) -> fx.Node:
        """Where a tensor comes from; a constant, where nobody saw it made."""
        if id(tensor) not in self._nodes:
            name = f"constant_{len(self._root._buffers)}"
            self._root.register_buffer(name, tensor.detach(), persistent=False)
            self._know(tensor, self._graph.get_attr(name))
        return self._nodes[id(tensor)]


def _keeps_order(function: Any) -> bool:
    """Whether what an operation makes stays as it lies: a view, and what a kernel of ours lays out for its reader."""
    return function.is_view or function in ops.plain


def for_any_size(few: fx.Graph, more: fx.Graph, sizes: tuple[int, int]) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """A graph whose first argument is the number of examples; and which of its nodes stands for which of the first."""
    nodes, others = list(few.nodes), list(more.nodes)
    if [(n.op, str(n.target)) for n in nodes if n.op != "get_attr"] != [
        (n.op, str(n.target)) for n in others if n.op != "get_attr"
    ] or len(nodes) != len(others):
        raise Untraceable("its operations depend on the number of examples")
    graph = fx.Graph()
    merger = _Merger(graph, sizes)
    for one, other in zip(nodes, others):
        merger.add(one, other)
    return graph, merger.made


class _Merger:
    def __init__(self, graph: fx.Graph, sizes: tuple[int, int]) -> None:
        self._graph, self._sizes = graph, sizes
        self._size = graph.placeholder("size")
        self._lines: dict[tuple[int, int], fx.Node] = {}
        self.made: dict[fx.Node, fx.Node] = {}
        self._twins: dict[fx.Node, fx.Node] = {}

    def add(self, one: fx.Node, other: fx.Node) -> None:
        if one.op == "placeholder":
            made = self._graph.placeholder(str(one.target))
        else:
            args, kwargs = self._merged(one.args, other.args), self._merged(one.kwargs, other.kwargs)
            made = self._graph.create_node(one.op, one.target, args, kwargs)
        made.meta = dict(one.meta)
        self.made[one], self._twins[one] = made, other

    def _merged(self, one: Any, other: Any) -> Any:
        if isinstance(one, fx.Node):
            if self._twins[one] is not other:
                raise Untraceable("what its operations take depends on the number of examples")
            return self.made[one]
        if isinstance(one, dict):
            return {key: self._merged(one[key], other[key]) for key in one}
        if isinstance(one, tuple | list):
            if len(one) != len(other):
                raise Untraceable("its shapes depend on the number of examples")
            return type(one)(self._merged(a, b) for a, b in zip(one, other))
        if one == other or (one != one and other != other):  # or both are NaN
            return one
        return self._line(one, other)

    def _line(self, one: Any, other: Any) -> fx.Node:
        (small, large), whole = self._sizes, isinstance(one, int) and isinstance(other, int)
        if not whole or (other - one) % (large - small):
            raise Untraceable(f"{one} becomes {other} with {large} examples in place of {small}")
        slope = (other - one) // (large - small)
        line = slope, one - slope * small
        if line not in self._lines:
            self._lines[line] = self._graph.call_function(_line_at, (self._size, *line))
        return self._lines[line]


def _line_at(size: int, slope: int, start: int) -> int:
    return slope * size + start
