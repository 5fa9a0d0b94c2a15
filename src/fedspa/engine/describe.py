"""A module as a chain of known layers, or the reason why it is not one: what the fast back ends read a model by.

torch.fx traces the module; what it finds must be one chain from input to logits.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from fedspa.engine.layers import (
    Activation,
    Embedding,
    Flatten,
    Layer,
    Norm,
    Pair,
    Pool,
    Shape,
    Unsupported,
    Weighted,
)
from fedspa.learning.flat import copied
from fedspa.learning.threads import TRACING


def describe(module: nn.Module, input_shape: Shape) -> list[Layer]:
    """The layers in the order in which data passes them; raises `Unsupported`."""
    for name, layer in module.named_modules():
        if any(getattr(layer, hooks) for hooks in _HOOKS) or "forward" in vars(layer):
            raise Unsupported(f"layer '{name or '(root)'}' has hooks or a forward of its own")
    if any(not p.requires_grad for p in module.parameters()):
        raise Unsupported("the model has frozen parameters")
    if next(module.buffers(), None) is not None:
        raise Unsupported("the model has buffers")
    offsets: dict[Tensor, int] = {}
    end = 0
    for parameter in module.parameters():
        offsets[parameter] = end
        end += parameter.numel()
    layers: list[Layer] = []
    shape = input_shape
    for leaf in _chain(module):
        made, shape = _layer(leaf, shape, offsets)
        layers += made
    if offsets:
        raise Unsupported("some parameters are not in a known layer that is used once")
    if len(shape) != 1:
        raise Unsupported(f"the model ends in an output of shape {shape}, not in one score a class")
    return layers


# What torch runs around a layer: its outputs are then not those of its kind.
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def _chain(module: nn.Module) -> list[nn.Module]:
    """The leaf layers in the order in which data passes them; functional relu, tanh, flatten and pooling included."""
    try:
        with TRACING:
            graph = fx.symbolic_trace(copied(module)).graph  # tracing leaves its marks on a module that sets attributes
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


def _layer(layer: nn.Module, shape: Shape, offsets: dict[Tensor, int]) -> tuple[list[Layer], Shape]:
    kind = type(layer)
    if kind in _MAKERS:
        return _MAKERS[kind](layer, shape, offsets)
    if kind is nn.ReLU:
        return [Activation("relu")], shape
    if kind is nn.Tanh:
        return [Activation("tanh")], shape
    if kind is nn.Flatten:
        if layer.start_dim != 1 or layer.end_dim not in (-1, len(shape)):
            raise Unsupported("a Flatten that keeps some dimensions")
        return [Flatten()], (math.prod(shape),)
    if kind is nn.Identity:
        return [], shape
    raise Unsupported(f"it knows no layer {kind.__name__}")


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
        raise Unsupported(f"a {name} with ceil_mode")
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
    return [Norm("GroupNorm", layer.num_groups, 1, shape[0], inner, layer.eps, weight, bias)], shape


def _layer_norm(layer: nn.LayerNorm, shape: Shape, offsets: dict[Tensor, int]) -> tuple[list[Layer], Shape]:
    inside = tuple(layer.normalized_shape)
    if shape[len(shape) - len(inside) :] != inside:
        raise Unsupported(f"a LayerNorm over {inside} does not fit an input of shape {shape}")
    weight, bias = _take_any(offsets, layer.weight), _take_any(offsets, layer.bias)
    outer = math.prod(shape[: len(shape) - len(inside)])
    return [Norm("LayerNorm", outer, outer, math.prod(inside), 1, layer.eps, weight, bias)], shape


def _embedding(layer: nn.Embedding, shape: Shape, offsets: dict[Tensor, int]) -> tuple[list[Layer], Shape]:
    if layer.padding_idx is not None or layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse:
        raise Unsupported("an Embedding with padding_idx, max_norm, scale_grad_by_freq or sparse gradients")
    made = Embedding(layer.num_embeddings, layer.embedding_dim, math.prod(shape), _take(offsets, layer.weight))
    return [made], (*shape, layer.embedding_dim)


_MAKERS: dict[type[nn.Module], Callable[[Any, Shape, dict[Tensor, int]], tuple[list[Layer], Shape]]] = {
    nn.Conv2d: _conv,
    nn.Linear: _linear,
    nn.MaxPool2d: _pool,
    nn.AvgPool2d: _pool,
    nn.GroupNorm: _group_norm,
    nn.LayerNorm: _layer_norm,
    nn.Embedding: _embedding,
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
