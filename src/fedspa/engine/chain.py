"""The layers that the fast back ends know, as plain descriptions.

Offsets are positions in θ, laid out as in `FlatModel`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any, Literal, get_args

import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.nn.modules.dropout import _DropoutNd

from fedspa.engine import Unsupported, combine
from fedspa.errors import listed
from fedspa.learning.flat import copied

_TRACING = Lock()  # torch.fx patches torch's own modules while it traces

Shape = tuple[int, ...]
Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Weighted:
    """A Conv2d, or a Linear as a convolution of one pixel. The weight is [outputs, K]."""

    kind: Literal["conv", "linear"]
    channels: int
    height: int
    width: int
    outputs: int
    kernel: Pair
    stride: Pair
    padding: Pair
    weight: int
    bias: int | None

    @property
    def columns(self) -> int:
        """K: the inputs of one output value."""
        return self.channels * self.kernel[0] * self.kernel[1]

    @property
    def out(self) -> Pair:
        return after((self.height, self.width), self.kernel, self.stride, self.padding)

    @property
    def positions(self) -> int:
        return self.out[0] * self.out[1]

    @property
    def one_pixel(self) -> bool:
        """Whether a product with the weight is all there is."""
        return self.height * self.width * self.kernel[0] * self.kernel[1] == 1 and self.padding == (0, 0)

    @property
    def size(self) -> int:
        """Parameters."""
        return self.outputs * (self.columns + (self.bias is not None))


@dataclass(frozen=True, slots=True)
class Pool:
    """Max or mean over windows of an image."""

    kind: Literal["max", "mean"]
    image: tuple[int, int, int]
    kernel: Pair
    stride: Pair
    padding: Pair
    count_padding: bool

    @property
    def halves(self) -> bool:
        """The common case: windows of 2 × 2 that neither overlap nor leave the image."""
        return self.kind == "max" and self.kernel == self.stride == (2, 2) and self.padding == (0, 0)

    @property
    def out(self) -> Pair:
        return after(self.image[1:], self.kernel, self.stride, self.padding)


@dataclass(frozen=True, slots=True)
class Norm:
    """A GroupNorm or LayerNorm: each of `groups` equal runs of an example's values to mean 0 and variance 1, then
    times a weight and plus a bias. Seen as [outer, parameters, inner], a value's place in the middle is its weight's.
    """

    groups: int
    outer: int
    parameters: int
    inner: int
    epsilon: float
    weight: int | None
    bias: int | None

    @property
    def inputs(self) -> int:
        return self.outer * self.parameters * self.inner

    @property
    def size(self) -> int:
        return self.parameters * ((self.weight is not None) + (self.bias is not None))


@dataclass(frozen=True, slots=True)
class Embedding:
    """Whole numbers below `words` → their rows of a [words, width] weight."""

    words: int
    width: int
    tokens: int
    weight: int

    @property
    def size(self) -> int:
        return self.words * self.width


@dataclass(frozen=True, slots=True)
class Activation:
    kind: Literal["relu", "tanh"]


@dataclass(frozen=True, slots=True)
class Flatten:
    """Changes the shape, not the data."""


Layer = Weighted | Pool | Norm | Embedding | Activation | Flatten


def after(sides: Shape, kernel: Pair, stride: Pair, padding: Pair) -> Pair:
    """Lines and columns of what windows over an image give."""
    down, across = ((sides[i] + 2 * padding[i] - kernel[i]) // stride[i] + 1 for i in (0, 1))
    if down < 1 or across < 1:
        raise Unsupported(f"a window of {kernel} does not fit an image of {sides}")
    return down, across


def describe(module: nn.Module, input_shape: Shape, takes: tuple[type, ...] = get_args(Layer)) -> list[Layer]:
    """The layers in the order in which data passes them, of the kinds that a back end takes; raises `Unsupported`."""
    for name, layer in module.named_modules():
        if any(getattr(layer, hooks) for hooks in _HOOKS) or "forward" in vars(layer):
            raise Unsupported(f"layer '{name or '(root)'}' has hooks or a forward of its own")
    leaves = _chain(module, takes)
    offsets: dict[Tensor, int] = {}
    end = 0
    for parameter in module.parameters():
        offsets[parameter] = end
        end += parameter.numel()
    layers: list[Layer] = []
    shape = input_shape
    for leaf in leaves:
        made, shape = _MAKERS[type(leaf)][1](leaf, shape, offsets)
        layers += made
    if offsets:
        raise Unsupported("some parameters are not in a known layer that is used once")
    if len(shape) != 1:
        raise Unsupported(
            f"the model ends in an output of shape {shape}, not in one score a class", "end in Flatten and Linear"
        )
    return layers


# What torch runs around a layer: its outputs are then not those of its kind.
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def _chain(module: nn.Module, takes: tuple[type, ...]) -> list[nn.Module]:
    """The leaf layers in the order in which data passes them; functional relu, tanh, flatten and pooling included. All
    that is wrong is told at once."""
    faults = list(_held(module))
    layers: list[nn.Module] = []
    try:
        graph, leaves = _traced(module)
        known = [kind for kind, (made, _) in _MAKERS.items() if made is None or made in takes]
        unknown = {node: leaf for node, leaf in leaves.items() if type(leaf) not in known}
        if unknown:
            faults.append(_strangers(unknown, known))
        layers = _in_a_row(graph, leaves, unknown)
    except Unsupported as why:
        faults.append(why)
    if faults:
        raise combine(faults)
    return layers


def _held(module: nn.Module) -> Iterator[Unsupported]:
    """What a module holds beside parameters that are trained."""
    frozen = [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
    if frozen:
        mend = "train them too, or give the frozen part's outputs as records and the rest as the model"
        yield Unsupported(f"the model has frozen parameters ({listed(frozen)})", mend)
    buffers = [name for name, _ in module.named_buffers()]
    if buffers:
        yield Unsupported(f"the model has buffers ({listed(buffers)})", f"leave out the buffers {listed(buffers)}")


def _traced(module: nn.Module) -> tuple[fx.Graph, dict[fx.Node, nn.Module]]:
    """With the layers that it calls."""
    try:
        with _TRACING:
            graph = _Tracer().trace(copied(module))  # tracing leaves its marks on a module that sets attributes
    except _Untraceable as why:
        mend = "freeze that part instead (requires_grad_(False)), or leave the switch out"
        raise Unsupported(f"{why}, which no chain of layers says", mend) from why
    except Exception as cause:  # tracing runs the user's forward, which may raise anything
        raise Unsupported(f"torch.fx cannot trace {type(module).__name__} ({type(cause).__name__})") from cause
    modules = dict(module.named_modules())
    return graph, {node: modules[str(node.target)] for node in graph.nodes if node.op == "call_module"}


class _Untraceable(Exception):
    """A part of the forward pass runs under a switch of torch's that a graph of its operations does not have."""


