"""A round's agents on a GPU: a program for all of them, a step as a CUDA graph, nothing leaves before the end.

A step takes as many places as its largest batch has, in blocks that fit into memory. Which places there are follows
from the draw alone, so that shapes tell nothing of records; a place without a record, and an example that is not finite
or cannot be read, have factor 0 and add nothing. There is no second way to compute anything: what an example adds is
the same whatever the others are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedspa.engine.stacked.buffers import RoundBuffers, Shape
from fedspa.engine.task import LocalTask
from fedspa.engine.traced.gpu_steps import Steps, placed_layers
from fedspa.engine.traced.program import Program
from fedspa.examples import Examples, in_order, leaves
from fedspa.mechanisms.clipping import CLIP_MARGIN, PLAIN, two_sum

# Examples of a block in a step of more than `sums.PLAIN` places: 2·2⁻⁵³ of these by MOST_PLACES is within the margin.
SPAN = 1024


class Stack:
    """Buffers and graphs for one `Shape`. `program` is of so many agents, or of one without their dimension."""

    def __init__(self, program: Program, like: Examples, shape: Shape, block: int, device: torch.device) -> None:
        self._program, self.shape, self._block, self._device = program, shape, block, device
        self._like = like
        self.round = RoundBuffers(shape, device)
        self._pools = [
            torch.zeros(shape.agents, shape.records, *leaf.shape[1:], dtype=leaf.dtype, device=device)
            for tree in like
            for leaf in leaves(tree)
        ]
        self.zeroed = torch.zeros(shape.agents, dtype=torch.int64, device=device)
        self._sums = torch.zeros(shape.agents, shape.dimension, dtype=torch.float64, device=device)
        self._shares = torch.full((shape.agents, shape.capacity), 0.5, dtype=torch.float64, device=device)
        self._layers = placed_layers(program.layers, shape, device)
        # θ by layers: programs want each parameter of all agents in one piece.
        parts = torch.split(self.round.theta, [len(layer.order) for layer in program.layers], dim=1)
        self._of_theta = [part.view(-1, *layer.shape) for part, layer in zip(parts, program.layers)]
        self._parameters = [torch.zeros(each.shape, device=device) for each in self._of_theta]
        self._steps = Steps(self.round, shape, self._sums, self._shares)
        self._graphs: dict[int, Any] = {}
        self._memory = None if device.type == "cpu" else torch.cuda.graph_pool_handle()  # no two graphs run at once

    def load(self, theta: Tensor, tasks: Sequence[LocalTask]) -> None:
        """Fill the buffers for a round, but for its batches."""
        padded = [*tasks, *[tasks[-1]] * (self.shape.agents - len(tasks))]
        self.round.load(theta, padded)
        for w, task in enumerate(tasks):
            own = [task.take(torch.arange(task.records))] if task.rows is not None else [Examples(task.x, task.y)]
            found = [leaf for x, y in own for tree, like in zip((x, y), self._like) for leaf in in_order(tree, like)]
            for pool, leaf in zip(self._pools, found):
                pool[w, : len(leaf)].copy_(leaf, non_blocking=True)
        if self.shape.masked:
            for layer in self._layers:
                layer.load(self.round.masks)
        self.zeroed.zero_()

    def run(self, places: Sequence[int]) -> None:
        """A step for each number of places."""
        for each in places:
            if self._device.type == "cpu":
                self._one_step(each)
            else:
                self._graph(each).replay()

    def _graph(self, places: int) -> Any:
        held = self.round
        if places not in self._graphs:
            changed = (held.theta, held.clips, held.step, held.flags, self.zeroed)
            kept = [t.clone() for t in changed]
            side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(side):
                held.step.zero_()
                self._one_step(places)
            torch.cuda.current_stream(self._device).wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._memory):
                self._one_step(places)
            for tensor, value in zip(changed, kept):
                tensor.copy_(value)
            self._graphs[places] = graph
        return self._graphs[places]

    def _one_step(self, places: int) -> None:
        held = self.round
        self._steps.draw_noise()
        torch._foreach_copy_(self._parameters, self._of_theta)
        chosen = held.index.index_select(0, held.step)[0, :, :places]
        counts = held.counts.index_select(0, held.step)[0]
        there = (torch.arange(places, device=self._device) < counts.unsqueeze(1)) & (chosen >= 0)
        spanned = places > PLAIN
        blocks = max(1, math.ceil(places / (min(self._block, SPAN) if spanned else self._block)))
        size = math.ceil(places / blocks) if places else 0
        total = lost = torch.zeros_like(self._sums) if spanned else self._sums
        for number, start in enumerate(range(0, places, size) if places else ()):
            part = slice(start, min(start + size, places))
            self._add(chosen[:, part].clamp(min=0), there[:, part], start, more=number > 0 and not spanned)
            if spanned:
                total, rounded = two_sum(total, self._sums)
                lost = lost + rounded
        if spanned:
            self._sums.copy_(total + lost)
        if not places:
            self._sums.zero_()
        self._steps.step()

    def _add(self, chosen: Tensor, there: Tensor, start: int, *, more: bool) -> None:
        """A block of examples into the sums."""
        held, s, size = self.round, self.shape, chosen.shape[1]
        offsets = torch.arange(s.agents, device=self._device).unsqueeze(1) * s.records
        lines = (chosen + offsets).flatten()
        given = [
            pool.flatten(0, 1).index_select(0, lines).view(s.agents, size, *pool.shape[2:]) for pool in self._pools
        ]
        parameters = self._parameters
        for each in given:  # as on a CPU, an empty place holds zeros
            each.masked_fill_(~there.view(s.agents, size, *[1] * (each.ndim - 2)), 0)
        if not self._program.agents:
            given, parameters = [each[0] for each in given], [each[0] for each in parameters]
        with torch.no_grad():
            made, readable = self._program.run(size, None, None, *parameters, *given)
        parts = [layer.part(made, s.agents, size) for layer in self._layers]
        squares, alive, above = self._steps.measured(parts, size)
        counted = readable.view(s.agents, size) & squares.isfinite()
        factors = self._factors(squares.sqrt(), counted & there)
        self.zeroed += (there & ~counted).sum(1)
        if s.quantile:
            shares = (
                (squares.sqrt() <= held.clips.unsqueeze(1)).double()
                if s.clip == "l2"
                else 1 - above / alive.clamp(min=1)
            )
            shares = torch.where(there, torch.where(counted, shares, 1.0), 0.5)
            self._shares[:, start : start + size].copy_(shares)
        self._steps.add(parts, factors, more=more)

    def _factors(self, norms: Tensor, counted: Tensor) -> Tensor:
        limit = (self.round.clips * (1 - CLIP_MARGIN)).unsqueeze(1)
        factors = limit / torch.maximum(norms, limit) if self.shape.clip == "l2" else torch.ones_like(norms)
        return torch.where(counted & (factors >= torch.finfo(torch.float32).tiny), factors, 0.0)
