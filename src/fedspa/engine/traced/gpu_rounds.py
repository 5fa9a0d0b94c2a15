"""Rounds on a GPU: agents that fit one shape run as one stack, as many at a time as memory allows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from fedspa.engine.local import EMPTY, SlotAssignment
from fedspa.engine.stacked.buffers import Batches, Draws, Shape
from fedspa.engine.task import LocalResult, LocalTask
from fedspa.engine.traced.gpu_stack import Stack
from fedspa.engine.traced.program import Program
from fedspa.errors import PrivacyError
from fedspa.examples import Examples

# Bytes of per-example gradients and sums: of an agent, whose examples then come in smaller blocks, and of a stack.
AGENT_BUDGET, STACK_BUDGET = 2 * 2**30, 6 * 2**30
# An agent with more parameters fills a GPU by itself, and convolutions of several agents are slower than their turns.
ALONE = 4_000_000
# Places of a step come in multiples of this: a graph is captured for each number that is met.
_STEP = 4
# Examples of all agents of a stack in a block: CUDA starts no more programs side by side in a grid's second dimension.
LINES = 65_535
# Places of a step: an Embedding's sums are 64-bit whole numbers of at most 2⁴⁰ per example (`gpu_steps`).
MOST_PLACES = 2**22

Key = tuple[object, ...]


class Rounds:
    """Keeps programs and stacks, and with them the graphs, from round to round."""

    def __init__(
        self, trace: Callable[[int | None], Program], like: Examples, dimension: int, device: torch.device
    ) -> None:
        self._trace, self._like, self._dimension, self._device = trace, like, dimension, device
        self._programs: dict[int | None, Program] = {}
        self._stacks: dict[Key, Stack] = {}

    def train(self, theta: Tensor, tasks: Sequence[LocalTask]) -> list[LocalResult]:
        """Of tasks with a plan."""
        results: dict[int, LocalResult] = {}
        alike: dict[Key, list[int]] = {}
        for i, task in enumerate(tasks):
            alike.setdefault(_kind(task), []).append(i)
        for kind, members in alike.items():
            batches = {i: placed(tasks[i]) for i in members}
            largest = _rounded(max(each.largest for each in batches.values()))
            if largest > MOST_PLACES:
                raise PrivacyError(f"a batch has {largest} places; on a GPU it may have {MOST_PLACES}: lower the batch")
            at_once = self._at_once(largest)
            for start in range(0, len(members), at_once):
                chosen = members[start : start + at_once]
                own = [tasks[i] for i in chosen]
                stack = self._stack(kind, own, min(at_once, len(members)), largest)
                stack.load(theta, own)
                tables = [batches[i] for i in chosen]
                filled = [*tables, *[tables[-1]] * (stack.shape.agents - len(own))]
                stack.round.load_batches(0, filled)
                sizes = np.stack([each.sizes for each in tables]).max(0)
                stack.run([_rounded(size) for size in sizes.tolist()])
                deltas, clips, zeroed = stack.round.deltas(theta), stack.round.clips.tolist(), stack.zeroed.tolist()
                for w, i in enumerate(chosen):
                    results[i] = LocalResult(deltas[w].clone(), clips[w], zeroed[w])
        return [results[i] for i in range(len(tasks))]

    def _stack(self, kind: Key, tasks: Sequence[LocalTask], agents: int, largest: int) -> Stack:
        """One that was kept, or a new one: with room to spare, so that the next round's largest batch fits."""
        records, steps = max(task.records for task in tasks), tasks[0].local_steps
        key = kind, agents
        held = self._stacks.get(key)
        if held is not None and held.shape.capacity >= largest and held.shape.records >= records:
            return held
        self._stacks.pop(key, None)
        plan, d = tasks[0].plan, self._dimension
        assert plan is not None
        masked = tasks[0].coordinates is not None
        shape = Shape(
            agents=agents,
            capacity=_rounded(largest + largest // 4),
            records=-(-records // 16) * 16,
            steps=steps,
            dimension=d,
            active=plan.active,
            masked=masked,
            clip=plan.clip,
            quantile=plan.clip_rule == "quantile",
            masks=masked,
        )
        self._stacks[key] = Stack(self._program(agents), self._like, shape, self._block(), self._device)
        return self._stacks[key]

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
        return max(1, min(STACK_BUDGET // self._bytes(block), LINES // block))

    def _bytes(self, block: int) -> int:
        """Of an agent: θ, sums, its mask and the gradients of a block."""
        return self._dimension * (4 + 8 + 1 + 4 * block)


def placed(task: LocalTask) -> Batches:
    """All batches of a participation: records by their places, EMPTY where a place has none."""
    slots = SlotAssignment(task.records, task.max_records, task.sampling, task.key)
    drawn = Draws(task, slots.count).whole()
    records, there = slots.records(drawn.records)
    return Batches(records if there is None else np.where(there, records, EMPTY), drawn.sizes)


def _rounded(places: int) -> int:
    return math.ceil(places / _STEP) * _STEP


def _kind(task: LocalTask) -> Key:
    """What two tasks must have in common to be stacked."""
    assert task.plan is not None
    active = None if task.coordinates is None else task.coordinates.numel()
    return active, task.plan.clip, task.plan.clip_rule == "quantile", task.local_steps
