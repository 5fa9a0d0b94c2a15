"""A module as the chain of layers that the stacked back end has rules for, or the reason why it is not one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, cast

from torch import Tensor, nn

Shape = tuple[int, ...]
Pair = tuple[int, int]


class Unsupported(Exception):
    """One clause that says what the stacked back end cannot do."""


@dataclass(frozen=True, slots=True)
class Weighted:
    """A Conv2d, or a Linear as a convolution of one pixel. Offsets are positions in θ; the weight is [outputs, K]."""

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
        return _after((self.height, self.width), self.kernel, self.stride, self.padding)

    @property
    def positions(self) -> int:
        return self.out[0] * self.out[1]

    @property
    def inputs(self) -> int:
        return self.channels * self.height * self.width

    @property
    def is_linear(self) -> bool:
        return self.height * self.width * self.kernel[0] * self.kernel[1] == 1

    @property
    def size(self) -> int:
        """Parameters, the bias included: they are neighbours in θ."""
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
        return _after(self.image[1:], self.kernel, self.stride, self.padding)


@dataclass(frozen=True, slots=True)
class Activation:
    kind: Literal["relu", "tanh"]


Layer = Weighted | Pool | Activation


def describe(module: nn.Module, input_shape: Shape) -> list[Layer]:
    """The layers in the order in which data passes them; offsets as in `FlatModel`. Raises `Unsupported`."""
    if any(not p.requires_grad for p in module.parameters()):
        raise Unsupported("the model has frozen parameters")
    if next(module.buffers(), None) is not None:
        raise Unsupported("the model has buffers")
    offsets: dict[int, int] = {}
    end = 0
    for parameter in module.parameters():
        offsets[id(parameter)] = end
        end += parameter.numel()
    layers: list[Layer] = []
    shape = input_shape
    for leaf in _chain(module):
        made, shape = _layer(leaf, shape, offsets)
        layers += made
    if offsets:
        raise Unsupported("some parameters are not in a Conv2d or Linear layer of an nn.Sequential")
    if len(shape) != 1:
        raise Unsupported(f"the model ends in an output of shape {shape}, not in one score a class")
    return layers


def _chain(module: nn.Module) -> list[nn.Module]:
    if type(module) is nn.Sequential:
        return [leaf for child in module for leaf in _chain(child)]
    if next(module.children(), None) is not None:
        raise Unsupported(f"{type(module).__name__} is not an nn.Sequential, so the order of its layers is unknown")
    return [module]


def _layer(leaf: nn.Module, shape: Shape, offsets: dict[int, int]) -> tuple[list[Layer], Shape]:
    kind = type(leaf)
    if kind is nn.Conv2d:
        return _conv(cast(nn.Conv2d, leaf), shape, offsets)
    if kind is nn.Linear:
        return _linear(cast(nn.Linear, leaf), shape, offsets)
    if kind in (nn.MaxPool2d, nn.AvgPool2d):
        return _pool(cast("nn.MaxPool2d | nn.AvgPool2d", leaf), shape)
    if kind is nn.ReLU:
        return [Activation("relu")], shape
    if kind is nn.Tanh:
        return [Activation("tanh")], shape
    if kind is nn.Flatten:
        flatten = cast(nn.Flatten, leaf)
        if flatten.start_dim != 1 or flatten.end_dim not in (-1, len(shape)):
            raise Unsupported("a Flatten that keeps some dimensions")
        return [], (math.prod(shape),)
    if kind is nn.Identity:
        return [], shape
    raise Unsupported(f"it has no rule for a layer {kind.__name__}")


def _conv(layer: nn.Conv2d, shape: Shape, offsets: dict[int, int]) -> tuple[list[Layer], Shape]:
    if layer.groups != 1 or layer.dilation != (1, 1) or layer.padding_mode != "zeros":
        raise Unsupported("a Conv2d with groups, dilation or another padding than zeros")
    if len(shape) != 3 or shape[0] != layer.in_channels:
        raise Unsupported(f"a Conv2d of {layer.in_channels} channels does not fit records of shape {shape}")
    kernel, stride = _pair(layer.kernel_size), _pair(layer.stride)
    if layer.padding == "same":
        if kernel[0] % 2 == 0 or kernel[1] % 2 == 0:
            raise Unsupported("a Conv2d with padding 'same' and an even kernel")
        padding = (kernel[0] // 2, kernel[1] // 2)
    else:
        padding = (0, 0) if layer.padding == "valid" else _pair(cast(Pair, layer.padding))
    weight, bias = _take(offsets, layer)
    made = Weighted(shape[0], shape[1], shape[2], layer.out_channels, kernel, stride, padding, weight, bias)
    return [made], (layer.out_channels, *made.out)


def _linear(layer: nn.Linear, shape: Shape, offsets: dict[int, int]) -> tuple[list[Layer], Shape]:
    if shape != (layer.in_features,):
        raise Unsupported(f"a Linear of {layer.in_features} features does not fit an input of shape {shape}")
    weight, bias = _take(offsets, layer)
    made = Weighted(layer.in_features, 1, 1, layer.out_features, (1, 1), (1, 1), (0, 0), weight, bias)
    return [made], (layer.out_features,)


def _pool(layer: nn.MaxPool2d | nn.AvgPool2d, shape: Shape) -> tuple[list[Layer], Shape]:
    name = type(layer).__name__
    if len(shape) != 3:
        raise Unsupported(f"a {name} does not fit an input of shape {shape}")
    if layer.ceil_mode:
        raise Unsupported(f"a {name} with ceil_mode")
    kernel, padding = _pair(layer.kernel_size), _pair(layer.padding)
    stride = kernel if layer.stride is None else _pair(layer.stride)
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


def _take(offsets: dict[int, int], layer: nn.Conv2d | nn.Linear) -> tuple[int, int | None]:
    """Offsets of the weight and the bias, each handed out once: a weight used twice has no entry left."""
    taken: list[int | None] = []
    parameters: tuple[Tensor | None, ...] = (layer.weight, layer.bias)
    for parameter in parameters:
        if parameter is not None and id(parameter) not in offsets:
            raise Unsupported("a parameter is used by more than one layer")
        taken.append(None if parameter is None else offsets.pop(id(parameter)))
    weight, bias = taken
    assert weight is not None
    if bias is not None and bias != weight + layer.weight.numel():
        raise Unsupported("a bias does not follow its weight in the order of the parameters")
    return weight, bias


def _pair(value: int | tuple[int, ...]) -> Pair:
    return (value, value) if isinstance(value, int) else (value[0], value[1])


def _after(sides: tuple[int, ...], kernel: Pair, stride: Pair, padding: Pair) -> Pair:
    down, across = (
        (side + 2 * p - window) // step + 1 for side, window, step, p in zip(sides, kernel, stride, padding)
    )
    if down < 1 or across < 1:
        raise Unsupported(f"a window of {kernel} does not fit an image of {sides}")
    return down, across
