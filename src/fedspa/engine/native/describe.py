"""A module as the list of layers that the native back end knows, or the reason why it is not one.

torch.fx traces the module; what it finds must be one chain from input to logits.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from fedspa.engine.native import library
from fedspa.engine.native.library import Layer

Shape = tuple[int, ...]


class Unsupported(Exception):
    """One clause that says what the native back end cannot do."""


def describe(module: nn.Module, input_shape: Shape) -> list[Layer]:
    """The layers in order, parameter offsets as in `FlatModel`; raises `Unsupported`."""
    if any(not p.requires_grad for p in module.parameters()):
        raise Unsupported("the model has frozen parameters")
    if next(module.buffers(), None) is not None:
        raise Unsupported("the model has buffers")
    offsets: dict[Tensor, int] = {}
    end = 0
    for _, parameter in module.named_parameters():
        offsets[parameter] = end
        end += parameter.numel()
    layers: list[Layer] = []
    shape = input_shape
    for layer in _chain(module):
        made, shape = _layer(layer, shape, offsets)
        layers += made
    if offsets:
        raise Unsupported("some parameters are not in a Conv2d or Linear layer that is used once")
    if len(shape) != 1:
        raise Unsupported(f"the model ends in an output of shape {shape}, not in one score a class")
    return layers


def _chain(module: nn.Module) -> list[nn.Module]:
    """The leaf layers in the order in which data passes them; functional relu, tanh, flatten and pooling included."""
    try:
        graph = fx.symbolic_trace(module).graph
    except Exception as cause:  # tracing runs the user's forward, which may raise anything
        raise Unsupported(f"torch.fx cannot trace {type(module).__name__} ({type(cause).__name__})") from cause
    modules = dict(module.named_modules())
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
            layers.append(modules[str(node.target)])
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


def _layer(layer: nn.Module, shape: Shape, offsets: dict[Tensor, int]) -> tuple[list[Layer], Shape]:
    kind = type(layer)
    if kind is nn.Conv2d:
        return _conv(layer, shape, offsets)
    if kind is nn.Linear:
        return _linear(layer, shape, offsets)
    if kind in (nn.MaxPool2d, nn.AvgPool2d):
        return _pool(layer, shape)
    if kind is nn.ReLU:
        return [Layer(kind=library.RELU)], shape
    if kind is nn.Tanh:
        return [Layer(kind=library.TANH)], shape
    if kind is nn.Flatten:
        if layer.start_dim != 1 or layer.end_dim not in (-1, len(shape)):
            raise Unsupported("a Flatten that keeps some dimensions")
        return [Layer(kind=library.FLATTEN)], (_product(shape),)
    if kind is nn.Identity:
        return [], shape
    raise Unsupported(f"it knows no layer {kind.__name__}")


def _conv(layer: nn.Module, shape: Shape, offsets: dict[Tensor, int]) -> tuple[list[Layer], Shape]:
    assert isinstance(layer, nn.Conv2d)
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
    made = Layer(
        kind=library.CONV,
        outputs=layer.out_channels,
        **_window(kernel, stride, padding),
        weight_offset=_take(offsets, layer.weight),
        bias_offset=-1 if layer.bias is None else _take(offsets, layer.bias),
    )
    return [made], (layer.out_channels, *_after(shape, kernel, stride, padding))


def _linear(layer: nn.Module, shape: Shape, offsets: dict[Tensor, int]) -> tuple[list[Layer], Shape]:
    assert isinstance(layer, nn.Linear)
    if shape != (layer.in_features,):
        raise Unsupported(f"a Linear of {layer.in_features} features does not fit an input of shape {shape}")
    made = Layer(
        kind=library.LINEAR,
        outputs=layer.out_features,
        weight_offset=_take(offsets, layer.weight),
        bias_offset=-1 if layer.bias is None else _take(offsets, layer.bias),
    )
    return [made], (layer.out_features,)


def _pool(layer: nn.Module, shape: Shape) -> tuple[list[Layer], Shape]:
    assert isinstance(layer, (nn.MaxPool2d, nn.AvgPool2d))
    name = type(layer).__name__
    if len(shape) != 3:
        raise Unsupported(f"a {name} does not fit an input of shape {shape}")
    if layer.ceil_mode:
        raise Unsupported(f"a {name} with ceil_mode")
    kernel, padding = _pair(layer.kernel_size), _pair(layer.padding)
    stride = kernel if layer.stride is None else _pair(layer.stride)
    if isinstance(layer, nn.MaxPool2d):
        if _pair(layer.dilation) != (1, 1) or layer.return_indices:
            raise Unsupported("a MaxPool2d with dilation or indices")
        made = Layer(kind=library.MAXPOOL, **_window(kernel, stride, padding))
    else:
        if layer.divisor_override is not None:
            raise Unsupported("an AvgPool2d with a divisor of its own")
        included = int(layer.count_include_pad)
        made = Layer(kind=library.AVGPOOL, count_include_pad=included, **_window(kernel, stride, padding))
    return [made], (shape[0], *_after(shape, kernel, stride, padding))


def _take(offsets: dict[Tensor, int], parameter: Tensor) -> int:
    """A parameter's offset; it leaves the table, so that a second use is seen (its uses would have to be summed)."""
    if parameter not in offsets:
        raise Unsupported("a layer's parameters are used twice")
    if parameter.dtype != torch.float32:
        raise Unsupported(f"parameters of type {parameter.dtype}")
    return offsets.pop(parameter)


def _window(kernel: Shape, stride: Shape, padding: Shape) -> dict[str, int]:
    names = ("kernel_h", "kernel_w", "stride_h", "stride_w", "pad_h", "pad_w")
    return dict(zip(names, (*kernel, *stride, *padding)))


def _after(shape: Shape, kernel: Shape, stride: Shape, padding: Shape) -> tuple[int, int]:
    height, width = ((shape[1 + i] + 2 * padding[i] - kernel[i]) // stride[i] + 1 for i in (0, 1))
    if height < 1 or width < 1:
        raise Unsupported(f"a window of {kernel} does not fit an input of shape {shape}")
    return height, width


def _pair(value: Any) -> tuple[int, int]:
    if isinstance(value, (tuple, list)):
        return (int(value[0]), int(value[-1]))
    return (operator.index(value), operator.index(value))


def _product(shape: Shape) -> int:
    product = 1
    for side in shape:
        product *= side
    return product
