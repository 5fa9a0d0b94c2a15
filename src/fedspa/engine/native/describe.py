"""A module as the list of layers that the native back end knows, or the reason why it is not one."""

from __future__ import annotations

import torch
from torch import nn

from fedspa.engine import layers
from fedspa.engine.describe import describe as describe_chain
from fedspa.engine.layers import Activation, Flatten, Pair, Pool, Unsupported, Weighted
from fedspa.engine.native import library
from fedspa.engine.native.library import Layer

_ACTIVATIONS = {"relu": library.RELU, "tanh": library.TANH}
_POOLS = {"max": library.MAXPOOL, "mean": library.AVGPOOL}


def describe(module: nn.Module, input_shape: layers.Shape) -> list[Layer]:
    """The layers in order, parameter offsets as in `FlatModel`; raises `Unsupported`."""
    for parameter in module.parameters():
        if parameter.dtype != torch.float32:
            raise Unsupported(f"parameters of type {parameter.dtype}", "give module.float()")
    return [_native(layer) for layer in describe_chain(module, input_shape, (Weighted, Pool, Activation, Flatten))]


def _native(layer: layers.Layer) -> Layer:
    if isinstance(layer, Weighted):
        offsets = {"weight_offset": layer.weight, "bias_offset": -1 if layer.bias is None else layer.bias}
        if layer.kind == "linear":
            return Layer(kind=library.LINEAR, outputs=layer.outputs, **offsets)
        window = _window(layer.kernel, layer.stride, layer.padding)
        return Layer(kind=library.CONV, outputs=layer.outputs, **window, **offsets)
    if isinstance(layer, Pool):
        window = _window(layer.kernel, layer.stride, layer.padding)
        return Layer(kind=_POOLS[layer.kind], count_include_pad=int(layer.count_padding), **window)
    if isinstance(layer, Activation):
        return Layer(kind=_ACTIVATIONS[layer.kind])
    assert isinstance(layer, Flatten)
    return Layer(kind=library.FLATTEN)


def _window(kernel: Pair, stride: Pair, padding: Pair) -> dict[str, int]:
    names = ("kernel_h", "kernel_w", "stride_h", "stride_w", "pad_h", "pad_w")
    return dict(zip(names, (*kernel, *stride, *padding)))
