"""A round's agents on a GPU: a program for all of them, a step as a CUDA graph, nothing leaves before the end.

A step takes as many places as its largest batch has, in blocks that fit into memory. Which places there are follows
from the draw alone, so that shapes tell nothing of records; a place without a record, and an example that is not finite
or cannot be read, have factor 0 and add nothing. There is no second way to compute anything: what an example adds is
the same whatever the others are.

Of a line's gradient the active coordinates lie side by side in its row, and nothing else is kept of it. The gradients
of a convolution's or a linear layer's weights are made tile by tile in registers, and only what is active leaves them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedspa.engine.local import LocalTask
from fedspa.engine.traced.program import Layer, Program
from fedspa.examples import Examples, in_order, leaves
from fedspa.mechanisms.clipping import PLAIN, two_sum
from fedspa.randomness.streams import derive_key

# Examples of a block in a step of more than `clipping.PLAIN` places: 2·2⁻⁵³ of these by MOST_PLACES is within the
# margin.
SPAN = 1024
# Gradients of layers up to this size are cut together: a kernel's start costs more than to copy them side by side.
_SMALL = 8192
# Numbers of θ that a program copies, and on multiples of how many a layer's begin: products read whole vectors.
TILE, _ALIGNED = 1024, 64


@dataclass(frozen=True, slots=True)
class Shape:
    """What a stack's buffers and graphs are made for. `capacity`, `records` and `width` may be larger than needed;
    `width` is how many active coordinates outside of Embeddings a row can hold."""

    agents: int
    capacity: int
    records: int
    steps: int
    dimension: int
    active: int
    masked: bool
    clip: str
    width: int


class RoundBuffers:
    """What changes from round to round, one line an agent: the tensors whose places the graphs know."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self._shape = s = shape
        agents, capacity = s.agents, s.capacity

        def make(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.theta = make(agents, s.dimension)
        self.index = make(s.steps, agents, capacity, dtype=torch.int64)
        self.counts = make(s.steps, agents, dtype=torch.int32)
        self.step = make(1, dtype=torch.int32)
        self.coordinates = make(agents, s.active if s.masked else 1, dtype=torch.int64)
        self.keys = make(agents, 8, dtype=torch.int32)
        self.clips, self.sigmas, self.batches, self.sizes = (make(agents, dtype=torch.float64) for _ in range(4))
        self.zeroed = make(agents, dtype=torch.int64)
        self.noise = make(agents, s.active, dtype=torch.float64)
        self.sums = make(agents, s.dimension, dtype=torch.float64)

    def load(self, theta: Tensor, tasks: Sequence[LocalTask]) -> None:
        """Fill the buffers for a round, but for its records and batches."""
        self.theta.copy_(theta.expand(self._shape.agents, -1))
        for w, task in enumerate(tasks):
            if task.coordinates is not None:
                self.coordinates[w].copy_(task.coordinates, non_blocking=True)
        keys = b"".join(derive_key(task.key, "noise", "chacha20") for task in tasks)
        self.keys.copy_(torch.from_numpy(np.frombuffer(keys, dtype="<i4").reshape(-1, 8).copy()))
        plans = [task.plan for task in tasks if task.plan is not None]
        _fill(self.clips, [p.clip_value for p in plans])
        _fill(self.sigmas, [p.noise_multiplier * p.clip_norm / p.clip_value for p in plans])
        _fill(self.batches, [task.batch for task in tasks])
        _fill(self.sizes, [task.local_lr * task.scale for task in tasks])
        self.step.zero_()
        self.zeroed.zero_()

    def deltas(self, theta: Tensor) -> Tensor:
        """[agents, active]."""
        moved = self.theta - theta
        return moved.gather(1, self.coordinates) if self._shape.masked else moved


def _fill(buffer: Tensor, values: Sequence[float]) -> None:
    buffer.copy_(torch.tensor(values, dtype=buffer.dtype))


@dataclass(frozen=True, slots=True)
class Part:
    """One layer of a program, or several small ones whose gradients are cut side by side. `first` is its first number
    among those of all parts, `factors` as of `Layer`."""

    numbers: tuple[int, ...]
    first: int
    size: int
    factors: tuple[Any, ...] | None


class Columns:
    """Which column of a row each active coordinate has: part by part, and in a part as its program makes them.

    The numbers that a program makes for a line are counted through, part by part. `of_number` is each one's column, or
    -1, `number` each column's number within its part, `coordinate` each column's in θ, and `firsts` where each part
    begins. Where all coordinates are active these are the same for all agents, and have one line."""

    def __init__(self, layers: Sequence[Layer], shape: Shape, device: torch.device) -> None:
        self.shape, self.parts = shape, list[Part]()
        order: list[Tensor] = []
        rows = [number for number, layer in enumerate(layers) if layer.words is None]
        small = tuple(n for n in rows if len(layers[n].order) <= _SMALL and layers[n].factors is None)
        groups = [(n,) for n in rows if n not in small]
        for numbers in [*groups, small] if small else groups:
            size = sum(len(layers[n].order) for n in numbers)
            self.parts.append(Part(numbers, sum(len(each) for each in order), size, layers[numbers[0]].factors))
            order.append(torch.cat([coordinates_of(layers, n).int() for n in numbers]))
        self._all = torch.cat([*order, torch.empty(0, dtype=torch.int32)]).to(device)
        lines = shape.agents if shape.masked else 1
        self.of_number = self._make(lines if shape.masked else 0, len(self._all), device)
        self.number, self.coordinate = self._make(lines, shape.width, device), self._make(lines, shape.width, device)
        self.firsts = self._make(lines, len(self.parts) + 1, device)
        self._starts = torch.tensor([part.first for part in self.parts], device=device)
        self._ends = self._starts + torch.tensor([part.size for part in self.parts], device=device)
        if not shape.masked:
            self._fill(0, torch.ones(len(self._all), dtype=torch.bool, device=device))

    def load(self, active: Sequence[Tensor]) -> None:
        """The coordinates of the agents."""
        for w, coordinates in enumerate(active):
            self._fill(w, _flags(coordinates, self.shape.dimension)[self._all])

    def lines_of(self, table: Tensor) -> int:
        """From one agent's line of a table to the next one's."""
        return table.shape[1] if self.shape.masked else 0

    @property
    def ends(self) -> Tensor:
        """How many columns each agent uses; a view of `firsts`."""
        return self.firsts[:, -1]

    def _fill(self, line: int, flags: Tensor) -> None:
        column = flags.cumsum(0, dtype=torch.int32) - 1
        if self.shape.masked:
            self.of_number[line].copy_(torch.where(flags, column, -1))
        self.firsts[line, 1:] = column[self._ends - 1] + 1
        chosen = flags.nonzero().squeeze(1)
        self.coordinate[line, : len(chosen)] = self._all[chosen]
        self.number[line, : len(chosen)] = chosen - self._starts[torch.bucketize(chosen, self._ends, right=True)]

    @staticmethod
    def _make(lines: int, size: int, device: torch.device) -> Tensor:
        return torch.zeros(lines, size, dtype=torch.int32, device=device)


def _flags(coordinates: Tensor, dimension: int) -> Tensor:
    flags = torch.zeros(dimension, dtype=torch.bool, device=coordinates.device)
    return flags.index_fill_(0, coordinates, True)


def coordinates_of(layers: Sequence[Layer], number: int) -> Tensor:
    """Which coordinate of θ each number is that a program makes of a layer."""
    order, start = layers[number].order, sum(len(layer.order) for layer in layers[:number])
    coordinates = torch.empty_like(order)
    coordinates[order] = torch.arange(start, start + len(order))
    return coordinates


class Tokens:
    """An Embedding. `whole` are its sums, in whole numbers; `values` and `tokens` those of a block."""

    values: Tensor
    tokens: Tensor

    def __init__(self, words: int, coordinates: Tensor, shape: Shape) -> None:
        self._coordinates, self.words, self._shape = coordinates, words, shape
        self._start, self._size = int(coordinates[0]), len(coordinates)
        device = coordinates.device
        self._mask = torch.zeros(shape.agents, self._size if shape.masked else 0, dtype=torch.bool, device=device)
        self.whole = torch.zeros(shape.agents, words, self._size // words, dtype=torch.int64, device=device)

    def load(self, active: Sequence[Tensor]) -> None:
        for w, coordinates in enumerate(active):
            self._mask[w].copy_(_flags(coordinates, self._shape.dimension)[self._coordinates])

    def keep(self, examples: int, deltas: Tensor, tokens: Tensor) -> None:
        """Of each word that an example has, the sum of its deltas, at its first token."""
        agents = self._shape.agents
        self.tokens = (tokens.reshape(agents, examples, -1) % self.words).contiguous()
        lines = self.tokens.flatten(0, 1)
        same = lines.unsqueeze(2) == lines.unsqueeze(1)
        values = torch.bmm(same.to(deltas.dtype), deltas.reshape(len(lines), lines.shape[1], -1))
        kept = ~torch.tril(same, -1).any(2).unsqueeze(2)
        if self._shape.masked:
            agent = torch.arange(agents, device=lines.device).view(-1, 1, 1)
            kept = kept & self._mask.view(agents, self.words, -1)[agent, self.tokens].flatten(0, 1)
        values = torch.where(kept, values, 0.0).contiguous()
        self.values = values.view(agents, examples, *values.shape[1:])

    def into(self, sums: Tensor, units: Tensor) -> None:
        sums[:, self._start : self._start + self._size] = self.whole.flatten(1).double() / units.unsqueeze(1)


UNITS = 2.0**40  # whole numbers of an Embedding's sums, to the clip value


def keep(size: int, block: Block, number: int, made: Any) -> None:
    """What a program calls for each layer, as soon as its gradients are there."""
    block.keep(number, made)


class Block:
    """The rows of a block of examples, while a program makes them."""

    def __init__(self, columns: Columns, tokens: dict[int, Tokens], work: Any, examples: int) -> None:
        self._columns, self._tokens, self._work, self._examples = columns, tokens, work, examples
        s = columns.shape
        self.rows = torch.empty(s.agents, examples, s.width, device=columns.coordinate.device)
        self._parts = {number: at for at, part in enumerate(columns.parts) for number in part.numbers}
        self._waiting: dict[int, Tensor] = {}

    def keep(self, number: int, made: Any) -> None:
        if number in self._tokens:
            self._tokens[number].keep(self._examples, *made)
            return
        at = self._parts[number]
        part = self._columns.parts[at]
        if part.factors is not None:
            self._work.cut_factors(self._columns, at, self.rows, *made)
            return
        lines = self._columns.shape.agents * self._examples
        self._waiting[number] = made.reshape(lines, -1)
        if all(each in self._waiting for each in part.numbers):
            several = [self._waiting.pop(each) for each in part.numbers]
            self._work.cut(self._columns, at, self.rows, several[0] if len(several) == 1 else torch.cat(several, 1))


class Parameters:
    """θ of all agents by layers: programs want each parameter of all agents in one piece. `tiles` has a line for each
    piece that is copied: agent, first coordinate, first number of `whole`, and size."""

    def __init__(self, layers: Sequence[Layer], agents: int, device: torch.device) -> None:
        tiles, coordinate, number, numbers = [], 0, 0, []
        for layer in layers:
            size = len(layer.order)
            numbers.append(number)
            tiles += [
                (agent, coordinate + at, number + agent * size + at, min(TILE, size - at))
                for agent in range(agents)
                for at in range(0, size, TILE)
            ]
            coordinate += size
            number += -(-agents * size // _ALIGNED) * _ALIGNED
        self.tiles = torch.tensor(tiles, device=device)
        self.whole = torch.zeros(number, device=device)
        self.of_layers = [
            self.whole[first : first + agents * len(layer.order)].view(agents, *layer.shape)
            for first, layer in zip(numbers, layers)
        ]


class Stack:
    """Buffers and graphs for one `Shape`. `program` is of so many agents, or of one without their dimension."""

    def __init__(self, program: Program, like: Examples, shape: Shape, block: int, device: torch.device) -> None:
        self._program, self.shape, self._block, self._device, self._like = program, shape, block, device, like
        self.round = RoundBuffers(shape, device)
        self._pools = [
            torch.zeros(shape.agents, shape.records, *leaf.shape[1:], dtype=leaf.dtype, device=device)
            for tree in like
            for leaf in leaves(tree)
        ]
        self._columns = Columns(program.layers, shape, device)
        self._tokens = {
            number: Tokens(layer.words, coordinates_of(program.layers, number).to(device), shape)
            for number, layer in enumerate(program.layers)
            if layer.words is not None
        }
        self._parameters = Parameters(program.layers, shape.agents, device)
        self._work = work_on(self.round, shape)
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
            active = list(self.round.coordinates)
            self._columns.load(active)
            for each in self._tokens.values():
                each.load(active)

    def run(self, first: int, index: Tensor, counts: Tensor, places: Sequence[int]) -> None:
        """Steps from `first` on: each agent's places [steps, agents, capacity], how many of them it takes, and how many
        the most of all agents. Nothing waits for the steps before."""
        for buffer, values in ((self.round.index, index), (self.round.counts, counts.int())):
            there = values.pin_memory() if buffer.is_cuda else values
            buffer[first : first + len(values)].copy_(there, non_blocking=True)
        for each in places:
            if self._device.type == "cpu":
                self._one_step(each)
            else:
                self._graph(each).replay()

    def _graph(self, places: int) -> Any:
        held = self.round
        if places not in self._graphs:
            changed = (held.theta, held.step, held.zeroed)
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
        sums = self.round.sums
        self._work.draw_noise()
        self._work.spread(self._parameters)
        spanned = places > PLAIN
        blocks = max(1, math.ceil(places / (min(self._block, SPAN) if spanned else self._block)))
        size = math.ceil(places / blocks) if places else 0
        total = lost = torch.zeros_like(sums) if spanned else sums
        for number, start in enumerate(range(0, places, size) if places else ()):
            self._add(start, min(start + size, places) - start, more=number > 0 and not spanned)
            if spanned:
                total, rounded = two_sum(total, sums)
                lost = lost + rounded
        if spanned:
            sums.copy_(total + lost)
        if not places:
            sums.zero_()
        self._work.step()

    def _add(self, start: int, size: int, *, more: bool) -> None:
        """A block of examples into the sums."""
        given = [self._work.gather(pool, start, size) for pool in self._pools]
        parameters = self._parameters.of_layers
        if not self._program.agents:
            given, parameters = [each[0] for each in given], [each[0] for each in parameters]
        block = Block(self._columns, self._tokens, self._work, size)
        with torch.no_grad():
            _, readable = self._program.run(size, block, None, *parameters, *given)
        tokens = list(self._tokens.values())
        factors = self._work.weigh(self._columns, block.rows, tokens, readable, start)
        self._work.add(self._columns, block.rows, factors, more)
        for each in tokens:
            self._work.scatter(each, factors, more)
            each.into(self.round.sums, UNITS / self.round.clips)


def work_on(held: RoundBuffers, shape: Shape) -> Any:
    """What does a step's work."""
    from fedspa.engine.traced.gpu_work import Kernels  # Triton is there on a GPU only

    return Kernels(held, shape)
