"""The local steps of one agent (Algorithm 1, lines 6–11), for any back end that can give per-example gradients.

Back ends that run a whole round as one piece of work have loops of their own, and tests hold them to this one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedspa.engine.task import Engine, LocalResult, LocalTask
from fedspa.errors import ConfigError, DataError, one_line
from fedspa.examples import Examples, Tree, count, each_alone, leaves, mapped, moved
from fedspa.learning.agreement import SEED
from fedspa.mechanisms.base import CLIP_UNITS as CLIP_UNITS
from fedspa.mechanisms.base import Clipping, NoPlan
from fedspa.mechanisms.clipping import count_not_finite
from fedspa.mechanisms.gaussian.release import noisy_mean
from fedspa.mechanisms.parts import Parts
from fedspa.privacy.event import Sampling
from fedspa.randomness.sampling import draw_batch
from fedspa.randomness.streams import Stream, derive_key

T = TypeVar("T", bound=Tensor | Parts)
# Bytes of per-example gradients at a time. On a CPU more would be slower, since they leave its caches, and a step would
# take several times the memory of one that is not private. A GPU wants many at once.
ROWS_BUDGET, ROWS_BUDGET_GPU = 16 * 2**20, 256 * 2**20


@runtime_checkable
class Gradients(Protocol):
    """What a back end supplies to `local_steps`.

    `draws` says whether a forward pass draws randomness. Each example then comes with a seed of its own: x is the pair
    of the inputs and the seeds.
    """

    @property
    def draws(self) -> bool: ...

    def rows(self, theta: Tensor, x: Tree, y: Tree, coordinates: Tensor | None) -> Iterator[Tensor]:
        """Gradients of the examples on the given coordinates, in [b, k] blocks; NaN where an example has none."""
        ...

    def mean(self, theta: Tensor, x: Tree, y: Tree) -> Tensor:
        """Gradient of the mean loss, all d coordinates (FedAvg)."""
        ...


def single_gradients(engine: Engine) -> Gradients:
    """The engine, which must give gradients of single examples."""
    if not isinstance(engine, Gradients):
        raise ConfigError(f"engine {engine.name!r} gives no gradients of single examples; use run.engine = 'generic'")
    return engine


@runtime_checkable
class BatchedGradients(Gradients, Protocol):
    """An engine that computes examples together, each at its slot, and gives their gradients in parts."""

    def parts(
        self, theta: Tensor, x: Tree, y: Tree, coordinates: Tensor | None, present: Tensor | None
    ) -> Iterator[Parts]:
        """Of the examples that are present (all, where it is None), in blocks."""
        ...


@runtime_checkable
class ClippedSums(Protocol):
    """What a back end supplies that hands out no single gradients: it clips and adds up by itself, in whole numbers,
    for `threads` callers at once."""

    @property
    def threads(self) -> int: ...

    def clipped_sum(
        self,
        theta: Tensor,
        x: Tensor,
        y: Tensor,
        clip: Clipping,
        clip_value: float,
        coordinates: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, int]:
        """The sum of the examples' gradients, cut to the coordinates and clipped there: whole numbers with `CLIP_UNITS`
        to the clip value; and how many examples counted as zero. One example's numbers stay within the bound, whatever
        the example. `rows` are those of x and y to add up; without, all."""
        ...


def engine_rows(engine: Engine, theta: Tensor, x: Tree, y: Tree, coordinates: Tensor) -> Tensor:
    """The gradients of a few examples on these coordinates, without noise. Randomness is drawn from `SEED`."""
    if isinstance(engine, Gradients):
        given = (x, torch.full((count(y),), SEED, device=_device(x))) if engine.draws else x
        return torch.cat([*engine.rows(theta, given, y, coordinates)])
    # Far enough that nothing of a step is lost when it is added to θ and taken off again.
    steps, far = NoPlan(len(theta), len(theta), "fixed", 1, 1), 2.0**20
    singles = zip(each_alone(x), each_alone(y))
    tasks = [LocalTask(one, target, None, 1.0, far, steps, bytes(32)) for one, target in singles]
    return torch.stack([found.delta / -far for found in engine.train(theta, tasks)])[:, coordinates]


class Counted:
    """Blocks of rows on their way into `noisy_mean`; `zeroed` counts those that will count as zero there."""

    def __init__(self) -> None:
        self.zeroed = 0

    def watch(self, blocks: Iterable[T]) -> Iterator[T]:
        for rows in blocks:
            self.zeroed += rows.count_not_finite() if isinstance(rows, Parts) else count_not_finite(rows)
            yield rows


def local_steps(theta: Tensor, task: LocalTask, gradients: Gradients) -> LocalResult:
    """τ steps from θ; returns Δ on the active coordinates."""
    sampling, noise, forward = (Stream(derive_key(task.key, label)) for label in ("sampling", "noise", "forward"))
    slots = SlotAssignment(task.records, task.max_records, task.sampling, task.key)
    plan, counted = task.plan, Counted()
    together = isinstance(gradients, BatchedGradients) and plan is not None
    everywhere = slice(None) if task.coordinates is None else task.coordinates
    local = theta.clone()  # line 6
    for _ in range(task.local_steps):  # line 7
        chosen = draw_batch(task.sampling, task.batch, task.rate, slots.count, sampling)  # line 8
        x, y, there = load_batch(task.take, slots, chosen, gradients, theta.device, forward, together=together)
        if plan is None:
            step = _plain_mean(gradients, local, x, y, task.batch)[everywhere]
        else:
            found = example_rows(gradients, local, x, y, task.coordinates, there, one_by_one=task.exact)
            rows = counted.watch(found)
            step, clip_value = noisy_mean(rows, plan, noise, on_grid=task.exact)
            plan = plan.with_clip_value(clip_value)
        local[everywhere] -= (task.local_lr * task.scale * step).to(local)  # line 9
    delta = (local - theta)[everywhere]  # line 11
    return LocalResult(delta, plan.clip_value if plan is not None else 0.0, counted.zeroed)


def load_batch(
    take: Callable[[Tensor], Examples],
    slots: SlotAssignment,
    chosen: NDArray[np.int64],
    gradients: Gradients,
    device: torch.device,
    forward: Stream,
    *,
    together: bool,
) -> tuple[Tree, Tree, NDArray[np.bool_] | None]:
    """Return the records at the chosen slots, with seeds where a forward pass draws; and which of the slots have one,
    for engines that compute records `together`: None where all do."""
    records, there = slots.records(chosen)
    if there is not None and not together:
        chosen, records, there = chosen[there], records[there], None
    x, y = (moved(_blanked(tree, there), device) for tree in take(torch.from_numpy(records)))
    return seeded(x, gradients, chosen, slots.count, forward), y, there


def example_rows(
    gradients: Gradients,
    theta: Tensor,
    x: Tree,
    y: Tree,
    coordinates: Tensor | None,
    present: NDArray[np.bool_] | None = None,
    *,
    one_by_one: bool,
) -> Iterator[Tensor | Parts]:
    """The gradients of the sampled examples that are present. For the exact mode one at a time, each as a copy: on a
    GPU a batch's size and an example's place in it are in the last bit of its gradient. On a CPU they are in none, or
    the slots are of no record's making (`separates_records`)."""
    if isinstance(gradients, BatchedGradients) and count(y):
        there = None if present is None else torch.from_numpy(present).to(theta.device)
        yield from gradients.parts(theta, x, y, coordinates, there)
        return
    if not one_by_one or theta.device.type == "cpu":
        if count(y):
            yield from gradients.rows(theta, x, y, coordinates)
        return
    for x_part, y_part in zip(each_alone(x), each_alone(y)):
        yield from gradients.rows(theta, x_part, y_part, coordinates)


