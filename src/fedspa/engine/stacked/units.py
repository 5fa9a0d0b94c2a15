"""What one kernel runs: a weighted layer with the pooling and the activation behind it, or a layer by itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fedspa.engine.layers import Activation, Embedding, Norm, Pool, Weighted
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

    @property
    def by_taps(self) -> bool:
        """Whether its kernels read channels last, as whole vectors: there must be vectors of them, in and out."""
        layer = self.weighted
        return not layer.one_pixel and layer.stride == (1, 1) and layer.channels % 16 == layer.outputs % 16 == 0


Units = Unit | Pool | Norm | Embedding | Activation
Trained = Unit | Norm | Embedding
Blocks = tuple[int, int, int, int, int]


@dataclass(frozen=True, slots=True)
class Tiles:
    """Blocks of a unit's kernels (rows, columns, inner, warps, stages). `programs` make the sums of its gradients,
    `split` times over: they share an agent's examples.

    They depend on the layer alone, so that the order of every sum, and with it every bit, is the same in any company.
    """

    forward: Blocks
    backward: Blocks
    sums: Blocks
    programs: int
    split: int


def fuse(layers: Sequence[Layer]) -> list[Units]:
    """Units in order. A ReLU commutes with a max-pool. The net's last layer is never fused: its δ is the loss's."""
    units: list[Units] = []
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


def tiles(unit: Trained) -> Tiles:
    if isinstance(unit, Norm):
        programs = unit.size // unit.parameters * math.ceil(unit.parameters / 16)
        return _split(_NO_BLOCKS, _NO_BLOCKS, (16, 0, _power(unit.outer * unit.inner, 16, 64), 4, 3), programs, 16)
    if isinstance(unit, Embedding):
        sums = (32, _power(unit.width, 16, 64), 0, 4, 3)
        return _split(_NO_BLOCKS, _NO_BLOCKS, sums, math.ceil(unit.words / 32) * math.ceil(unit.width / sums[1]), 4)
    layer = unit.weighted
    return _product_tiles(layer) if layer.one_pixel else _conv_tiles(unit, layer)


def _product_tiles(layer: Weighted) -> Tiles:
    if layer.columns >= 512:
        forward = (64, 16, 128, 4, 3)
    else:
        forward = (32, 32, 128, 4, 3) if layer.columns >= 128 <= layer.outputs else (16, 16, 64, 4, 3)
    sums = (8, _power(layer.columns + 1, 32, 128), 0, 2, 3)
    # The bias is one more column.
    columns = math.ceil((layer.columns + (layer.bias is not None)) / sums[1])
    return _split(forward, (16, 32, 128, 4, 3), sums, math.ceil(layer.outputs / sums[0]) * columns, 4)


def _conv_tiles(unit: Unit, layer: Weighted) -> Tiles:
    if unit.by_taps:
        forward = (128, _power(layer.outputs, 16, 128), 32 if layer.channels % 32 == 0 else 16, 8, 4)
        backward = (64, _power(layer.channels, 16, 64), 32 if layer.outputs % 32 == 0 else 16, 4, 4)
    else:
        forward = (128, _power(layer.outputs, 16, 128), 32 if layer.columns <= 32 else 16, 4, 3)
        backward = (64, _power(layer.channels, 16, 64), 32 if layer.channels <= 16 else 16, 4, 3)
    inner = 64 if layer.outputs < 64 else 32 if layer.outputs < 128 else 16  # what leaves registers enough
    sums = (_power(layer.outputs, 16, 128), _power(layer.columns, 32, 64), _power(unit.positions, 16, inner), 4, 3)
    # Biases have programs of their own.
    columns = math.ceil(layer.columns / sums[1]) + (layer.bias is not None)
    return _split(forward, backward, sums, math.ceil(layer.outputs / sums[0]) * columns, 32)


_NO_BLOCKS = (0, 0, 0, 0, 0)


def _split(forward: Blocks, backward: Blocks, sums: Blocks, programs: int, most: int) -> Tiles:
    """As many parts as make an agent's programs some 64, or `most`."""
    return Tiles(forward, backward, sums, programs, _power(math.ceil(64 / programs), 1, most))


def _power(value: int, low: int, high: int) -> int:
    """The power of two that is not below `value`, within [low, high]."""
    return min(high, max(low, 1 << max(0, value - 1).bit_length()))
