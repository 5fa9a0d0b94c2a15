"""Rounds on a GPU: agents that fit one shape run as one stack, as many at a time as memory allows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedspa.engine.local import EMPTY, LocalResult, LocalTask, SlotAssignment
from fedspa.engine.traced.gpu_stack import Shape, Stack
from fedspa.engine.traced.program import Program
from fedspa.errors import PrivacyError
from fedspa.examples import Examples
from fedspa.randomness.streams import Indices, Stream, derive_key, draw_batch

# Bytes of per-example gradients and sums: of an agent, whose examples then come in smaller blocks; and of a stack, or
# that share of a GPU's memory where it is more.
AGENT_BUDGET, STACK_BUDGET, STACK_SHARE = 2 * 2**30, 6 * 2**30, 1 / 8
# An agent with more parameters fills a GPU by itself, and convolutions of several agents are slower than their turns.
ALONE = 4_000_000
# Local steps whose batches are drawn while the GPU is busy with those before: few, since it waits for the first.
STRETCH = 30
# Places of a step come in multiples of this: a graph is captured for each number that is met.
_STEP = 4
# Examples of all agents of a stack in a block: CUDA starts no more programs side by side in a grid's second dimension.
LINES = 65_535
# Places of a step: an Embedding's sums are 64-bit whole numbers of at most 2⁴⁰ per example (`gpu_stack`).
MOST_PLACES = 2**22

Key = tuple[object, ...]


class Rounds:
    """Keeps programs and stacks, and with them the graphs, from round to round."""

    def __init__(
        self, trace: Callable[[int | None], Program], like: Examples, dimension: int, device: torch.device
    ) -> None:
        self._trace, self._like, self._dimension, self._device = trace, like, dimension, device
        memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
        self._budget = max(STACK_BUDGET, int(memory * STACK_SHARE))
        self._programs: dict[int | None, Program] = {}
        self._stacks: dict[Key, Stack] = {}

    def train(self, theta: Tensor, tasks: Sequence[LocalTask]) -> list[LocalResult]:
        """Of tasks with a plan."""
        results: dict[int, LocalResult] = {}
        alike: dict[Key, list[int]] = {}
        for i, task in enumerate(tasks):
            alike.setdefault(_kind(task), []).append(i)
        for kind, members in alike.items():
            at_once = self._at_once(max(likely_largest(tasks[i]) for i in members))
            for start in range(0, len(members), at_once):
                chosen = members[start : start + at_once]
                held = self._run(theta, kind, [tasks[i] for i in chosen], min(at_once, len(members))).round
                deltas, zeroed = held.deltas(theta), held.zeroed.tolist()
                for w, i in enumerate(chosen):
                    results[i] = LocalResult(deltas[w].clone(), zeroed[w])
        return [results[i] for i in range(len(tasks))]

    def _run(self, theta: Tensor, kind: Key, tasks: Sequence[LocalTask], agents: int) -> Stack:
        """Train the tasks on a stack for so many agents: on one that was kept, while batches are drawn. Where one of
        these is too large for it, nothing of what it did is used."""
        draws, steps = [Draws(task) for task in tasks], tasks[0].local_steps
        stack = self._kept(kind, tasks, agents)
        if stack is not None:
            stack.load(theta, tasks)
            for first in range(0, steps, STRETCH):
                if not _advance(stack, first, [each.stretch(STRETCH) for each in draws]):
                    break
            else:
                return stack
        whole = [each.whole() for each in draws]
        stack = self._new(kind, tasks, agents, max(each.largest for each in whole))
        stack.load(theta, tasks)
        _advance(stack, 0, whole)
        return stack

    def _kept(self, kind: Key, tasks: Sequence[LocalTask], agents: int) -> Stack | None:
        held = self._stacks.get((kind, agents))
        if held is None or held.shape.records < max(task.records for task in tasks):
            return None
        return held if held.shape.width >= self._width(tasks, agents) else None

    def _new(self, kind: Key, tasks: Sequence[LocalTask], agents: int, largest: int) -> Stack:
        """With some to spare, so that the next round's largest batch fits."""
        if largest > MOST_PLACES:
            raise PrivacyError(f"a batch has {largest} places; on a GPU it may have {MOST_PLACES}: lower the batch")
        before = self._stacks.pop((kind, agents), None)  # its memory goes before the new one's comes
        plan, width = tasks[0].plan, self._width(tasks, agents)
        assert plan is not None
        if before is not None and before.shape.width < width:  # beside Embeddings it moves from round to round
            width += width // 8
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        shape = Shape(
            agents=agents,
            capacity=_rounded(largest + largest // 4),
            records=-(-max(task.records for task in tasks) // 16) * 16,
            steps=tasks[0].local_steps,
            dimension=self._dimension,
            active=plan.active,
            masked=tasks[0].coordinates is not None,
            clip=plan.clip,
            width=-(-width // 16) * 16,
        )
        del before
        stack = Stack(self._program(agents), self._like, shape, self._block(), self._device)
        self._stacks[kind, agents] = stack
        return stack

    def _width(self, tasks: Sequence[LocalTask], agents: int) -> int:
        """The most active coordinates of an agent that lie outside of Embeddings."""
        layers, masks = (
            self._program(agents).layers,
            [each.coordinates for each in tasks if each.coordinates is not None],
        )
        if all(layer.words is None for layer in layers):
            return len(masks[0]) if masks else self._dimension
        outside = torch.cat([torch.full((len(each.order),), each.words is None) for each in layers])
        if not masks:
            return int(outside.sum())
        outside = outside.to(masks[0].device)
        return int(torch.stack([outside[mask].sum() for mask in masks]).max())

    def _program(self, agents: int) -> Program:
        wanted = None if agents == 1 else agents
        if wanted not in self._programs:
            self._programs[wanted] = self._trace(wanted)
        return self._programs[wanted]

    def _block(self) -> int:
        """The most examples of an agent at a time."""
        most = min((AGENT_BUDGET // self._dimension - 13) // 4, LINES)
        return max(_STEP, most // _STEP * _STEP)

    def _at_once(self, places: int) -> int:
        """Agents of a stack."""
        block = min(self._block(), max(_STEP, places))
        if self._dimension > ALONE:
            return 1
        return max(1, min(self._budget // self._bytes(block), LINES // block))

    def _bytes(self, block: int) -> int:
        """Of an agent: θ, sums, its mask and the gradients of a block."""
        return self._dimension * (4 + 8 + 1 + 4 * block)


def _advance(stack: Stack, first: int, batches: Sequence[Batches]) -> bool:
    """Take the steps of these batches from step `first` on; False where one is too large."""
    shape = stack.shape
    if max(each.largest for each in batches) > shape.capacity:
        return False
    filled = [*batches, *[batches[-1]] * (shape.agents - len(batches))]
    index = np.stack([each.table(shape.capacity) for each in filled], axis=1)
    counts = np.stack([each.sizes for each in filled], axis=1)
    stack.run(first, torch.from_numpy(index), torch.from_numpy(counts), [_rounded(n) for n in counts.max(1).tolist()])
    return True


def _rounded(places: int) -> int:
    return math.ceil(places / _STEP) * _STEP


def _kind(task: LocalTask) -> Key:
    """What two tasks must have in common to be stacked."""
    assert task.plan is not None
    active = None if task.coordinates is None else task.coordinates.numel()
    return active, task.plan.clip, task.local_steps


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
    would use. Records come by their places, EMPTY where a place has none."""

    def __init__(self, task: LocalTask) -> None:
        self._task = task
        self._slots = SlotAssignment(task.records, task.max_records, task.sampling, task.key)
        self._stream = Stream(derive_key(task.key, "sampling"))
        self._stretches: list[Batches] = []
        self._drawn = 0

    def stretch(self, steps: int) -> Batches:
        """The batches of the next `steps` steps, or of as many as are left."""
        steps = min(steps, self._task.local_steps - self._drawn)
        drawn = _next(self._task, self._slots.count, self._stream, steps)
        records, there = self._slots.records(drawn.records)
        self._stretches.append(Batches(records if there is None else np.where(there, records, EMPTY), drawn.sizes))
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
    expected = task.rate * (task.max_records or task.records)
    return math.ceil(expected + 5 * math.sqrt(expected))


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
