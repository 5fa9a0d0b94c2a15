"""Forward and backward over a stack of agents on a GPU, and the sums of clipped gradients: buffers and launches.

A unit's number i is its place in the chain; `Passes` keeps, by that number, what its kernels read and write.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from fedspa.engine.layers import Activation, Embedding, Norm, Pool, Weighted
from fedspa.engine.stacked import kernels, layer_kernels, rules, sum_kernels
from fedspa.engine.stacked.buffers import RoundBuffers, Shape
from fedspa.engine.stacked.describe import Layer, first_parameter
from fedspa.engine.stacked.streams import Streams
from fedspa.engine.stacked.units import Tiles, Trained, Unit, Units, fuse, tiles

_ACTIVATIONS = {None: kernels.NONE, "relu": kernels.RELU, "tanh": kernels.TANH}
# Values of a group that a norm's program holds at a time.
_GROUP = 1024


class Passes:
    """`all_sums` holds every layer's partial sums; `table` says where: first coordinate, size, start, parts."""

    def __init__(self, layers: Sequence[Layer], shape: Shape, held: RoundBuffers, tf32: bool, streams: Streams) -> None:
        self._shape, self._held, self._streams = shape, held, streams
        self._precision = "tf32" if tf32 else "ieee"
        self._units = fuse(layers)
        self._tiles: dict[int, Tiles] = {i: tiles(unit) for i, unit in self._trained()}
        self._allocate(held.x.device)

    def _allocate(self, device: torch.device) -> None:
        s = self._shape

        def make(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(s.agents, *size, dtype=dtype, device=device)

        self._out: dict[int, Tensor] = {}
        self._winner: dict[int, Tensor] = {}
        self._delta: dict[int, Tensor] = {}
        # By the number of the unit that reads them: weights by tap, for both ways, and channels-last copies.
        self._turned: dict[int, tuple[Tensor, Tensor]] = {}
        self._last: dict[int, Tensor] = {}
        self._delta_last: dict[int, Tensor] = {}
        for i, unit in enumerate(self._units):
            if isinstance(unit, Norm):
                self._out[i], self._last[i] = make(s.rows, unit.inputs), make(s.rows, unit.inputs)
                self._delta[i], self._delta_last[i] = make(s.rows, unit.inputs), make(s.rows, unit.groups)
            if isinstance(unit, Embedding):
                self._out[i] = make(s.rows, unit.tokens * unit.width)
            if not isinstance(unit, Unit):
                continue
            self._out[i] = make(s.rows, unit.outputs)
            # δ before the pooling, zeros included: both kernels that read it want plain rows.
            self._delta[i] = make(s.rows, unit.weighted.outputs * unit.positions)
            # Without pooling nothing reads it; a pointer must still be given.
            self._winner[i] = make(s.rows if unit.pooled else 1, unit.outputs if unit.pooled else 1, dtype=torch.int8)
            if unit.by_taps:
                size = unit.weighted.outputs * unit.weighted.columns
                self._turned[i] = make(size), make(size)
                self._delta_last[i] = torch.empty_like(self._delta[i])
                self._last[i] = make(s.rows, unit.weighted.inputs)
        parts: list[tuple[int, int, int, int]] = []
        self._first_tile: dict[int, int] = {}
        self.tile_count, end = 0, 0
        for i, unit in self._trained():
            layer, split = _layer(unit), self._tiles[i].split
            parts.append((cast(int, first_parameter(layer)), layer.size, end, split))
            end += s.agents * split * layer.size
            self._first_tile[i] = self.tile_count
            self.tile_count += self._tiles[i].programs
        self.all_sums = torch.zeros(end, dtype=torch.float64, device=device)
        self._sums = {
            i: self.all_sums[start : start + s.agents * split * size]
            for (i, _), (_, size, start, split) in zip(self._trained(), parts)
        }
        self.table = torch.tensor(parts, dtype=torch.int64, device=device)
        self.most_parts = max(split for _, _, _, split in parts)
        statistics = self.tile_count if s.clip == "l2" or s.quantile else 1
        self.first = make(s.rows, statistics, dtype=torch.float64)
        self.second = make(s.rows, statistics if s.clip == "coordinate" else 1, dtype=torch.float64)
        self.factors = torch.ones(s.agents, s.rows, device=device)

    def turn_weights(self) -> None:
        """What the step's kernels by taps need; they wait for it."""
        held, s = self._held, self._shape
        for i, (ahead, back) in self._turned.items():
            layer = cast(Unit, self._units[i]).weighted
            grid = (math.ceil(layer.outputs / 32), math.ceil(layer.channels / 32), s.agents)
            kernels.turn_weights[grid](
                *(held.theta, ahead, back, s.dimension, layer.weight),
                N=layer.outputs, C=layer.channels, TAPS=layer.kernel[0] * layer.kernel[1], BLOCK=32,
            )  # fmt: skip
        self._turned_at = self._streams.mark()

    def forward(self) -> Tensor:
        """The logits of the step's batches; keeps what `backward` needs."""
        s, x = self._shape, self._held.x
        self._tape: list[tuple[Tensor, Tensor, Tensor | None]] = []
        for i, unit in enumerate(self._units):
            where = None
            if isinstance(unit, Unit):
                out = self._ahead(i, unit, x)
            elif isinstance(unit, Norm):
                out = self._normalize(i, unit, x)
            elif isinstance(unit, Embedding):
                out = self._embed(i, unit, x)
            elif isinstance(unit, Pool):
                out, where = rules.pool(unit, x.flatten(0, 1))
            else:
                out = rules.activate(unit, x.flatten(0, 1))
            self._tape.append((x, out, where))
            x = out.view(s.agents, s.rows, -1)
        return x

    def backward(self, delta: Tensor, mode: Any) -> list[tuple[int, Tensor, Tensor]]:
        """From the loss's δ; adds up every layer's gradients by `mode` and returns what they are made of."""
        flat = (self._shape.agents * self._shape.rows, -1)
        used: list[tuple[int, Tensor, Tensor]] = []
        lowest = next(i for i, _ in self._trained())
        for i in range(len(self._units) - 1, lowest - 1, -1):
            unit = self._units[i]
            x, out, where = self._tape[i]
            before = self._units[i - 1] if i else None
            if i in self._tiles:
                used.append((i, x, delta))
                with self._streams.beside():
                    self._sum(i, x, delta, mode)
                if i == lowest:
                    break
            if isinstance(unit, Unit):
                delta = self._back(i, unit, x, delta, before)
                continue
            if isinstance(unit, Norm):
                delta = self._normalize_back(i, unit, delta).view(flat)
            elif isinstance(unit, Pool):
                delta = rules.pool_backward(unit, x.reshape(flat), where, delta.view(flat))
            else:
                delta = rules.activate_backward(cast(Activation, unit), out, delta.view(flat))
            if isinstance(before, Unit):
                if before.activation is not None:
                    delta = rules.activate_backward(before.activation, x.reshape(flat), delta)
                if before.pooled:
                    delta = rules.unpool(before.weighted.outputs, before.out, self._winner[i - 1], delta)
            delta = delta.contiguous()
        return used

    def sum_again(self, used: Iterable[tuple[int, Tensor, Tensor]], mode: Any) -> None:
        for i, x, delta in used:
            self._sum(i, x, delta, mode)

    def _ahead(self, i: int, unit: Unit, x: Tensor) -> Tensor:
        held, s, layer = self._held, self._shape, unit.weighted
        bm, bn, bk, warps, stages = self._tiles[i].forward
        if unit.by_taps:
            if not isinstance(self._units[i - 1] if i else None, Unit):
                self._channels_last(x, self._last[i], layer.channels, layer.height * layer.width)
            x = self._last[i]
            self._streams.wait(self._turned_at)
        copy = self._last.get(i + 1) if isinstance(self._next(i), Unit) else None
        grid = (math.ceil(s.rows * unit.positions / bm), math.ceil(layer.outputs / bn), s.agents)
        kernels.forward[grid](
            *(x, held.theta, self._turned[i][0] if unit.by_taps else held.theta, self._out[i], self._winner[i]),
            *(self._out[i] if copy is None else copy, held.counts, held.step),
            *(s.agents, s.rows, s.dimension, layer.weight),
            **_geometry(unit), BIAS=int(layer.bias is not None), POOLED=unit.pooled, ACT=_code(unit.activation),
            LAST=unit.by_taps, COPY=copy is not None,
            PRECISION=self._precision, BM=bm, BN=bn, BK=bk, num_warps=warps, num_stages=stages,
        )  # fmt: skip
        return self._out[i]

    def _back(self, i: int, unit: Unit, x: Tensor, delta: Tensor, before: Units | None) -> Tensor:
        held, s, layer = self._held, self._shape, unit.weighted
        bm, bn, bk, warps, stages = self._tiles[i].backward
        if unit.by_taps:
            self._channels_last(delta, self._delta_last[i], layer.outputs, unit.positions)
            delta = self._delta_last[i]
        back = self._delta[i - 1] if isinstance(before, Unit) else torch.empty_like(x)
        activation = before.activation if isinstance(before, Unit) else None
        unpool = before.out[1] if isinstance(before, Unit) and before.pooled else 0
        grid = (math.ceil(s.rows * layer.height * layer.width / bm), math.ceil(layer.channels / bn), s.agents)
        # The loop needs under 100 registers, the scattered stores after it 180; at 128 twice as many programs fit.
        registers = 128 if unpool and self._precision == "tf32" and not unit.by_taps else None
        kernels.backward[grid](
            *(delta, held.theta, self._turned[i][1] if unit.by_taps else held.theta, x),
            *(self._winner[i - 1] if unpool else held.flags, back, held.counts, held.step),
            *(s.agents, s.rows, s.dimension, layer.weight),
            **_geometry(unit), ACT=_code(activation), UNPOOL=unpool, LAST=unit.by_taps,
            PRECISION=self._precision, BM=bm, BN=bn, BK=bk, num_warps=warps, num_stages=stages, maxnreg=registers,
        )  # fmt: skip
        return back

    def _channels_last(self, images: Tensor, out: Tensor, channels: int, positions: int) -> None:
        held, s = self._held, self._shape
        grid = (math.ceil(channels / 32) * math.ceil(positions / 32), s.rows, s.agents)
        kernels.channels_last[grid](
            *(images, out, held.counts, held.step, s.agents, s.rows), C=channels, P=positions, BLOCK=32
        )

    def _normalize(self, i: int, unit: Norm, x: Tensor) -> Tensor:
        held, s = self._held, self._shape
        layer_kernels.normalize[(unit.groups, s.rows, s.agents)](
            *(x, held.theta, self._out[i], self._last[i], self._delta_last[i], held.counts, held.step),
            *(s.agents, s.rows, s.dimension, unit.weight or 0, unit.bias or 0),
            **_norm_geometry(unit), EPSILON=unit.epsilon, BIAS=unit.bias is not None,
        )  # fmt: skip
        return self._out[i]

    def _normalize_back(self, i: int, unit: Norm, delta: Tensor) -> Tensor:
        held, s = self._held, self._shape
        layer_kernels.normalize_backward[(unit.groups, s.rows, s.agents)](
            *(delta, held.theta, self._last[i], self._delta_last[i], self._delta[i], held.counts, held.step),
            *(s.agents, s.rows, s.dimension, unit.weight or 0), **_norm_geometry(unit),
        )  # fmt: skip
        return self._delta[i]

    def _embed(self, i: int, unit: Embedding, x: Tensor) -> Tensor:
        held, s = self._held, self._shape
        layer_kernels.embed[(math.ceil(unit.tokens * unit.width / 256), s.rows, s.agents)](
            *(x, held.theta, self._out[i], held.counts, held.step, s.agents, s.rows, s.dimension, unit.weight),
            TOKENS=unit.tokens, WIDTH=unit.width, BLOCK=256,
        )  # fmt: skip
        return self._out[i]

    def _sum(self, i: int, x: Tensor, delta: Tensor, mode: Any) -> None:
        held, s, shape, unit = self._held, self._shape, self._tiles[i], self._units[i]
        bo, bj, bq, warps, stages = shape.sums
        masked = s.masked and mode != sum_kernels.SUM and mode != sum_kernels.CLAMP
        layer = _layer(cast(Trained, unit))
        common = (
            *(self._sums[i], held.masks, held.clips, self.factors, self.first, self.second, held.counts, held.step),
            *(s.agents, s.rows, s.dimension, first_parameter(layer), self._first_tile[i], self.tile_count),
        )
        how = {"MASKED": masked, "MODE": mode, "SPLIT": shape.split, "num_warps": warps, "num_stages": stages}
        grid = (shape.programs, shape.split, s.agents)
        if isinstance(layer, Norm):
            layer_kernels.norm_sums[grid](
                *(delta, self._last[i], *common),
                OUTER=layer.outer, PARAMETERS=layer.parameters, INNER=layer.inner, WEIGHT=layer.weight is not None,
                KINDS=layer.size // layer.parameters, BO=bo, BQ=bq, **how,
            )  # fmt: skip
        elif isinstance(layer, Embedding):
            layer_kernels.embedding_sums[grid](
                *(delta, x, *common), WORDS=layer.words, WIDTH=layer.width, TOKENS=layer.tokens, BO=bo, BJ=bj, **how
            )
        elif layer.one_pixel:
            sum_kernels.linear_sums[grid](
                *(delta, x, *common),
                C=layer.channels, N=layer.outputs, BIAS=int(layer.bias is not None), BO=bo, BJ=bj, **how,
            )  # fmt: skip
        else:
            sum_kernels.conv_sums[grid](
                *(delta, x, *common), **_geometry(cast(Unit, unit)), BIAS=int(layer.bias is not None),
                PRECISION=self._precision, BO=bo, BJ=bj, BQ=bq, **how,
            )  # fmt: skip

    def _trained(self) -> list[tuple[int, Trained]]:
        """The units with parameters."""
        return [
            (i, unit)
            for i, unit in enumerate(self._units)
            if isinstance(unit, (Unit, Embedding)) or (isinstance(unit, Norm) and unit.size)
        ]

    def _next(self, i: int) -> Units | None:
        return self._units[i + 1] if i + 1 < len(self._units) else None


def _layer(unit: Trained) -> Weighted | Norm | Embedding:
    return unit.weighted if isinstance(unit, Unit) else unit


def _geometry(unit: Unit) -> dict[str, int]:
    layer = unit.weighted
    (kh, kw), (sh, sw), (ph, pw), (oh, ow) = layer.kernel, layer.stride, layer.padding, unit.out
    sides = {"C": layer.channels, "H": layer.height, "W": layer.width, "N": layer.outputs, "KH": kh, "KW": kw}
    return {**sides, "SH": sh, "SW": sw, "PH": ph, "PW": pw, "OH": oh, "OW": ow}


def _norm_geometry(unit: Norm) -> dict[str, int | bool]:
    size = unit.inputs // unit.groups
    block = min(_GROUP, 1 << max(4, (size - 1).bit_length()))
    where = {"GROUPS": unit.groups, "SIZE": size, "PARAMETERS": unit.parameters, "INNER": unit.inner}
    return {**where, "WEIGHT": unit.weight is not None, "BLOCK": block}


def _code(activation: Activation | None) -> Any:
    return _ACTIVATIONS[None if activation is None else activation.kind]
