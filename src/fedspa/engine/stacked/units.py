"""What one kernel runs: a weighted layer with the pooling and the activation behind it, or a layer by itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fedspa.engine.stacked.describe import Activation, Layer, Pool, Weighted


@dataclass(frozen=True, slots=True)
class Unit:
    """`pooled`: a 2 × 2 max-pool is part of it. `activation`: the last thing it does."""

    weighted: Weighted
    pooled: bool
    activation: Activation | None

    @property
    def outputs(self) -> int:
        down, across = self.weighted.out
        return self.weighted.outputs * ((down // 2) * (across // 2) if self.pooled else down * across)

    @property
    def rows_a_record(self) -> int:
        """Output positions that are computed; a pooling of an odd side leaves the last line out."""
        return (4 if self.pooled else 1) * self.outputs // self.weighted.outputs


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
        columns = layer.columns + (layer.bias is not None)
        return math.ceil(layer.outputs / self.sums[0]) * math.ceil(columns / self.sums[1])


def fuse(layers: Sequence[Layer]) -> list[Unit | Pool | Activation]:
    """Units in order. A ReLU commutes with a max-pool. The net's last layer is never fused: its δ is the loss's."""
    units: list[Unit | Pool | Activation] = []
    rest = list(layers)
    while rest:
        layer = rest.pop(0)
        if not isinstance(layer, Weighted):
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
    columns = layer.columns + (layer.bias is not None)
    wide = layer.outputs >= 64
    if layer.is_linear:
        forward = backward = (32, 32, 64, 4)
        sums = (_power(layer.outputs, 8, 16), _power(columns, 32, 128), 0, 4)
    else:
        forward = (128 if wide else 64, _power(layer.outputs, 16, 64), 32, 4)
        backward = (128 if layer.channels >= 64 else 64, _power(layer.channels, 16, 64), 32, 4)
        sums = (_power(layer.outputs, 16, 64), _power(columns, 32, 64), _power(unit.rows_a_record, 16, 64), 4)
    shape = Tiles(forward, backward, sums, 1)
    split = _power(math.ceil(48 / shape.sum_tiles(layer)), 1, 4 if layer.is_linear else 16)
    return replace(shape, split=split)


def _power(value: int, low: int, high: int) -> int:
    """The power of two that is not below `value`, within [low, high]."""
    return min(high, max(low, 1 << max(0, value - 1).bit_length()))
