"""What a round gives to a stack and takes from it: the tensors whose places the graphs know."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedspa.engine.task import LocalTask
from fedspa.randomness.sampling import Indices, draw_batch
from fedspa.randomness.streams import Stream, derive_key


@dataclass(frozen=True, slots=True)
class Shape:
    """What a stack's buffers and graphs are made for; `capacity`, `records` and `steps` may be larger than needed."""

    agents: int
    capacity: int
    records: int
    steps: int
    dimension: int
    active: int
    masked: bool
    clip: str | None
    quantile: bool
    masks: bool = False  # wanted as lines of d flags, whatever the clip

    def with_room(self) -> Shape:
        """With some room to spare, so that the next round's largest batch fits without new buffers and graphs."""
        return replace(self, capacity=room(self.capacity), records=-(-self.records // 16) * 16)

    def covers(self, other: Shape) -> bool:
        enough = self.capacity >= other.capacity and self.records >= other.records and self.steps >= other.steps
        names = ("agents", "dimension", "active", "masked", "clip", "quantile")
        return enough and all(getattr(self, name) == getattr(other, name) for name in names)


def room(batch: int) -> int:
    """Capacity for a largest batch. A multiple of 16: kernels are compiled for numbers that are and for those
    that are not, and a change from one to the other would compile them all again."""
    return max(16, -(-(batch + batch // 8) // 16) * 16)


class RoundBuffers:
    """One line an agent. `flags[w]` is raised where agent w met a number that is not finite: its result is then not to
    be used, since the kernels do not carry out the rule that such an example counts as zero."""

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
        self._needs_masks = s.masked and (s.masks or s.clip == "l2" or s.quantile)
        self.masks = make(agents, s.dimension if self._needs_masks else 1, dtype=torch.uint8)
        self.keys = make(agents, 8, dtype=torch.int32)
        self.clips, self.sigmas, self.count_sigmas, self.batches, self.sizes = (
            make(agents, dtype=torch.float64) for _ in range(5)
        )
        self.flags = make(agents, dtype=torch.int32)
        self.noise = make(agents, s.active + 1, dtype=torch.float64)

    def load(self, theta: Tensor, tasks: Sequence[LocalTask]) -> None:
        """Fill the buffers for a round, but for its records and batches."""
        s = self._shape
        self.theta.copy_(theta.expand(s.agents, -1))
        for w, task in enumerate(tasks):
            if task.coordinates is not None:
                self.coordinates[w].copy_(task.coordinates, non_blocking=True)
        if self._needs_masks:
            self.masks.zero_().scatter_(1, self.coordinates, 1)
        keys = b"".join(derive_key(task.key, "noise", "chacha20") for task in tasks)
        self.keys.copy_(torch.from_numpy(np.frombuffer(keys, dtype="<i4").reshape(-1, 8).copy()))
        plans = [task.plan for task in tasks]
        _fill(self.clips, [1.0 if p is None else p.clip_value for p in plans])
        _fill(
            self.sigmas,
            [0.0 if p is None else p.gradient_noise_multiplier * p.clip_norm / p.clip_value for p in plans],
        )
        if s.quantile:
            _fill(self.count_sigmas, [p.count_noise for p in plans if p is not None])
        _fill(self.batches, [task.batch for task in tasks])
        _fill(self.sizes, [task.local_lr * task.scale for task in tasks])
        self.step.zero_()
        self.flags.zero_()

    def load_batches(self, first: int, batches: Sequence[Batches], *, ahead: bool = False) -> None:
        """Each agent's batches of the steps from `first` on; `ahead`: without waiting for those that are under way."""
        index = np.stack([b.table(self._shape.capacity) for b in batches], axis=1)
        counts = np.stack([b.sizes for b in batches], axis=1).astype(np.int32)
        steps = slice(first, first + len(index))
        for buffer, values in ((self.index, torch.from_numpy(index)), (self.counts, torch.from_numpy(counts))):
            buffer[steps].copy_(values.pin_memory() if ahead and buffer.is_cuda else values, non_blocking=ahead)

    def deltas(self, theta: Tensor) -> Tensor:
        """[agents, active]."""
        moved = self.theta - theta
        return moved.gather(1, self.coordinates) if self._shape.masked else moved


class ChainBuffers(RoundBuffers):
    """With the agents' records as chains of layers take them: `x` are those of a step's batches."""

    def __init__(self, shape: Shape, inputs: int, device: torch.device) -> None:
        super().__init__(shape, device)
        self.pool = torch.zeros(shape.agents, shape.records, inputs, device=device)
        self.labels = torch.zeros(shape.agents, shape.records, dtype=torch.int64, device=device)
        self.x = torch.zeros(shape.agents, shape.capacity, inputs, device=device)

    def load(self, theta: Tensor, tasks: Sequence[LocalTask]) -> None:
        """Records go to the GPU unless they are there."""
        super().load(theta, tasks)
        for w, task in enumerate(tasks):
            x, y = task.tensors
            self.pool[w, : len(y)].copy_(x.flatten(1), non_blocking=True)
            self.labels[w, : len(y)].copy_(y, non_blocking=True)


def _fill(buffer: Tensor, values: Sequence[float]) -> None:
    buffer.copy_(torch.tensor(values, dtype=buffer.dtype))


# Uniforms made at a time.
_BLOCK = 1 << 21


@dataclass(frozen=True, slots=True)
class Batches:
    """Records step after step in one array; step s has `sizes[s]` of them."""

    records: Indices
    sizes: Indices

    @property
    def largest(self) -> int:
        return int(self.sizes.max(initial=0))

    def table(self, capacity: int) -> Indices:
        """[steps, capacity], a step's records first in its line; the rest is 0 and never read."""
        table = np.zeros((len(self.sizes), capacity), dtype=np.int64)
        table[np.arange(capacity) < self.sizes[:, None]] = self.records
        return table


class Draws:
    """Draws a participation's batches, a stretch of steps at a time, and keeps them: from the stream that `local_steps`
    would use."""

    def __init__(self, task: LocalTask, places: int | None = None) -> None:
        """Among that many places; among the records, where it is not given."""
        self._task, self._places = task, task.records if places is None else places
        self._stream = Stream(derive_key(task.key, "sampling"))
        self._stretches: list[Batches] = []
        self._drawn = 0

    def stretch(self, steps: int) -> Batches:
        """The batches of the next `steps` steps, or of as many as are left."""
        steps = min(steps, self._task.local_steps - self._drawn)
        self._stretches.append(_next(self._task, self._places, self._stream, steps))
        self._drawn += steps
        return self._stretches[-1]

    def whole(self) -> Batches:
        """All batches of the participation."""
        self.stretch(self._task.local_steps)
        records, sizes = (
            np.concatenate([getattr(each, name) for each in self._stretches]) for name in ("records", "sizes")
        )
        return Batches(records, sizes)


def likely_largest(task: LocalTask) -> int:
    """About the largest batch of a round: what memory is planned for. Buffers are made for the true one."""
    if task.sampling == "fixed":
        return task.batch
    expected = task.rate * task.records
    return min(task.records, math.ceil(expected + 5 * math.sqrt(expected)))


def _next(task: LocalTask, records: int, stream: Stream, steps: int) -> Batches:
    if task.sampling == "poisson":
        chosen: list[Indices] = [np.empty(0, dtype=np.int64)]
        at_once = max(1, _BLOCK // max(1, records))
        for start in range(0, steps, at_once):
            count = min(at_once, steps - start)
            chosen.append(_below(stream, count * records, task.rate) + start * records)
        step, index = np.divmod(np.concatenate(chosen), max(1, records))
        return Batches(index, np.bincount(step, minlength=steps))
    drawn_each = [draw_batch(task.sampling, task.batch, task.rate, records, stream) for _ in range(steps)]
    sizes = np.array([len(batch) for batch in drawn_each], dtype=np.int64)
    return Batches(np.concatenate([np.empty(0, dtype=np.int64), *drawn_each]), sizes)


def _below(stream: Stream, count: int, rate: float) -> Indices:
    """Where `stream.uniform(count) < rate`, without making the fractions: those are the words' upper 53 bits."""
    words, bound = stream.uint64(count), math.ceil(rate * 2**53)
    if bound >= 2**53:
        return np.arange(count)
    return np.flatnonzero(words < np.uint64(bound << 11))


class Streams:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = new_stream(device) if device.type == "cuda" else None

    @contextmanager
    def beside(self) -> Iterator[None]:
        """What runs in it starts after all that was started before it on either stream."""
        if self._side is None:
            yield
            return
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            yield

    def mark(self) -> torch.cuda.Event | None:
        """A point of the side stream, for `wait`."""
        return None if self._side is None else self._side.record_event()

    def wait(self, event: torch.cuda.Event | None) -> None:
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def join(self) -> None:
        if self._side is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._side)


def new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