class _Tracer(fx.Tracer):
    """Refuses a forward pass that switches gradients off or autocast on for a part of itself: the graph would train
    what the module keeps as it is, or compute in another precision."""

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        with torch.enable_grad():
            self._before = _switches()
            return super().trace(root, concrete_args)

    def create_node(self, *arguments: Any, **options: Any) -> fx.Node:
        if _switches() != self._before:
            raise _Untraceable("it runs a part of itself under torch.no_grad or torch.autocast")
        return super().create_node(*arguments, **options)


def _switches() -> tuple[bool, ...]:
    return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")


def _strangers(unknown: Mapping[fx.Node, nn.Module], known: list[type[nn.Module]]) -> Unsupported:
    """The layers that a back end does not know, kind by kind."""
    kinds: dict[type[nn.Module], list[str]] = {}
    for node, leaf in unknown.items():
        kinds.setdefault(type(leaf), []).append(str(node.target))
    told = [f"{kind.__name__} ({listed(names)})" for kind, names in kinds.items()]
    leave = all(issubclass(kind, _DropoutNd) for kind in kinds)
    mend = (
        f"leave {', '.join(told)} out: the noise regularises anyway"
        if leave
        else f"replace {', '.join(told)} by layers that it knows: {', '.join(kind.__name__ for kind in known)}"
    )
    return Unsupported(f"it knows no layer {', '.join(told)}", mend)