def whole_rows(gradients: Gradients, theta: Tensor, x: Tree, y: Tree, *, one_by_one: bool) -> Iterator[Tensor]:
    """The same on all coordinates, as rows."""
    for block in example_rows(gradients, theta, x, y, None, one_by_one=one_by_one):
        yield block.rows() if isinstance(block, Parts) else block


def seeded(x: Tree, gradients: Gradients, chosen: NDArray[np.int64], records: int, forward: Stream) -> Tree:
    """The chosen examples' inputs, with seeds where a forward pass draws: each of an agent's records has a fresh one in
    every step, whoever else is chosen, so that what it adds is still a function of that record alone."""
    if not gradients.draws:
        return x
    seeds = forward.uint64(records).view(np.int64)[chosen]
    return x, torch.from_numpy(seeds).to(_device(x))


def rows_at_once(theta: Tensor, budget: int | None = None) -> int:
    """How many examples' gradients at θ to make together."""
    bytes_each = 4 * theta.numel()
    return max(1, (budget or (ROWS_BUDGET if theta.device.type == "cpu" else ROWS_BUDGET_GPU)) // bytes_each)


def _plain_mean(gradients: Gradients, theta: Tensor, x: Tree, y: Tree, batch: int) -> Tensor:
    """Sum over the batch, divided by the nominal B as in the private step."""
    if count(y) == 0:
        return torch.zeros_like(theta)
    try:
        mean = gradients.mean(theta, x, y)
    except (RuntimeError, IndexError, ValueError) as error:  # nothing is private here: the error may say what it was
        raise DataError(f"the model fails on these records ({one_line(error)})") from error
    return mean * (count(y) / batch)


def _blanked(tree: Tree, there: NDArray[np.bool_] | None) -> Tree:
    """With zeros in the empty slots: nothing about them may depend on a record, not even the time that they take."""
    if there is None:
        return tree
    empty = torch.from_numpy(~there)
    return mapped(lambda leaf: leaf.masked_fill(empty.to(leaf.device).view(-1, *[1] * (leaf.ndim - 1)), 0), tree)


def _device(tree: Tree) -> torch.device:
    return next(leaves(tree)).device


EMPTY = -1


class SlotAssignment:
    """The slots of an agent's records, for engines that compute records together.

    Batches are drawn among slots, not among records. Where a record is missing its slot is empty: the others keep
    theirs, and a batch has the same number of slots with it and without. So the slot of a record, and every effect of
    rounding on it, is independent of which other records there are, as long as neighbours have equally many slots. That
    holds for fixed-size sampling, whose neighbours have equally many records; for Poisson sampling a site names the
    number (`max_records`).

    Where a number of slots is named, records are assigned to them at random, anew for each participation: a file
    without a record, or one that is kept sorted, has the others in other lines, and their slots must not tell. They are
    assigned even where no slot stays empty, since in that file without a record one would be.
    """

    def __init__(self, records: int, max_records: int | None, sampling: Sampling, key: bytes) -> None:
        """`max_records` is public. Without it, each record has the slot of its number. Fixed-size sampling leaves no
        slot empty: there it says only that records are assigned at random."""
        self.count = records if max_records is None or sampling == "fixed" else max_records
        if self.count < records:
            raise DataError(f"{records} records do not fit into room for {self.count}")
        self._records: NDArray[np.int64] | None = None
        if max_records is not None:
            self._records = np.full(self.count, EMPTY, dtype=np.int64)
            self._records[assign_slots(records, self.count, key)] = np.arange(records)

    def records(self, slots: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_] | None]:
        """Return their records, and which slots have one; None where all do, and any record where there is none."""
        if self._records is None:
            return slots, None
        found = self._records[slots]
        return np.maximum(found, 0), found != EMPTY


def assign_slots(records: int, slots: int, key: bytes) -> NDArray[np.int64]:
    """Return the slot of each record: of all assignments, each is equally likely."""
    return np.argsort(Stream(derive_key(key, "places")).uniform(slots), kind="stable")[:records]
