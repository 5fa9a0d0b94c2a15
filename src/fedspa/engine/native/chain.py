"""A module read as the chain of layers that the compiled library takes.

Offsets are positions in θ, laid out as in `FlatModel`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from threading import Lock
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.nn.modules.dropout import _DropoutNd

from fedspa.engine import Unsupported, combine
from fedspa.engine.native import library
from fedspa.engine.native.library import Layer
from fedspa.errors import listed
from fedspa.learning.flat import copied
from fedspa.learning.layers import is_altered

_TRACING = Lock()  # torch.fx patches torch's own modules while it traces

Shape = tuple[int, ...]
Pair = tuple[int, int]


def _after(sides: Shape, kernel: Pair, stride: Pair, padding: Pair) -> Pair:
    """Lines and columns of what windows over an image give."""
    down, across = ((sides[i] + 2 * padding[i] - kernel[i]) // stride[i] + 1 for i in (0, 1))
    if down < 1 or across < 1:
        raise Unsupported(f"a window of {kernel} does not fit an image of {sides}")
    return down, across


def _window(kernel: Pair, stride: Pair, padding: Pair) -> dict[str, int]:
    names = ("kernel_h", "kernel_w", "stride_h", "stride_w", "pad_h", "pad_w")
    return dict(zip(names, (*kernel, *stride, *padding)))


def describe(module: nn.Module, input_shape: Shape) -> list[Layer]:
    """The layers in the order in which data passes them; raises `Unsupported`."""
    for parameter in module.parameters():
        if parameter.dtype != torch.float32:
            raise Unsupported(f"parameters of type {parameter.dtype}", "give module.float()")
    for name, layer in module.named_modules():
        if is_altered(layer):
            raise Unsupported(f"layer '{name or '(root)'}' has hooks or a forward of its own")
    leaves = _chain(module)
    offsets: dict[Tensor, int] = {}
    end = 0
    for parameter in module.parameters():
        offsets[parameter] = end
        end += parameter.numel()
    layers: list[Layer] = []
    shape = input_shape
    for leaf in leaves:
        made, shape = _MAKERS[type(leaf)](leaf, shape, offsets)
        layers += made
    if offsets:
        raise Unsupported("some parameters are not in a known layer that is used once")
    if len(shape) != 1:
        raise Unsupported(
            f"the model ends in an output of shape {shape}, not in one score a class", "end in Flatten and Linear"
        )
    return _pooled(layers)


_LARGEST_WINDOW = 256  # pixels: a pick is a byte


def _pooled(layers: list[Layer]) -> list[Layer]:
    """Move each pooling to the convolution that it is a part of. A ReLU or Tanh may lie between: they do not change
    which of two numbers is the greater, and come after it as well."""
    found: list[Layer] = []
    for layer in layers:
        if layer.kind == library.MAXPOOL:
            between = [found.pop()] if found and found[-1].kind in (library.RELU, library.TANH) else []
            behind = bool(found) and found[-1].kind == library.CONV
            if not behind or layer.kernel_h * layer.kernel_w > _LARGEST_WINDOW:
                raise Unsupported("a MaxPool2d that is not behind a Conv2d, or of more than 256 pixels")
            found += [layer, *between]
        else:
            found.append(layer)
    return found


def _chain(module: nn.Module) -> list[nn.Module]:
    """The leaf layers in the order in which data passes them; functional relu, tanh, flatten and pooling included. All
    that is wrong is raised at once."""
    faults = list(_held(module))
    layers: list[nn.Module] = []
    try:
        graph, leaves = _traced(module)
        unknown = {node: leaf for node, leaf in leaves.items() if type(leaf) not in _MAKERS}
        if unknown:
            faults.append(_unsupported_layers(unknown))
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
        fix = "train them too, or give the frozen part's outputs as records and the rest as the model"
        yield Unsupported(f"the model has frozen parameters ({listed(frozen)})", fix)
    buffers = [name for name, _ in module.named_buffers()]
    if buffers:
        yield Unsupported(f"the model has buffers ({listed(buffers)})", f"leave out the buffers {listed(buffers)}")


def _traced(module: nn.Module) -> tuple[fx.Graph, dict[fx.Node, nn.Module]]:
    """Return the graph of a module, with the layers that it calls."""
    try:
        with _TRACING:
            graph = _Tracer().trace(copied(module))  # tracing leaves its marks on a module that sets attributes
    except _Untraceable as why:
        fix = "freeze that part instead (requires_grad_(False)), or leave the switch out"
        raise Unsupported(f"{why}, which a chain of layers cannot express", fix) from why
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


def _unsupported_layers(unknown: Mapping[fx.Node, nn.Module]) -> Unsupported:
    """The layers that a back end does not know, kind by kind."""
    kinds: dict[type[nn.Module], list[str]] = {}
    for node, leaf in unknown.items():
        kinds.setdefault(type(leaf), []).append(str(node.target))
    layers = [f"{kind.__name__} ({listed(names)})" for kind, names in kinds.items()]
    leave = all(issubclass(kind, _DropoutNd) for kind in kinds)
    names = [kind.__name__ for kind in _MAKERS if kind is not _Reshaped]
    fix = (
        f"leave {', '.join(layers)} out: the noise regularises anyway"
        if leave
        else f"replace {', '.join(layers)} by layers that it knows: {', '.join(names)}"
    )
    return Unsupported(f"layer {', '.join(layers)} is not supported by the native engine", fix)


def _in_a_row(graph: fx.Graph, leaves: Mapping[fx.Node, nn.Module], unknown: Container[fx.Node]) -> list[nn.Module]:
    layers: list[nn.Module] = []
    previous: fx.Node | None = None
    shapes, batch_sizes = set[fx.Node](), set[fx.Node]()  # what the forward pass reads to keep the first dimension
    for node in graph.nodes:
        if _reads_shape(node):
            shapes.add(node)
            continue
        if _reads_batch_size(node, shapes):
            batch_sizes.add(node)
            continue
        if node.op == "output":
            if node.args[0] is not previous:
                raise Unsupported("the model returns something else than its last layer's output")
            continue
        if node.op == "placeholder":
            if previous is not None:
                raise Unsupported("the model takes more than one input")
        elif not node.args or node.args[0] is not previous or {*node.all_input_nodes} - batch_sizes != {previous}:
            raise Unsupported(f"'{node.name}' makes the model more than a plain chain of layers")
        elif node.op == "call_module":
            layers.append(leaves[node])
        elif node.target is operator.getitem and previous in unknown:
            pass  # one of several outputs, as an LSTM has: it is the layer that is not known
        elif node.target == "long" and node.op == "call_method" and not layers:
            pass  # records are float32, and an Embedding wants whole numbers: it takes them as they are here
        else:
            layers.append(_functional(node, batch_sizes))
        previous = node
    return layers


def _reads_shape(node: fx.Node) -> bool:
    """Whether a node is `x.shape` or `x.size()`. Every layer of a chain keeps the first of these dimensions."""
    return (node.target is getattr and node.args[1:] == ("shape",)) or (
        node.op == "call_method" and node.target == "size" and len(node.args) == 1 and not node.kwargs
    )


def _reads_batch_size(node: fx.Node, shapes: Container[fx.Node]) -> bool:
    """Whether a node is `x.shape[0]` or `x.size(0)`."""
    if node.op == "call_method" and node.target == "size":
        return node.args[1:] == (0,)
    return node.target is operator.getitem and node.args[0] in shapes and node.args[1:] == (0,)


class _Reshaped(nn.Module):
    """`x.view(batch, -1)` and the like: a Flatten to `width` values per example, or to as many as there are."""

    def __init__(self, width: int | None) -> None:
        super().__init__()
        self.width = width


def _reshaped(dimensions: Sequence[Any], batch_sizes: Container[fx.Node]) -> _Reshaped | None:
    """Return the layer that a view to these dimensions amounts to, if it keeps examples apart at every batch size."""
    if len(dimensions) == 1 and isinstance(dimensions[0], (tuple, list)):
        dimensions = dimensions[0]
    if len(dimensions) != 2:
        return None
    first, width = dimensions
    if isinstance(width, int) and width > 0 and (first == -1 or first in batch_sizes):
        return _Reshaped(width)
    return _Reshaped(None) if width == -1 and first in batch_sizes else None


def _functional(node: fx.Node, batch_sizes: Container[fx.Node]) -> nn.Module:
    target = node.target if node.op == "call_function" else getattr(torch.Tensor, str(node.target), None)
    rest, named = node.args[1:], dict(node.kwargs)
    if target in _VIEWS and not named and (layer := _reshaped(rest, batch_sizes)) is not None:
        return layer
    if target in _FUNCTIONS:
        named.pop("inplace", None)
        return _FUNCTIONS[target](*rest, **named)
    raise Unsupported(f"operation '{node.name}' is not supported by the native engine")


_VIEWS = frozenset({torch.Tensor.view, torch.Tensor.reshape, torch.reshape})
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
    torch.flatten: nn.Flatten,
    torch.Tensor.flatten: nn.Flatten,
}


def _activation(layer: nn.ReLU | nn.Tanh, shape: Shape, _offsets: dict[Tensor, int]) -> tuple[list[Layer], Shape]:
    return [Layer(kind=library.RELU if isinstance(layer, nn.ReLU) else library.TANH)], shape


def _flatten(layer: nn.Flatten, shape: Shape, _offsets: dict[Tensor, int]) -> tuple[list[Layer], Shape]:
    if layer.start_dim != 1 or layer.end_dim not in (-1, len(shape)):
        raise Unsupported("a Flatten that keeps some dimensions", "flatten all dimensions of an example")
    return [Layer(kind=library.FLATTEN)], (math.prod(shape),)


def _view(layer: _Reshaped, shape: Shape, _offsets: dict[Tensor, int]) -> tuple[list[Layer], Shape]:
    values = math.prod(shape)
    if layer.width not in (None, values):
        raise Unsupported(
            f"a view of {layer.width} values does not fit examples of {values}", f"a view of {values}, or flatten(1)"
        )
    return [Layer(kind=library.FLATTEN)], (values,)


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
    window = kernel, stride, padding
    made = Layer(kind=library.CONV, outputs=layer.out_channels, **_window(*window), **_taken(offsets, layer))
    return [made], (layer.out_channels, *_after(shape[1:], *window))


def _linear(layer: nn.Linear, shape: Shape, offsets: dict[Tensor, int]) -> tuple[list[Layer], Shape]:
    if shape != (layer.in_features,):
        raise Unsupported(f"a Linear of {layer.in_features} features does not fit an input of shape {shape}")
    made = Layer(kind=library.LINEAR, outputs=layer.out_features, **_taken(offsets, layer))
    return [made], (layer.out_features,)


def _pool(layer: nn.MaxPool2d, shape: Shape, _offsets: dict[Tensor, int]) -> tuple[list[Layer], Shape]:
    if len(shape) != 3:
        raise Unsupported(f"a MaxPool2d does not fit an input of shape {shape}")
    if layer.ceil_mode:
        raise Unsupported("a MaxPool2d with ceil_mode", "ceil_mode=False in MaxPool2d, and the next Linear to fit")
    kernel, padding = _pair(layer.kernel_size), _pair(layer.padding)
    stride = kernel if layer.stride is None else _pair(layer.stride)
    if any(not 0 <= 2 * p <= k for p, k in zip(padding, kernel)):
        raise Unsupported("a MaxPool2d whose padding is negative or more than half of its kernel")
    window = kernel, stride, padding
    if _pair(layer.dilation) != (1, 1) or layer.return_indices:
        raise Unsupported("a MaxPool2d with dilation or indices")
    return [Layer(kind=library.MAXPOOL, **_window(*window))], (shape[0], *_after(shape[1:], *window))


_Maker = Callable[[Any, Shape, dict[Tensor, int]], tuple[list[Layer], Shape]]
_MAKERS: dict[type[nn.Module], _Maker] = {
    nn.Conv2d: _conv,
    nn.Linear: _linear,
    nn.MaxPool2d: _pool,
    nn.ReLU: _activation,
    nn.Tanh: _activation,
    nn.Flatten: _flatten,
    _Reshaped: _view,
    nn.Identity: _identity,
}


def _take(offsets: dict[Tensor, int], parameter: Tensor) -> int:
    """A parameter's offset; it leaves the table, so that a second use is seen (its uses would have to be summed)."""
    if parameter not in offsets:
        raise Unsupported("a layer's parameters are used twice")
    return offsets.pop(parameter)


def _taken(offsets: dict[Tensor, int], layer: nn.Conv2d | nn.Linear) -> dict[str, int]:
    bias = -1 if layer.bias is None else _take(offsets, layer.bias)
    return {"weight_offset": _take(offsets, layer.weight), "bias_offset": bias}


def _pair(value: Any) -> Pair:
    if isinstance(value, (tuple, list)):
        return (int(value[0]), int(value[-1]))
    return (operator.index(value), operator.index(value))