def _in_a_row(graph: fx.Graph, leaves: Mapping[fx.Node, nn.Module], unknown: Container[fx.Node]) -> list[nn.Module]:
    layers: list[nn.Module] = []
    previous: fx.Node | None = None
    for node in graph.nodes:
        if node.op == "output":
            if node.args[0] is not previous:
                raise Unsupported("the model returns something else than its last layer's output")
            continue
        if node.op == "placeholder":
            if previous is not None:
                raise Unsupported("the model takes more than one input")
        elif not node.args or node.args[0] is not previous or len(node.all_input_nodes) != 1:
            raise Unsupported(f"'{node.name}' makes the model more than a plain chain of layers")
        elif node.op == "call_module":
            layers.append(leaves[node])
        elif node.target is operator.getitem and previous in unknown:
            pass  # one of several outputs, as an LSTM has: it is the layer that is not known
        elif node.target == "long" and node.op == "call_method" and not layers:
            pass  # records are float32, and an Embedding wants whole numbers: it takes them as they are here
        else:
            layers.append(_functional(node))
        previous = node
    return layers


def _functional(node: fx.Node) -> nn.Module:
    target = node.target if node.op == "call_function" else getattr(torch.Tensor, str(node.target), None)
    rest, named = node.args[1:], dict(node.kwargs)
    if target in _FUNCTIONS:
        named.pop("inplace", None)
        return _FUNCTIONS[target](*rest, **named)
    raise Unsupported(f"'{node.name}' is an operation it does not know")


# What a call inside `forward` amounts to.
_FUNCTIONS: dict[Any, Callable[..., nn.Module]] = {
    functional.relu: nn.ReLU,
    torch.relu: nn.ReLU,
    torch.Tensor.relu: nn.ReLU,
    functional.tanh: nn.Tanh,
    torch.tanh: nn.Tanh,
    torch.Tensor.tanh: nn.Tanh,
    functional.max_pool2d: nn.MaxPool2d,
    torch.max_pool2d: nn.MaxPool2d,
    functional.avg_pool2d: nn.AvgPool2d,
    torch.flatten: nn.Flatten,
    torch.Tensor.flatten: nn.Flatten,
}


def _activation(layer: nn.ReLU | nn.Tanh, shape: Shape, _offsets: dict[Tensor, int]) -> tuple[list[Layer], Shape]:
    return [Activation("relu" if isinstance(layer, nn.ReLU) else "tanh")], shape


def _flatten(layer: nn.Flatten, shape: Shape, _offsets: dict[Tensor, int]) -> tuple[list[Layer], Shape]:
    if layer.start_dim != 1 or layer.end_dim not in (-1, len(shape)):
        raise Unsupported("a Flatten that keeps some dimensions", "flatten all dimensions of an example")
    return [Flatten()], (math.prod(shape),)


def _identity(_layer: nn.Identity, shape: Shape, _offsets: dict[Tensor, int]) -> tuple[list[Layer], Shape]:
    return [], shape


