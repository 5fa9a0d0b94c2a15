"""A round's agents as one piece of work on a GPU: fixed buffers, a step as a CUDA graph, nothing leaves before the end.

Everything that changes from step to step is read by the kernels from buffers filled in advance (which records, how
many) or made on the way (noise), so that the graph of a step can be replayed again and again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedspa.engine.stacked import kernels
from fedspa.engine.stacked.buffers import ChainBuffers, RoundBuffers, Shape, Streams, new_stream
from fedspa.engine.stacked.chacha import GROUP, LANES
from fedspa.engine.stacked.layers import fuse
from fedspa.engine.stacked.layers.base import Layer, Stage
from fedspa.mechanisms.base import LARGEST_CLIP, SMALLEST_CLIP
from fedspa.mechanisms.gaussian.plan import CLIP_QUANTILE, CLIP_RATE

# Replaying a graph of several steps hides the gap between two graphs.
_STEPS_A_GRAPH = 10


class Stack:
    """Kernels, their buffers and graphs for one `Shape`; `round` is what changes from round to round."""

    def __init__(self, layers: Sequence[Layer], shape: Shape, device: torch.device, tf32: bool) -> None:
        self._shape, self._device = shape, device
        self._graphs: dict[int, Any] = {}
        self._streams = Streams(device)
        self.round = ChainBuffers(shape, layers[0].inputs, device)
        self._passes = Passes(layers, shape, self.round, tf32, self._streams)
        self._shares = torch.zeros(shape.agents, shape.capacity, dtype=torch.float64, device=device)

    def run(self, steps: int) -> None:
        """That many local steps of every agent."""
        if self._device.type == "cpu":
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
            warm = new_stream(self._device)  # compiles the kernels, outside of any capture
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
        held, s, passes, streams = self.round, self._shape, self._passes, self._streams
        private = s.clip is not None
        with streams.beside():
            passes.prepare()
            if private:
                grid = (math.ceil(s.active / GROUP) + 1, s.agents)
                kernels.noise[grid](held.keys, held.step, held.noise, s.active, LANES=LANES, num_warps=2)
        size = held.x.shape[2]
        kernels.gather[(math.ceil(size / 1024), s.capacity, s.agents)](
            *(held.pool, held.index, held.x, held.counts, held.step, s.agents, s.capacity, s.records),
            SIZE=size, BLOCK=1024,
        )  # fmt: skip
        logits = passes.forward()
        delta = torch.empty_like(logits)
        classes = logits.shape[2]
        kernels.loss_gradient[(s.capacity, s.agents)](
            *(logits, held.labels, held.index, delta, held.counts, held.step, held.flags),
            *(s.agents, s.capacity, s.records), C=classes, BLOCK=max(16, 1 << (classes - 1).bit_length()), num_warps=1,
        )  # fmt: skip
        mode = {
            None: kernels.SUM,
            "coordinate": kernels.COUNT if s.quantile else kernels.CLAMP,
            "l2": kernels.SCALED,
        }[s.clip]
        passes.backward(delta, mode)
        streams.join()
        if s.clip == "l2" or s.quantile:
            stage = passes.stage
            kernels.example_statistics[(s.capacity, s.agents)](
                *(stage.first, stage.second, held.clips, stage.factors, self._shares, held.counts, held.step),
                *(s.agents, s.capacity, stage.tiles, s.active),
                MODE=mode, BLOCK=128, num_warps=1,
            )  # fmt: skip
        if s.clip == "l2":
            passes.sum_again(mode)
        end_step(held, s, passes.all_sums, passes.table, passes.most_parts, self._shares)


class Passes:
    """`all_sums` holds every layer's partial sums; `table` says where: first coordinate, size, start, parts."""

    def __init__(self, layers: Sequence[Layer], shape: Shape, held: ChainBuffers, tf32: bool, streams: Streams) -> None:
        self.stage = Stage(shape, held, "tf32" if tf32 else "ieee", streams)
        self._units = [layer.unit(self.stage) for layer in fuse(list(layers))]
        for before, after in zip(self._units, self._units[1:]):
            before.after, after.before = after, before
        self._trained = [unit for unit in self._units if unit.layer.size]
        self._allocate(held.x.device)

    def _allocate(self, device: torch.device) -> None:
        stage, s = self.stage, self.stage.shape
        parts: list[tuple[int | None, int, int, int]] = []
        end = 0
        for unit in self._trained:
            parts.append((unit.layer.start, unit.layer.size, end, unit.split))
            end += s.agents * unit.split * unit.layer.size
            unit.first_tile = stage.tiles
            stage.tiles += unit.programs
        self.all_sums = torch.zeros(end, dtype=torch.float64, device=device)
        for unit, (_, size, start, split) in zip(self._trained, parts):
            unit.sums = self.all_sums[start : start + s.agents * split * size]
        self.table = torch.tensor(parts, dtype=torch.int64, device=device)
        self.most_parts = max(unit.split for unit in self._trained)
        statistics = stage.tiles if s.clip == "l2" or s.quantile else 1
        stage.first = stage.make(s.capacity, statistics, dtype=torch.float64)
        stage.second = stage.make(s.capacity, statistics if s.clip == "coordinate" else 1, dtype=torch.float64)
        stage.factors = torch.ones(s.agents, s.capacity, device=device)

    def prepare(self) -> None:
        """What the step's kernels need of θ; they wait for it."""
        for unit in self._units:
            unit.prepare()
        self.stage.prepared = self.stage.streams.mark()

    def forward(self) -> Tensor:
        """The logits of the step's batches; units keep what `backward` needs."""
        s, x = self.stage.shape, self.stage.held.x
        for unit in self._units:
            x = unit.forward(x).view(s.agents, s.capacity, -1)
        return x

    def backward(self, delta: Tensor, mode: Any) -> None:
        """From the loss's δ; adds up every layer's gradients by `mode`."""
        for unit in reversed(self._units):
            if unit.layer.size:
                unit.delta = delta
                with self.stage.streams.beside():
                    unit.sum(mode, self._masked(mode))
            if unit is self._trained[0]:
                return
            delta = unit.backward(delta)

    def sum_again(self, mode: Any) -> None:
        for unit in reversed(self._trained):
            unit.sum(mode, self._masked(mode))

    def _masked(self, mode: Any) -> bool:
        return self.stage.shape.masked and mode != kernels.SUM and mode != kernels.CLAMP


def end_step(held: RoundBuffers, s: Shape, sums: Tensor, table: Tensor, parts: int, shares: Tensor) -> None:
    """`table` says where in `sums` each layer's are, in `parts` at most; `shares` feed the quantile."""
    kernels.take_step[(math.ceil(s.active / 256), s.agents)](
        *(held.theta, held.coordinates, sums, table, held.noise, held.clips, held.sigmas),
        *(held.batches, held.sizes, held.flags, s.agents, s.dimension, s.active),
        LAYERS=len(table), SPLITS=parts, MASKED=s.masked, NOISY=s.clip is not None, BLOCK=256,
    )  # fmt: skip
    if s.quantile:
        kernels.move_clip[(s.agents,)](
            *(shares, held.noise, held.clips, held.count_sigmas, held.batches, held.counts, held.step),
            *(s.agents, s.capacity, s.active),
            RATE=CLIP_RATE, QUANTILE=CLIP_QUANTILE, LEAST=SMALLEST_CLIP, MOST=LARGEST_CLIP, BLOCK=64, num_warps=1,
        )  # fmt: skip
    held.step.add_(1)
