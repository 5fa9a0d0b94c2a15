"""What one kernel runs: a weighted layer with the pooling and the activation behind it, or a layer by itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fedspa.engine.layers import Activation, Pool, Weighted
from fedspa.engine.stacked.describe import Layer


@dataclass(frozen=True, slots=True)
class Unit:
    """`pooled`: a 2 × 2 max-pool is part of it. `activation`: the last thing it does."""

    weighted: Weighted
    pooled: bool
    activation: Activation | None

    @property
    def out(self) -> tuple[int, int]:
        """Lines and columns of output that count: a pooling of an odd side leaves the last one out."""
        down, across = self.weighted.out
        return (down // 2 * 2, across // 2 * 2) if self.pooled else (down, across)

    @property
    def positions(self) -> int:
        return self.out[0] * self.out[1]

    @property
    def outputs(self) -> int:
        return self.weighted.outputs * self.positions // (4 if self.pooled else 1)


@dataclass(frozen=True, slots=True)
class Tiles:
    """Block sizes of a unit's kernels (rows, columns, inner, warps); `split` programs share an agent's examples.

    They depend on the layer alone, so that the order of every sum, and with it every bit, is the same in any company.
    """

    forward: tuple[int, int, int, int]
    backward: tuple[int, int, int, int]
    sums: tuple[int, int, int, int]
    split: int

    def sum_tiles(self, layer: Weighted) -> int:
        """Programs that make the layer's sums, not counting the split; a convolution's biases have their own."""
        bias = layer.bias is not None
        if layer.one_pixel:
            columns = math.ceil((layer.columns + bias) / self.sums[1])
        else:
            columns = math.ceil(layer.columns / self.sums[1]) + bias
        return math.ceil(layer.outputs / self.sums[0]) * columns


def fuse(layers: Sequence[Layer]) -> list[Unit | Pool | Activation]:
    """Units in order. A ReLU commutes with a max-pool. The net's last layer is never fused: its δ is the loss's."""
    units: list[Unit | Pool | Activation] = []
    rest = list(layers)
    while rest:
        layer = rest.pop(0)
        if not isinstance(layer, Weighted):
            assert isinstance(layer, (Pool, Activation))
            units.append(layer)
            continue
        pooled, activation = False, None
        while len(rest) > 1:
            following = rest[0]
            if (
                isinstance(following, Pool)
                and following.halves
                and not pooled
                and activation in (None, Activation("relu"))
            ):
                pooled = True
            elif isinstance(following, Activation) and activation is None:
                activation = following
            else:
                break
            rest.pop(0)
        units.append(Unit(layer, pooled, activation))
    return units


def tiles(unit: Unit) -> Tiles:
    layer = unit.weighted
    if layer.one_pixel:
        forward = (32, 16, 128, 2) if layer.columns >= 512 else (16, 16, 64, 4)
        backward = (16, 32, 128, 4)
        sums = (8, _power(layer.columns + 1, 32, 128), 0, 2)
        most = 4
    else:
        forward = (128, _power(layer.outputs, 16, 128), 32 if layer.columns <= 32 else 16, 4)
        backward = (64, _power(layer.channels, 16, 64), 32 if layer.channels <= 16 else 16, 4)
        inner = 64 if layer.outputs < 64 else 32 if layer.outputs < 128 else 16  # what leaves registers enough
        sums = (_power(layer.outputs, 16, 128), _power(layer.columns, 32, 64), _power(unit.positions, 16, inner), 4)
        most = 32
    shape = Tiles(forward, backward, sums, 1)
    return replace(shape, split=_power(math.ceil(64 / shape.sum_tiles(layer)), 1, most))


def _power(value: int, low: int, high: int) -> int:
    """The power of two that is not below `value`, within [low, high]."""
    return min(high, max(low, 1 << max(0, value - 1).bit_length()))
