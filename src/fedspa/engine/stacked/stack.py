"""A round's agents as one piece of work on a GPU: fixed buffers, a step as a CUDA graph, nothing leaves before the end.

Everything that changes from step to step is read by the kernels from buffers filled in advance (which records, how
many) or made on the way (noise), so that the graph of a step can be replayed again and again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from fedspa.engine.stacked import kernels, step_kernels, sum_kernels
from fedspa.engine.stacked.buffers import ChainBuffers, Shape
from fedspa.engine.stacked.chacha import GROUP, LANES
from fedspa.engine.stacked.layers.base import Layer
from fedspa.engine.stacked.passes import Passes
from fedspa.engine.stacked.step_end import end_step
from fedspa.engine.stacked.streams import Streams, new_stream

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
                step_kernels.noise[grid](held.keys, held.step, held.noise, s.active, LANES=LANES, num_warps=2)
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
            None: sum_kernels.SUM,
            "coordinate": sum_kernels.COUNT if s.quantile else sum_kernels.CLAMP,
            "l2": sum_kernels.SCALED,
        }[s.clip]
        passes.backward(delta, mode)
        streams.join()
        if s.clip == "l2" or s.quantile:
            stage = passes.stage
            sum_kernels.example_statistics[(s.capacity, s.agents)](
                *(stage.first, stage.second, held.clips, stage.factors, self._shares, held.counts, held.step),
                *(s.agents, s.capacity, stage.tiles, s.active),
                MODE=mode, BLOCK=128, num_warps=1,
            )  # fmt: skip
        if s.clip == "l2":
            passes.sum_again(mode)
        end_step(held, s, passes.all_sums, passes.table, passes.most_parts, self._shares)
