"""A module as the chain of layers that the stacked back end has rules for, or the reason why it is not one."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from fedspa.engine.describe import describe as describe_chain
from fedspa.engine.layers import Activation, Embedding, Flatten, Norm, Pool, Shape, Unsupported, Weighted

Layer = Weighted | Pool | Norm | Embedding | Activation


def describe(module: nn.Module, input_shape: Shape) -> list[Layer]:
    """The layers in the order in which data passes them; raises `Unsupported`. Values are flat, so no Flatten."""
    layers = [layer for layer in describe_chain(module, input_shape) if not isinstance(layer, Flatten)]
    for layer in layers:
        if isinstance(layer, (Weighted, Norm)) and layer.weight is not None and layer.bias is not None:
            weights = layer.outputs * layer.columns if isinstance(layer, Weighted) else layer.parameters
            if layer.bias != layer.weight + weights:
                raise Unsupported("a bias does not follow its weight in the order of the parameters")
    if any(isinstance(layer, Embedding) for layer in layers[1:]):
        raise Unsupported("an Embedding that is not the first layer")
    return layers


def inputs(layers: Sequence[Layer]) -> int:
    """Values of a record."""
    return next(layer for layer in layers if not isinstance(layer, Activation)).inputs


def scores(layers: Sequence[Layer]) -> int:
    """Values that the last layer gives: one a class."""
    last = next(layer for layer in reversed(layers) if not isinstance(layer, Activation))
    if isinstance(last, Weighted):
        return last.outputs * last.positions
    if isinstance(last, Pool):
        return last.image[0] * last.out[0] * last.out[1]
    return last.inputs if isinstance(last, Norm) else last.tokens * last.width


def first_parameter(layer: Layer) -> int | None:
    """Where the layer's parameters begin in θ; None if it has none."""
    if isinstance(layer, Norm):
        return layer.bias if layer.weight is None else layer.weight
    return layer.weight if isinstance(layer, (Weighted, Embedding)) else None
