"""The mini-batches of many steps at once: the same records as `draw_batch` gives step by step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fedspa.engine.task import LocalTask
from fedspa.randomness.sampling import Indices, draw_batch
from fedspa.randomness.streams import Stream, derive_key

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