def _conv(layer: nn.Conv2d, shape: Shape, offsets: dict[Tensor, int]) -> tuple[list[Layer], Shape]:
    if layer.groups != 1 or layer.dilation != (1, 1) or layer.padding_mode != "zeros":
        raise Unsupported("a Conv2d with groups, dilation or another padding than zeros")
    if len(shape) != 3 or shape[0] != layer.in_channels:
        raise Unsupported(f"a Conv2d of {layer.in_channels} channels does not fit records of shape {shape}")
    kernel, stride = _pair(layer.kernel_size), _pair(layer.stride)
    if layer.padding == "same" and (kernel[0] % 2 == 0 or kernel[1] % 2 == 0):
        raise Unsupported("a Conv2d with padding 'same' and an even kernel")
    if layer.padding == "same":
        padding = (kernel[0] // 2, kernel[1] // 2)
    else:
        padding = (0, 0) if layer.padding == "valid" else _pair(layer.padding)
    if min(padding) < 0:
        raise Unsupported("a Conv2d with negative padding")
    weight, bias = _take(offsets, layer.weight), _take_any(offsets, layer.bias)
    made = Weighted("conv", shape[0], shape[1], shape[2], layer.out_channels, kernel, stride, padding, weight, bias)
    return [made], (layer.out_channels, *made.out)


def _linear(layer: nn.Linear, shape: Shape, offsets: dict[Tensor, int]) -> tuple[list[Layer], Shape]:
    if shape != (layer.in_features,):
        raise Unsupported(f"a Linear of {layer.in_features} features does not fit an input of shape {shape}")
    weight, bias = _take(offsets, layer.weight), _take_any(offsets, layer.bias)
    made = Weighted("linear", layer.in_features, 1, 1, layer.out_features, (1, 1), (1, 1), (0, 0), weight, bias)
    return [made], (layer.out_features,)


def _pool(layer: nn.MaxPool2d | nn.AvgPool2d, shape: Shape, _offsets: dict[Tensor, int]) -> tuple[list[Layer], Shape]:
    name = type(layer).__name__
    if len(shape) != 3:
        raise Unsupported(f"a {name} does not fit an input of shape {shape}")
    if layer.ceil_mode:
        raise Unsupported(f"a {name} with ceil_mode", f"ceil_mode=False in {name}, and the next Linear to fit")
    kernel, padding = _pair(layer.kernel_size), _pair(layer.padding)
    stride = kernel if layer.stride is None else _pair(layer.stride)
    if any(not 0 <= 2 * p <= k for p, k in zip(padding, kernel)):
        raise Unsupported(f"a {name} whose padding is negative or more than half of its kernel")
    image = (shape[0], shape[1], shape[2])
    if isinstance(layer, nn.MaxPool2d):
        if _pair(layer.dilation) != (1, 1) or layer.return_indices:
            raise Unsupported("a MaxPool2d with dilation or indices")
        made = Pool("max", image, kernel, stride, padding, False)
    else:
        if layer.divisor_override is not None:
            raise Unsupported("an AvgPool2d with a divisor of its own")
        made = Pool("mean", image, kernel, stride, padding, layer.count_include_pad)
    return [made], (shape[0], *made.out)


def _group_norm(layer: nn.GroupNorm, shape: Shape, offsets: dict[Tensor, int]) -> tuple[list[Layer], Shape]:
    if shape[0] != layer.num_channels:
        raise Unsupported(f"a GroupNorm of {layer.num_channels} channels does not fit an input of shape {shape}")
    weight, bias = _take_any(offsets, layer.weight), _take_any(offsets, layer.bias)
    inner = math.prod(shape[1:])
    return [Norm(layer.num_groups, 1, shape[0], inner, layer.eps, weight, bias)], shape


def _layer_norm(layer: nn.LayerNorm, shape: Shape, offsets: dict[Tensor, int]) -> tuple[list[Layer], Shape]:
    inside = tuple(layer.normalized_shape)
    if shape[len(shape) - len(inside) :] != inside:
        raise Unsupported(f"a LayerNorm over {inside} does not fit an input of shape {shape}")
    weight, bias = _take_any(offsets, layer.weight), _take_any(offsets, layer.bias)
    outer = math.prod(shape[: len(shape) - len(inside)])
    return [Norm(outer, outer, math.prod(inside), 1, layer.eps, weight, bias)], shape


def _embedding(layer: nn.Embedding, shape: Shape, offsets: dict[Tensor, int]) -> tuple[list[Layer], Shape]:
    if layer.padding_idx is not None or layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse:
        raise Unsupported("an Embedding with padding_idx, max_norm, scale_grad_by_freq or sparse gradients")
    made = Embedding(layer.num_embeddings, layer.embedding_dim, math.prod(shape), _take(offsets, layer.weight))
    return [made], (*shape, layer.embedding_dim)


_Maker = Callable[[Any, Shape, dict[Tensor, int]], tuple[list[Layer], Shape]]
# Each kind, what it is described by, and how.
_MAKERS: dict[type[nn.Module], tuple[type | None, _Maker]] = {
    nn.Conv2d: (Weighted, _conv),
    nn.Linear: (Weighted, _linear),
    nn.MaxPool2d: (Pool, _pool),
    nn.AvgPool2d: (Pool, _pool),
    nn.GroupNorm: (Norm, _group_norm),
    nn.LayerNorm: (Norm, _layer_norm),
    nn.Embedding: (Embedding, _embedding),
    nn.ReLU: (Activation, _activation),
    nn.Tanh: (Activation, _activation),
    nn.Flatten: (Flatten, _flatten),
    nn.Identity: (None, _identity),
}


def _take(offsets: dict[Tensor, int], parameter: Tensor) -> int:
    """A parameter's offset; it leaves the table, so that a second use is seen (its uses would have to be summed)."""
    if parameter not in offsets:
        raise Unsupported("a layer's parameters are used twice")
    return offsets.pop(parameter)


def _take_any(offsets: dict[Tensor, int], parameter: Tensor | None) -> int | None:
    return None if parameter is None else _take(offsets, parameter)


def _pair(value: Any) -> Pair:
    if isinstance(value, (tuple, list)):
        return (int(value[0]), int(value[-1]))
    return (operator.index(value), operator.index(value))
