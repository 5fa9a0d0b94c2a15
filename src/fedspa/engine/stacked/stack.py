"""A round's agents as one piece of work on a GPU: fixed buffers, a step as a CUDA graph, nothing leaves before the end.

Everything that changes from step to step is read by the kernels from buffers filled in advance (which records, how
many) or made on the way (noise), so that the graph of a step can be replayed τ times without the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

from fedspa.engine.layers import Activation, Pool
from fedspa.engine.stacked import kernels, rules, step_kernels, sum_kernels
from fedspa.engine.stacked.buffers import RoundBuffers, Shape
from fedspa.engine.stacked.chacha import GROUP, LANES
from fedspa.engine.stacked.describe import Layer
from fedspa.engine.stacked.units import Tiles, Unit, fuse, tiles
from fedspa.mechanism.release import CLIP_QUANTILE, CLIP_RATE
from fedspa.privacy.plan import LARGEST_CLIP, SMALLEST_CLIP

_ACTIVATIONS = {None: kernels.NONE, "relu": kernels.RELU, "tanh": kernels.TANH}
# Replaying a graph of several steps hides the gap between two graphs.
_STEPS_A_GRAPH = 10


class Stack:
    """Kernels, their buffers and graphs for one `Shape`; `round` is what changes from round to round."""

    def __init__(self, layers: Sequence[Layer], shape: Shape, device: torch.device, tf32: bool) -> None:
        self._shape, self._device = shape, device
        self._precision = "tf32" if tf32 else "ieee"
        self._units = fuse(layers)
        self._tiles: dict[int, Tiles] = {i: tiles(u) for i, u in enumerate(self._units) if isinstance(u, Unit)}
        self._graphs: dict[int, Any] = {}
        self._side = _stream(device) if device.type == "cuda" else None
        self._allocate()

    def _allocate(self) -> None:
        s, device = self._shape, self._device
        agents, rows = s.agents, s.rows
        self.round = RoundBuffers(s, self._input_size(), device)

        def make(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self._out: dict[int, Tensor] = {}
        self._winner: dict[int, Tensor] = {}
        self._delta: dict[int, Tensor] = {}
        self._sums: dict[int, Tensor] = {}
        parts: list[tuple[int, int, int, int]] = []
        self._first_tile: dict[int, int] = {}
        self._tile_count, end = 0, 0
        for i, unit in self._weighted():
            self._out[i] = make(agents, rows, unit.outputs)
            # δ before the pooling, zeros included: both kernels that read it want plain rows.
            self._delta[i] = make(agents, rows, unit.weighted.outputs * unit.positions)
            # Without pooling nothing reads it; a pointer must still be given.
            self._winner[i] = make(*self._out[i].shape, dtype=torch.int8) if unit.pooled else make(1, dtype=torch.int8)
            parts.append((unit.weighted.weight, unit.weighted.size, end, self._tiles[i].split))
            end += agents * self._tiles[i].split * unit.weighted.size
            self._first_tile[i] = self._tile_count
            self._tile_count += self._tiles[i].sum_tiles(unit.weighted)
        sums = make(end)
        for (i, _unit), (_low, size, start, split) in zip(self._weighted(), parts):
            self._sums[i] = sums[start : start + agents * split * size]
        self._all_sums = sums
        self._table = torch.tensor(parts, dtype=torch.int64, device=device)
        statistics = self._tile_count if s.clip == "l2" or s.quantile else 1
        self._first = make(agents, rows, statistics, dtype=torch.float64)
        self._second = make(agents, rows, statistics if s.clip == "coordinate" else 1, dtype=torch.float64)
        self._factors = torch.ones(agents, rows, device=device)
        self._shares = make(agents, rows, dtype=torch.float64)

    def run(self, steps: int) -> None:
        """That many local steps of every agent."""
        if self._side is None:
            for _ in range(steps):
                self._one_step()
            return
        many, few = divmod(steps, _STEPS_A_GRAPH)
        for _ in range(many):
            self._graph(_STEPS_A_GRAPH).replay()
        for _ in range(few):
            self._graph(1).replay()

    def _graph(self, steps: int) -> Any:
        held = self.round
        if steps not in self._graphs:
            kept = [t.clone() for t in (held.theta, held.clips, held.step, held.flags)]
            warm = _stream(self._device)  # compiles the kernels, outside of any capture
            warm.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(warm):
                held.step.zero_()
                self._one_step()
            torch.cuda.current_stream(self._device).wait_stream(warm)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(steps):
                    self._one_step()
            for tensor, value in zip((held.theta, held.clips, held.step, held.flags), kept):
                tensor.copy_(value)
            self._graphs[steps] = graph
        return self._graphs[steps]

    def _one_step(self) -> None:
        held = self.round
        s = self._shape
        private = s.clip is not None
        with self._beside():
            if private:
                grid = (math.ceil(s.active / GROUP) + 1, s.agents)
                step_kernels.noise[grid](held.keys, held.step, held.noise, s.active, LANES=LANES, num_warps=2)
        self._forward()
        mode = {
            None: sum_kernels.SUM,
            "coordinate": sum_kernels.COUNT if s.quantile else sum_kernels.CLAMP,
            "l2": sum_kernels.SCALED,
        }
        used = self._backward(mode[s.clip])
        if s.clip == "l2" or s.quantile:
            self._join()
            sum_kernels.row_statistics[(s.rows, s.agents)](
                *(self._first, self._second, held.clips, self._factors, self._shares, held.counts, held.step),
                *(s.agents, s.rows, self._tile_count, s.active),
                MODE=mode[s.clip], BLOCK=128, num_warps=1,
            )  # fmt: skip
        if s.clip == "l2":
            for i, x, delta in used:
                self._sum(i, x, delta, sum_kernels.SCALED)
        self._join()
        splits = max(t.split for t in self._tiles.values())
        step_kernels.take_step[(math.ceil(s.active / 256), s.agents)](
            *(held.theta, held.coordinates, self._all_sums, self._table, held.noise, held.clips, held.sigmas),
            *(held.batches, held.sizes, held.flags, s.agents, s.dimension, s.active),
            LAYERS=len(self._tiles), SPLITS=splits, MASKED=s.masked, NOISY=private, BLOCK=256,
        )  # fmt: skip
        if s.quantile:
            step_kernels.move_clip[(s.agents,)](
                *(self._shares, held.noise, held.clips, held.count_sigmas, held.batches, held.counts, held.step),
                *(s.agents, s.rows, s.active),
                RATE=CLIP_RATE, QUANTILE=CLIP_QUANTILE, LEAST=SMALLEST_CLIP, MOST=LARGEST_CLIP, BLOCK=64, num_warps=1,
            )  # fmt: skip
        held.step.add_(1)

    def _forward(self) -> None:
        held = self.round
        s = self._shape
        size = self._input_size()
        kernels.gather[(math.ceil(size / 1024), s.rows, s.agents)](
            *(held.pool, held.index, held.x, held.counts, held.step, s.agents, s.rows, s.records),
            SIZE=size, BLOCK=1024,
        )  # fmt: skip
        x = held.x
        self._tape: list[tuple[Tensor, Tensor, Tensor | None]] = []
        for i, unit in enumerate(self._units):
            where = None
            if isinstance(unit, Unit):
                out = self._ahead(i, unit, x)
            elif isinstance(unit, Pool):
                out, where = rules.pool(unit, x.flatten(0, 1))
            else:
                out = rules.activate(unit, x.flatten(0, 1))
            self._tape.append((x, out, where))
            x = out.view(s.agents, s.rows, -1)

    def _ahead(self, i: int, unit: Unit, x: Tensor) -> Tensor:
        held = self.round
        s, layer, (bm, bn, bk, warps) = self._shape, unit.weighted, self._tiles[i].forward
        grid = (math.ceil(s.rows * unit.positions / bm), math.ceil(layer.outputs / bn), s.agents)
        kernels.forward[grid](
            *(x, held.theta, self._out[i], self._winner[i], held.counts, held.step),
            *(s.agents, s.rows, s.dimension, layer.weight),
            **_geometry(unit), BIAS=int(layer.bias is not None), POOLED=unit.pooled, ACT=_code(unit.activation),
            PRECISION=self._precision, BM=bm, BN=bn, BK=bk, num_warps=warps,
        )  # fmt: skip
        return self._out[i]

    def _backward(self, mode: Any) -> list[tuple[int, Tensor, Tensor]]:
        """Runs `mode` on every layer's gradients; returns what the layers' gradients are made of."""
        held = self.round
        s = self._shape
        logits = self._tape[-1][1]
        classes = logits.numel() // (s.agents * s.rows)
        delta = torch.empty_like(logits)
        kernels.loss_gradient[(s.rows, s.agents)](
            *(logits, held.labels, held.index, delta, held.counts, held.step, held.flags),
            *(s.agents, s.rows, s.records), C=classes, BLOCK=max(16, 1 << (classes - 1).bit_length()), num_warps=1,
        )  # fmt: skip
        used: list[tuple[int, Tensor, Tensor]] = []
        for i in range(len(self._units) - 1, -1, -1):
            unit = self._units[i]
            x, out, where = self._tape[i]
            before = self._units[i - 1] if i else None
            if isinstance(unit, Unit):
                used.append((i, x, delta))
                with self._beside():
                    self._sum(i, x, delta, mode)
                if not used_below(self._units, i):
                    break
                delta = self._back(i, unit, x, delta, before)
                continue
            flat = delta.view(s.agents * s.rows, -1)
            if isinstance(unit, Pool):
                delta = rules.pool_backward(unit, x.reshape(s.agents * s.rows, -1), where, flat)
            else:
                delta = rules.activate_backward(unit, out, flat)
            if isinstance(before, Unit):
                if before.activation is not None:
                    delta = rules.activate_backward(before.activation, x.reshape(s.agents * s.rows, -1), delta)
                if before.pooled:
                    delta = rules.unpool(before.weighted.outputs, before.out, self._winner[i - 1], delta)
            delta = delta.contiguous()
        return used

    def _back(self, i: int, unit: Unit, x: Tensor, delta: Tensor, before: Unit | Pool | Activation | None) -> Tensor:
        held = self.round
        s, layer, (bm, bn, bk, warps) = self._shape, unit.weighted, self._tiles[i].backward
        back = self._delta[i - 1] if isinstance(before, Unit) else torch.empty_like(x)
        activation = before.activation if isinstance(before, Unit) else None
        unpool = before.out[1] if isinstance(before, Unit) and before.pooled else 0
        grid = (math.ceil(s.rows * layer.height * layer.width / bm), math.ceil(layer.channels / bn), s.agents)
        # The loop needs under 100 registers, the scattered stores after it 180; at 128 twice as many programs fit.
        registers = 128 if unpool and self._precision == "tf32" else None
        kernels.backward[grid](
            *(delta, held.theta, x, self._winner[i - 1] if unpool else held.flags, back, held.counts, held.step),
            *(s.agents, s.rows, s.dimension, layer.weight),
            **_geometry(unit), ACT=_code(activation), UNPOOL=unpool,
            PRECISION=self._precision, BM=bm, BN=bn, BK=bk, num_warps=warps, maxnreg=registers,
        )  # fmt: skip
        return back

    def _sum(self, i: int, x: Tensor, delta: Tensor, mode: Any) -> None:
        held = self.round
        s, shape = self._shape, self._tiles[i]
        unit = cast(Unit, self._units[i])
        layer = unit.weighted
        common = (self._sums[i], held.masks, held.clips, self._factors, self._first, self._second)
        numbers = (s.agents, s.rows, s.dimension, layer.weight, self._first_tile[i], self._tile_count)
        bo, bj, bq, warps = shape.sums
        grid = (shape.sum_tiles(layer), shape.split, s.agents)
        bias, masked = int(layer.bias is not None), s.masked and mode != sum_kernels.SUM and mode != sum_kernels.CLAMP
        if layer.one_pixel:
            sum_kernels.linear_sums[grid](
                *(delta, x, *common, held.counts, held.step, *numbers),
                C=layer.channels, N=layer.outputs, BIAS=bias, MASKED=masked, MODE=mode,
                SPLIT=shape.split, BO=bo, BJ=bj, num_warps=warps,
            )  # fmt: skip
            return
        sum_kernels.conv_sums[grid](
            *(delta, x, *common, held.counts, held.step, *numbers),
            **_geometry(unit), BIAS=bias, MASKED=masked, MODE=mode,
            PRECISION=self._precision, SPLIT=shape.split, BO=bo, BJ=bj, BQ=bq, num_warps=warps,
        )  # fmt: skip

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Work that only the step's end waits for, on a stream of its own."""
        if self._side is None:
            yield
            return
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            yield

    def _join(self) -> None:
        if self._side is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._side)

    def _weighted(self) -> list[tuple[int, Unit]]:
        return [(i, unit) for i, unit in enumerate(self._units) if isinstance(unit, Unit)]

    def _input_size(self) -> int:
        first = self._units[0]
        if isinstance(first, Unit):
            return first.weighted.inputs
        if isinstance(first, Pool):
            return math.prod(first.image)
        return next(unit for _, unit in self._weighted()).weighted.inputs


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def used_below(units: Sequence[Unit | Pool | Activation], i: int) -> bool:
    """Whether a layer before number i has parameters, so that δ must go on."""
    return any(isinstance(unit, Unit) for unit in units[:i])


def _geometry(unit: Unit) -> dict[str, int]:
    layer = unit.weighted
    (kh, kw), (sh, sw), (ph, pw), (oh, ow) = layer.kernel, layer.stride, layer.padding, unit.out
    sides = {"C": layer.channels, "H": layer.height, "W": layer.width, "N": layer.outputs, "KH": kh, "KW": kw}
    return {**sides, "SH": sh, "SW": sw, "PH": ph, "PW": pw, "OH": oh, "OW": ow}


def _code(activation: Activation | None) -> Any:
    return _ACTIVATIONS[None if activation is None else activation.kind]
