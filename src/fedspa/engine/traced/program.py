"""From a graph to what runs: per-example gradients that are cut to the mask as soon as they are there.

A layer's gradients of a whole batch are alive until they are cut, and no longer: B × d numbers never lie in memory
where the mask is small. An Embedding's are never made at all: of each example only the words that it has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fedspa.engine.traced import ops
from fedspa.engine.traced.allowed import RANDOM, depends_on_arguments, plain_name, require_allowed, require_gpu_rules
from fedspa.engine.traced.capture import Untraceable, capture, for_any_size
from fedspa.examples import Examples
from fedspa.learning.flat import FlatModel
from fedspa.learning.forward import Modes
from fedspa.mechanisms.clipping import LayerGradient

aten = torch.ops.aten
_SIZES = 3, 5
_VIEWS = frozenset({"view", "_unsafe_view", "reshape", "transpose", "permute", "t", "squeeze", "unsqueeze"})


@dataclass(frozen=True, slots=True)
class Layer:
    """How the gradients of one parameter of that `shape` come out. `order` says where each coordinate lies among the
    numbers that the program makes for an example. `words` is how many rows an Embedding has: its gradients come as the
    deltas of an example's tokens, and the tokens. `factors` are the operator that would make the gradients of weights
    and what it takes beside the layer's deltas and inputs, where these two come in their place."""

    order: Tensor
    shape: tuple[int, ...]
    words: int | None = None
    factors: tuple[Any, ...] | None = None


@dataclass(frozen=True, slots=True)
class Program:
    """`run(size, cuts, generator, *parameters, *x, *y)` gives what the cuts made of the layers, in their order, and
    which examples were readable. `largest` is how many numbers of an example a tensor holds at most."""

    run: Callable[..., Any]
    layers: list[Layer]
    draws: bool
    agents: int | None
    largest: int


def trace(
    model: FlatModel,
    modes: Modes,
    like: Examples,
    cut: Callable[..., Any],
    agents: int | None = None,
    *,
    factors: bool = False,
    layers: bool | None = None,
) -> Program:
    """A program for any number of examples made like those. `cut(size, cuts, i, made)` takes layer i's gradients.
    `factors`: of convolutions and linear layers the deltas and inputs, in place of what they make. `layers` as of
    `capture`, where it is not for the device to say."""
    on_gpu = model.device.type != "cpu"
    layers = on_gpu if layers is None else layers
    few, more = (capture(model, modes, like, size, agents, layers=layers) for size in _SIZES)
    _require_same_constants(few, more)
    require_allowed(few.graph)
    if on_gpu:
        require_gpu_rules(few.graph)
    graph, made = for_any_size(few.graph, more.graph, _SIZES)
    *gradients, readable = next(node for node in few.graph.nodes if node.op == "output").args[0]
    bases = [_base(node, (agents or 1) * _SIZES[0], 1 if agents is None else 2, factors) for node in gradients]
    output = next(node for node in graph.nodes if node.op == "output")
    size = next(iter(graph.nodes))
    with graph.inserting_before(size.next):
        cuts, generator = graph.placeholder("cuts"), graph.placeholder("generator")
    results = []
    for number, (base, layer) in enumerate(bases):
        node, given = made[base], base.args[:2] if layer.factors else _tokens(base)
        with graph.inserting_after(node if given is None else output.prev):
            what = node if given is None else tuple(made[each] for each in given)  # type: ignore[index]
            results.append(graph.call_function(cut, (size, cuts, number, what)))
    with graph.inserting_before(output):
        graph.output((results, made[readable]))
    graph.erase_node(output)
    draws = _with_own_operations(graph, generator)
    _earliest(graph, results)
    graph.eliminate_dead_code()
    module = fx.GraphModule(few, graph)
    largest = max(_numbers(node, (agents or 1) * _SIZES[0]) for node in few.graph.nodes if "shape" in node.meta)
    return Program(module.forward, [layer for _, layer in bases], draws, agents, largest)


def _with_own_operations(graph: fx.Graph, generator: fx.Node) -> bool:
    """Operators in the place of which plain functions run; whether any draws."""
    draws = False
    schemas = (getattr(node.target, "_schema", None) for node in graph.nodes)
    overwrites = any(schema is not None and schema.is_mutable for schema in schemas)
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is aten.clone.default and node.kwargs and not overwrites:
            node.target = _in_order
        elif node.target in ops.plain:
            node.target = ops.plain[node.target]
        elif node.target is aten.convolution_backward.default and tuple(node.args[-1]) == (False, True, False):
            node.target = ops.weights_of_groups
        elif plain_name(node) in RANDOM:
            if node.target not in DRAWN:
                raise Untraceable(f"it draws by {node.target}")
            named = {key: value for key, value in node.kwargs.items() if key in _KEPT}
            node.target, node.kwargs, draws = DRAWN[node.target], {**named, "generator": generator}, True
    return draws


