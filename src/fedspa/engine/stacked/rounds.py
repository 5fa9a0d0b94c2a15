"""Rounds on a GPU: tasks that fit one shape are stacked and run as one; what the kernels flag is done over, carefully.

The kernels assume finite numbers and raise a flag where they meet others. A flagged agent is trained again from the
start by the rules in torch, with the same batches and the same noise: then an example that is not finite counts as
zero, as `clip_rows` has it. Only one of the two results is ever released.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from fedspa.engine.local import Counted
from fedspa.engine.stacked.buffers import Batches, Draws, Shape, likely_largest, room
from fedspa.engine.stacked.chacha import ChaChaNoise
from fedspa.engine.stacked.engine import LayerGradients
from fedspa.engine.stacked.layers.base import Layer
from fedspa.engine.stacked.stack import Stack
from fedspa.engine.task import LocalResult, LocalTask
from fedspa.errors import ConfigError
from fedspa.mechanisms.gaussian.release import noisy_mean
from fedspa.randomness.streams import Stream, derive_key

# Bytes of activations and sums that a stack may take; more agents than fit run as several stacks.
STACK_BUDGET = 8 * 2**30
# Local steps whose batches are drawn while the GPU is busy with those before: few, since it waits for the first.
STRETCH = 30

Key = tuple[object, ...]


class Rounds:
    """Keeps the stacks, and with them the graphs, from round to round."""

    def __init__(self, gradients: LayerGradients, device: torch.device, tf32: bool) -> None:
        self._gradients, self._device, self._tf32 = gradients, device, tf32
        self._stacks: dict[Key, tuple[Shape, Stack]] = {}

    def train(self, theta: Tensor, tasks: Sequence[LocalTask]) -> list[LocalResult]:
        results: dict[int, LocalResult] = {}
        for members in self._groups(tasks):
            chosen = [tasks[i] for i in members]
            draws = [Draws(task) for task in chosen]
            held = self._run(theta, chosen, draws).round
            deltas, clips, flags = held.deltas(theta), held.clips.tolist(), held.flags.tolist()
            for w, i in enumerate(members):
                if flags[w]:
                    results[i] = careful_steps(theta, tasks[i], draws[w].whole(), self._gradients)
                else:
                    results[i] = LocalResult(deltas[w], clips[w] if tasks[i].plan is not None else 0.0)
        return [results[i] for i in range(len(tasks))]

    def _run(self, theta: Tensor, tasks: Sequence[LocalTask], draws: Sequence[Draws]) -> Stack:
        """Train the tasks on the stack of an earlier round, or on a new one that has room for every batch."""
        kept = self._run_kept(theta, tasks, draws)
        if kept is not None:
            return kept
        batches = [each.whole() for each in draws]
        stack = self._new_stack(tasks, max(b.largest for b in batches))
        stack.round.load(theta, tasks)
        stack.round.load_batches(0, batches)
        stack.run(tasks[0].local_steps)
        return stack

    def _run_kept(self, theta: Tensor, tasks: Sequence[LocalTask], draws: Sequence[Draws]) -> Stack | None:
        """On a stack that was kept, drawing batches while it runs. None where there is none, or a batch is too large
        for it: then nothing of what it did is used."""
        shape, stack = self._stacks.get(_company(tasks), (None, None))
        if shape is None or stack is None or not shape.covers(self._shape(tasks, largest=0)):
            return None
        stack.round.load(theta, tasks)
        for first in range(0, tasks[0].local_steps, STRETCH):
            batches = [each.stretch(STRETCH) for each in draws]
            if max(b.largest for b in batches) > shape.capacity:
                if self._device.type == "cuda":
                    torch.cuda.synchronize(self._device)  # before its memory is given to another
                return None
            stack.round.load_batches(first, batches, ahead=True)
            stack.run(len(batches[0].sizes))
        return stack

    def _groups(self, tasks: Sequence[LocalTask]) -> list[list[int]]:
        """Tasks that can share a stack, as many as memory allows at a time."""
        alike: dict[Key, list[int]] = {}
        for i, task in enumerate(tasks):
            alike.setdefault(_kind(task), []).append(i)
        groups: list[list[int]] = []
        for members in alike.values():
            layers = self._gradients.layers(tuple(tasks[members[0]].tensors[0].shape[1:]))
            largest = max(likely_largest(tasks[i]) for i in members)
            records = max(tasks[i].records for i in members)
            at_once = max(1, STACK_BUDGET // self._bytes_an_agent(layers, largest, records))
            groups += [members[start : start + at_once] for start in range(0, len(members), at_once)]
        return groups

    def _bytes_an_agent(self, layers: Sequence[Layer], largest: int, records: int) -> int:
        values = room(largest) * 2 * sum(_sizes(layers)) + records * layers[0].inputs
        return 4 * (values + 40 * self._gradients.dimension)

    def _shape(self, tasks: Sequence[LocalTask], largest: int) -> Shape:
        task, d = tasks[0], self._gradients.dimension
        return Shape(
            agents=len(tasks),
            capacity=largest,
            records=max(len(t.y) for t in tasks),
            steps=task.local_steps,
            dimension=d,
            active=d if task.coordinates is None else task.coordinates.numel(),
            masked=task.coordinates is not None,
            clip=None if task.plan is None else task.plan.clip,
            quantile=task.plan is not None and task.plan.clip_rule == "quantile",
        )

    def _new_stack(self, tasks: Sequence[LocalTask], largest: int) -> Stack:
        layers = self._gradients.layers(tuple(tasks[0].tensors[0].shape[1:]))
        if room(largest) * max(_sizes(layers)) >= 2**31:
            raise ConfigError(
                "run.engine = 'stacked' cannot index a batch this large; use 'generic' or a smaller batch"
            )
        self._stacks.pop(_company(tasks), None)  # its memory goes before the new one's comes
        shape = self._shape(tasks, largest).with_room()
        stack = Stack(layers, shape, self._device, self._tf32)
        self._stacks[_company(tasks)] = shape, stack
        return stack


def careful_steps(theta: Tensor, task: LocalTask, batches: Batches, gradients: LayerGradients) -> LocalResult:
    """`local_steps` with a GPU's noise: slow, and exact about examples that are not finite."""
    noise = ChaChaNoise(derive_key(task.key, "noise", "chacha20"))
    everywhere = slice(None) if task.coordinates is None else task.coordinates
    local, plan, end, counted = theta.clone(), task.plan, 0, Counted()
    for step, size in enumerate(batches.sizes.tolist()):
        index = torch.from_numpy(batches.records[end : end + size]).to(theta.device)
        end += size
        x, y = (each[index] for each in task.tensors)
        noise.start_step(step)
        if plan is not None:
            found = gradients.rows(local, x, y, task.coordinates) if size else iter(())
            # ChaChaNoise has the one method of a Stream that this calls.
            mean, clip_value = noisy_mean(counted.watch(found), plan, cast(Stream, noise))
            plan = plan.with_clip_value(clip_value)
        else:
            total = gradients.mean(local, x, y) * size if size else torch.zeros_like(local)
            mean = (total / task.batch)[everywhere]
        local[everywhere] -= (task.local_lr * task.scale * mean).to(local)
    return LocalResult((local - theta)[everywhere], plan.clip_value if plan is not None else 0.0, counted.zeroed)


def _kind(task: LocalTask) -> Key:
    """What two tasks must have in common to be stacked; learning rate, scale, B, clip value and noise may differ."""
    active = None if task.coordinates is None else task.coordinates.numel()
    plan = None if task.plan is None else (task.plan.clip, task.plan.clip_rule == "quantile")
    return tuple(task.tensors[0].shape[1:]), active, plan, task.local_steps


def _company(tasks: Sequence[LocalTask]) -> Key:
    """What a stack's buffers and graphs are made for, but for sizes that may be larger than needed."""
    return len(tasks), *_kind(tasks[0])


def _sizes(layers: Sequence[Layer]) -> list[int]:
    """Values of an example in front of and behind each layer that has buffers."""
    return [size for layer in layers if layer.launched for size in (layer.inputs, layer.outputs)]
