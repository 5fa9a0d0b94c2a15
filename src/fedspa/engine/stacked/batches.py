"""All mini-batches of a participation in advance: the same records as `draw_batch` gives step by step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fedspa.engine.task import LocalTask
from fedspa.mechanism.sampling import Indices, draw_batch
from fedspa.mechanism.streams import Stream, derive_key

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

    def table(self, rows: int) -> Indices:
        """[steps, rows], a step's records first in its line; the rest is 0 and never read."""
        table = np.zeros((len(self.sizes), rows), dtype=np.int64)
        table[np.arange(rows) < self.sizes[:, None]] = self.records
        return table


def draw_batches(task: LocalTask) -> Batches:
    """Every step's batch, from the stream that `local_steps` would use."""
    stream = Stream(derive_key(task.key, "sampling"))
    steps, records = task.local_steps, len(task.y)
    if task.sampling == "poisson":
        chosen: list[Indices] = []
        at_once = max(1, _BLOCK // max(1, records))
        for start in range(0, steps, at_once):
            count = min(at_once, steps - start)
            chosen.append(_below(stream, count * records, task.rate) + start * records)
        step, index = np.divmod(np.concatenate(chosen), max(1, records))
        return Batches(index, np.bincount(step, minlength=steps))
    drawn_each = [draw_batch(task.sampling, task.batch, task.rate, records, stream) for _ in range(steps)]
    return Batches(np.concatenate(drawn_each), np.array([len(batch) for batch in drawn_each]))


def _below(stream: Stream, count: int, rate: float) -> Indices:
    """Where `stream.uniform(count) < rate`, without making the fractions: those are the words' upper 53 bits."""
    words, bound = stream.uint64(count), math.ceil(rate * 2**53)
    if bound >= 2**53:
        return np.arange(count)
    return np.flatnonzero(words < np.uint64(bound << 11))