def _in_order(x: Tensor, *, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
    """A copy in the order of the dimensions, of what has another: where a program overwrites nothing, that is enough.
    Kernels may lay out what they make in another way than the trace saw."""
    return x.contiguous(memory_format=memory_format)


# What runs in the place of an operation that draws. Without a generator, for `verify`, each gives what is drawn always.


def _bernoulli(like: Tensor, chance: float, *, generator: torch.Generator | None) -> Tensor:
    return _fill_bernoulli(torch.empty_like(like, memory_format=torch.contiguous_format), chance, generator=generator)


@fx.node.has_side_effect
def _fill_bernoulli(values: Tensor, chance: float = 0.5, *, generator: torch.Generator | None) -> Tensor:
    return values.fill_(1) if generator is None else values.bernoulli_(chance, generator=generator)


def _dropout(
    x: Tensor, chance: float, training: bool | None, *, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    if not training:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    kept = _bernoulli(x, 1 - chance, generator=generator)
    return x * kept / (1 - chance if chance < 1 else 1.0), kept.bool()


def _uniform(size: Sequence[int], *, generator: torch.Generator | None, **named: Any) -> Tensor:
    values = torch.empty(size, **named)
    return values.fill_(0.5) if generator is None else values.uniform_(generator=generator)


def _normal(size: Sequence[int], *, generator: torch.Generator | None, **named: Any) -> Tensor:
    values = torch.empty(size, **named)
    return values.fill_(0.5) if generator is None else values.normal_(generator=generator)


def _like(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def made(x: Tensor, *, generator: torch.Generator | None, **named: Any) -> Tensor:
        return draw(x.shape, generator=generator, **{"dtype": x.dtype, "device": x.device, **named})

    return made


def _whole(low: int, high: int, size: Sequence[int], *, generator: torch.Generator | None, **named: Any) -> Tensor:
    values = torch.empty(size, **{"dtype": torch.int64, **named})
    return values.fill_((low + high) // 2) if generator is None else values.random_(low, high, generator=generator)


def _whole_from_zero(high: int, size: Sequence[int], **named: Any) -> Tensor:
    return _whole(0, high, size, **named)


_KEPT = ("dtype", "device")
DRAWN: dict[Any, Callable[..., Any]] = {
    aten.bernoulli.p: _bernoulli,
    aten.bernoulli_.float: _fill_bernoulli,
    aten.native_dropout.default: _dropout,
    aten.rand.default: _uniform,
    aten.rand_like.default: _like(_uniform),
    aten.randn.default: _normal,
    aten.randn_like.default: _like(_normal),
    aten.randint.default: _whole_from_zero,
    aten.randint.low: _whole,
}


def without_draws(function: Any, args: Sequence[Any], named: dict[str, Any]) -> Any:
    """What an operation that draws gives in a program without a generator."""
    return DRAWN[function](*args, **{key: value for key, value in named.items() if key in _KEPT}, generator=None)


def _base(node: fx.Node, examples: int, leading: int, factors: bool) -> tuple[fx.Node, Layer]:
    """Where a gradient comes from when views are left out, and how its coordinates lie there."""
    chain: list[fx.Node] = []
    base = node
    while _is_view(base) and _size(base.all_input_nodes[0]) == _size(node):
        chain.append(base)
        base = base.all_input_nodes[0]
    if base.op != "call_function":
        base, chain = node, []
    where = torch.arange(_size(base)).view(base.meta["shape"])
    for view in reversed(chain):
        rest = [where if isinstance(arg, fx.Node) else arg for arg in view.args]
        where = view.target(*rest)  # type: ignore[operator]
    rows, each = where.reshape(examples, -1), _size(base) // examples
    expected = rows[0] + torch.arange(examples).unsqueeze(1) * each
    if not torch.equal(rows, expected):
        base, rows, each = node, torch.arange(_size(node)).view(examples, -1), _size(node) // examples
    shape, words, found = node.meta["shape"][leading:], None, None
    if _tokens(base) is not None:
        words = int(base.args[2]) // examples  # type: ignore[arg-type]
    elif factors and base.target in (ops.convolved_weights_node, ops.product_weights_node):
        found = base.target, *base.args[2:]
    return base, Layer(rows[0].clone(), shape, words, found)


def _tokens(base: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Deltas and tokens, where the gradient is an Embedding's."""
    if base.target is not aten.embedding_dense_backward.default:
        return None
    deltas, tokens, _, padding, by_frequency = base.args
    if padding != -1 or by_frequency or not depends_on_arguments(tokens):  # type: ignore[arg-type]
        return None  # the last are the same tokens for all, as of positions: vmap has made one table for all
    return deltas, tokens  # type: ignore[return-value]


def _size(node: fx.Node) -> int:
    return math.prod(node.meta["shape"])


def _numbers(node: fx.Node, examples: int) -> int:
    """How many numbers of an example it makes. The gradient of an Embedding is not made: its tokens are compared."""
    tokens = _tokens(node) if node.op == "call_function" else None
    return _size(node) // examples if tokens is None else (_size(tokens[1]) // examples) ** 2


def _is_view(node: fx.Node) -> bool:
    return node.op == "call_function" and str(node.target).split(".")[1:2] in [[name] for name in _VIEWS]


def _earliest(graph: fx.Graph, results: Sequence[fx.Node]) -> None:
    """Each cut right after what it takes, so that nothing waits for the end."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    for result in results:
        last = max(result.all_input_nodes, key=order.__getitem__)
        last.append(result)


def _require_same_constants(few: fx.GraphModule, more: fx.GraphModule) -> None:
    """Tensors that a module made of the number of examples would be wrong for every other."""
    for one, other in zip(*([n for n in each.graph.nodes if n.op == "get_attr"] for each in (few, more))):
        first, second = getattr(few, str(one.target)), getattr(more, str(other.target))
        if first.shape != second.shape or not torch.equal(first, second):
            raise Untraceable("it keeps a tensor that depends on the number of examples")


class Cuts:
    """One agent's mask, layer by layer. Columns of a row are the active coordinates in their order."""

    def __init__(self, layers: Sequence[Layer], coordinates: Tensor | None, device: torch.device) -> None:
        self._layers, self._device = layers, device
        sizes = [len(layer.order) for layer in layers]
        ends = torch.tensor(sizes, device=device).cumsum(0)
        self.width = int(ends[-1]) if coordinates is None else len(coordinates)
        firsts = [0, *ends.tolist()]
        bounds = firsts if coordinates is None else [0, *torch.searchsorted(coordinates, ends).tolist()]
        self._first = bounds[:-1]
        self._wanted = [
            None if coordinates is None else coordinates[low:high] - first
            for low, high, first in zip(bounds, bounds[1:], firsts)
        ]
        # Where in what a program makes for an example the active coordinates lie; None where they are all, in order.
        self._where = [_where(layer.order.to(device), wanted) for layer, wanted in zip(layers, self._wanted)]
        self._columns: dict[int, Tensor] = {}

    def take(self, number: int, size: int, made: Any) -> LayerGradient:
        """Return the gradients of layer `number` for `size` examples, cut to the mask."""
        first = self._first[number]
        if self._layers[number].words is not None:
            return self._of_tokens(number, size, *made)
        where = self._where[number]
        rows = made.reshape(size, -1)
        return LayerGradient(rows.clone() if where is None else rows.index_select(1, where), first)

    def _of_tokens(self, number: int, size: int, deltas: Tensor, tokens: Tensor) -> LayerGradient:
        """An example's gradient of an Embedding has a row for each word that it has: the sum of that word's deltas."""
        layer = self._layers[number]
        assert layer.words is not None
        tokens = tokens.reshape(size, -1) % layer.words  # each example's were moved beyond those of the one before
        deltas = deltas.reshape(size, tokens.shape[1], -1)
        same = tokens.unsqueeze(2) == tokens.unsqueeze(1)
        first = ~torch.tril(same, -1).any(2)  # of its kind, in its example
        values = torch.bmm(same.to(deltas.dtype), deltas)
        columns = self._columns_of(number, layer.words)[tokens]
        dropped = ~first.unsqueeze(2) | (columns == self.width)
        return LayerGradient(
            values.masked_fill_(dropped, 0).flatten(1), columns.masked_fill(dropped, self.width).flatten(1)
        )

    def _columns_of(self, number: int, words: int) -> Tensor:
        """[words, features]: the column of each of an Embedding's coordinates; `width` where it is not active."""
        if number not in self._columns:
            wanted, first = self._wanted[number], self._first[number]
            size = len(self._layers[number].order)
            columns = torch.full((size,), self.width, device=self._device)
            columns[slice(None) if wanted is None else wanted] = torch.arange(
                first, first + (size if wanted is None else len(wanted)), device=self._device
            )
            self._columns[number] = columns.view(words, -1)
        return self._columns[number]


def take(size: int, cuts: Cuts, number: int, made: Any) -> LayerGradient:
    """What a program calls for each layer."""
    return cuts.take(number, size, made)


def _where(order: Tensor, wanted: Tensor | None) -> Tensor | None:
    if wanted is not None:
        return order[wanted]
    return None if torch.equal(order, torch.arange(len(order), device=order.device)) else order
