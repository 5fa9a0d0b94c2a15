"""Local training of one agent in one round (Algorithm 1, lines 6–11): the task, the engines' interface, and the steps
for every engine that gives per-example gradients.

Engines that run a whole round as one piece of work have loops of their own, and tests compare them with this one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedspa.engine.optimizer import SGD, LocalOptimizer
from fedspa.errors import ConfigError, DataError, PrivacyError, one_line
from fedspa.examples import Examples, Tree, count, leaves, mapped, moved, single_examples, taken
from fedspa.learning.agreement import SEED
from fedspa.mechanisms.base import Clipping, NoPlan
from fedspa.mechanisms.clipping import GradientBlock, count_not_finite
from fedspa.mechanisms.gaussian.plan import GaussianPlan
from fedspa.mechanisms.gaussian.release import noisy_mean, sum_in_units
from fedspa.privacy.event import Sampling
from fedspa.randomness.streams import Stream, derive_key, draw_batch

T = TypeVar("T", bound=Tensor | GradientBlock)
# Bytes of per-example gradients at a time. On a CPU more would be slower, since they leave its caches, and a step would
# take several times the memory of one that is not private. A GPU wants many at once.
ROWS_BUDGET, ROWS_BUDGET_GPU = 16 * 2**20, 256 * 2**20


@dataclass(frozen=True, slots=True)
class LocalTask:
    """τ local steps of one agent.

    `coordinates` is ω, sorted, or None where all d coordinates are active. `steps` is the plan, which alone says how to
    sample, clip and noise, or a `NoPlan` where nothing is clipped or noised (FedAvg). `key` is the agent's private
    randomness of this round: who is sampled and what noise is drawn.
    `rows` says where in x and y the agent's records are, and then no engine may train on others; without, they are all.
    `max_records` is a public number of slots, of which an engine that computes records together gives each one
    (`SlotAssignment`).
    """

    x: Tree
    y: Tree
    coordinates: Tensor | None
    scale: float
    local_lr: float
    steps: GaussianPlan | NoPlan
    key: bytes
    exact: bool = False
    rows: Tensor | None = None
    max_records: int | None = None
    optimizer: LocalOptimizer = SGD

    @property
    def plan(self) -> GaussianPlan | None:
        return None if isinstance(self.steps, NoPlan) else self.steps

    @property
    def sampling(self) -> Sampling:
        return self.steps.sampling

    @property
    def batch(self) -> int:
        return self.steps.batch

    @property
    def local_steps(self) -> int:
        return self.steps.local_steps

    @property
    def records(self) -> int:
        """Return the number of the agent's records."""
        return count(self.y) if self.rows is None else len(self.rows)

    def take(self, index: Tensor) -> Examples:
        """Return the records at these indices."""
        index = index if self.rows is None else self.rows[index]
        return Examples(*(taken(tree, index.to(next(leaves(tree)).device)) for tree in (self.x, self.y)))

    def require_active(self, dimension: int) -> int:
        """Return how many of `dimension` coordinates are trained; raise a PrivacyError where that is not the plan's
        number."""
        active = dimension if self.coordinates is None else self.coordinates.numel()
        if self.plan is not None and self.plan.active != active:
            raise PrivacyError(f"the plan has k = {self.plan.active}, the mask {active} coordinates; they must agree")
        return active

    @property
    def rate(self) -> float:
        """Return the chance of a record in a Poisson batch. It is the plan's, which is public: a rate from the agent's
        own count would differ between neighbours that differ by a record."""
        return self.plan.rate if self.plan is not None else self.batch / self.records


@dataclass(frozen=True, slots=True)
class LocalResult:
    """Δ on the active coordinates.

    `zeroed` is for the agent's own log and is never released: it depends on the records without any noise. It says how
    many sampled examples, over all steps, counted as zero because their gradient was not finite (in float32 back ends,
    also those so large that it may overflow) or could not be taken: a label or token outside the model's, an exception
    of the model's own. Without a plan nothing is left out, and it is 0.
    """

    delta: Tensor
    zeroed: int = 0


def invalid_record_error() -> DataError:
    return DataError(
        "a label lies outside the model's classes, or a token outside its Embedding; labels must be 0 … classes - 1, "
        "tokens 0 … words - 1"
    )


def mask_outside(dimension: int) -> ConfigError:
    return ConfigError(f"the mask has coordinates outside 0 … {dimension - 1}")


def mask_unsorted() -> ConfigError:
    return ConfigError("the mask's coordinates do not increase; sort them and take each once")


class Engine(ABC):
    """Runs local steps. Results may differ between engines by rounding, never by the order or number of tasks; but for
    the traced one on a GPU, where agents that step together are rounded together.

    An engine must `train`. One that also gives gradients of single examples (`rows`) can run every algorithm.
    """

    takes_slots: ClassVar[bool] = False  # computes examples together, each at its slot (`SlotAssignment`)
    gives_rows: ClassVar[bool] = True  # gives gradients of single examples; without, it overrides `clipped_sum`
    predicts: ClassVar[bool] = False  # has a forward pass of its own (`logits`)
    threads: int = 1  # callers that `clipped_sum` serves at once

    @property
    @abstractmethod
    def name(self) -> str:
        """Return the name of the engine, as in `run.engine`."""

    @property
    @abstractmethod
    def separates_records(self) -> bool:
        """Return whether what a record adds to a release is a function of that record, θ and public numbers alone, to
        the bit: regardless of who else is sampled, at any place among them, on any number of threads. Only then does
        one record move a sum by no more than the plan's bound for *every* θ; a site takes no other engine. Engines that
        take slots may use a record's slot, too, where others have no part in it."""

    @property
    def draws(self) -> bool:
        """Return whether a forward pass draws randomness. Each example then comes with a seed of its own: x is the pair
        of the inputs and the seeds."""
        return False

    @abstractmethod
    def train(self, theta: Tensor, tasks: Sequence[LocalTask]) -> list[LocalResult]:
        """Run every task from the same θ. Does not change θ."""

    def parts(
        self, theta: Tensor, x: Tree, y: Tree, coordinates: Tensor | None, present: Tensor | None
    ) -> Iterator[GradientBlock]:
        """Yield the gradients of the examples that are present (all, where it is None) in blocks, if the engine takes
        slots."""
        raise ConfigError(f"engine {self.name!r} gives no gradients of single examples; use run.engine = 'generic'")

    def rows(self, theta: Tensor, x: Tree, y: Tree, coordinates: Tensor | None) -> Iterator[Tensor]:
        """Yield gradients of the examples on the given coordinates, in [b, k] blocks; NaN where an example has none."""
        for block in self.parts(theta, x, y, coordinates, None):
            yield block.rows()

    def mean(self, theta: Tensor, x: Tree, y: Tree) -> Tensor:
        """Return the gradient of the mean loss, all d coordinates (FedAvg)."""
        raise ConfigError(f"engine {self.name!r} gives no gradient of a batch; use run.engine = 'generic'")

    def clipped_sum(
        self,
        theta: Tensor,
        x: Tree,
        y: Tree,
        clip: Clipping,
        clip_value: float,
        coordinates: Tensor | None = None,
        rows: Tensor | None = None,
        present: NDArray[np.bool_] | None = None,
        *,
        one_by_one: bool = False,
    ) -> tuple[Tensor, int]:
        """Return the sum of the examples' gradients, cut to the coordinates and clipped there: whole numbers with
        `CLIP_UNITS` to the clip value; and how many examples counted as zero. One example's numbers stay within the
        bound, whatever the example. `rows` are those of x and y to add up, and `present` says which slots hold one;
        without, all."""
        if rows is not None:
            x, y = taken(x, rows), taken(y, rows)
        blocks = example_rows(self, theta, x, y, coordinates, present, one_by_one=one_by_one)
        counted, size = Counted(), theta.numel() if coordinates is None else coordinates.numel()
        found = (block.rows() if isinstance(block, GradientBlock) else block for block in counted.watch(blocks))
        return torch.from_numpy(sum_in_units(found, clip, clip_value, size)), counted.zeroed

    def logits(self, theta: Tensor, x: Tensor) -> Tensor:
        """Return the model's outputs at θ, a row per record, if the engine `predicts`."""
        raise ConfigError(f"engine {self.name!r} has no forward pass of its own")


def engine_rows(engine: Engine, theta: Tensor, x: Tree, y: Tree, coordinates: Tensor) -> Tensor:
    """Return the gradients of a few examples on these coordinates, without noise. Randomness is drawn from `SEED`."""
    if engine.gives_rows:
        given = (x, torch.full((count(y),), SEED, device=_device(x))) if engine.draws else x
        return torch.cat([*engine.rows(theta, given, y, coordinates)])
    # Far enough that nothing of a step is lost when it is added to θ and taken off again.
    steps, far = NoPlan(len(theta), len(theta), "fixed", 1, 1), 2.0**20
    singles = zip(single_examples(x), single_examples(y))
    tasks = [LocalTask(one, target, None, 1.0, far, steps, bytes(32)) for one, target in singles]
    return torch.stack([found.delta / -far for found in engine.train(theta, tasks)])[:, coordinates]


class Counted:
    """Counts the rows on their way into `noisy_mean` that will count as zero there (`zeroed`)."""

    def __init__(self) -> None:
        self.zeroed = 0

    def watch(self, blocks: Iterable[T]) -> Iterator[T]:
        for rows in blocks:
            self.zeroed += rows.count_not_finite() if isinstance(rows, GradientBlock) else count_not_finite(rows)
            yield rows


def local_steps(theta: Tensor, task: LocalTask, engine: Engine) -> LocalResult:
    """Take τ steps from θ; return Δ on the active coordinates."""
    sampling, noise, forward = (Stream(derive_key(task.key, label)) for label in ("sampling", "noise", "forward"))
    slots = SlotAssignment(task.records, task.max_records, task.sampling, task.key)
    plan, counted = task.plan, Counted()
    together = engine.takes_slots and plan is not None
    everywhere = slice(None) if task.coordinates is None else task.coordinates
    direction = task.optimizer.start()
    local = theta.clone()  # line 6
    for _ in range(task.local_steps):  # line 7
        chosen = draw_batch(task.sampling, task.batch, task.rate, slots.count, sampling)  # line 8
        x, y, there = load_batch(task.take, slots, chosen, engine, theta.device, forward, together=together)
        if plan is None:
            step = _plain_mean(engine, local, x, y, task.batch)[everywhere]
        else:
            found = example_rows(engine, local, x, y, task.coordinates, there, one_by_one=task.exact)
            step = noisy_mean(counted.watch(found), plan, noise, on_grid=task.exact)
        local[everywhere] -= (task.local_lr * task.scale * direction(step)).to(local)  # line 9
    delta = (local - theta)[everywhere]  # line 11
    return LocalResult(delta, counted.zeroed)


def load_batch(
    take: Callable[[Tensor], Examples],
    slots: SlotAssignment,
    chosen: NDArray[np.int64],
    engine: Engine,
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
    return seeded(x, engine, chosen, slots.count, forward), y, there


def example_rows(
    engine: Engine,
    theta: Tensor,
    x: Tree,
    y: Tree,
    coordinates: Tensor | None,
    present: NDArray[np.bool_] | None = None,
    *,
    one_by_one: bool,
) -> Iterator[Tensor | GradientBlock]:
    """Yield the gradients of the sampled examples that are present. For the exact mode one at a time, each as a copy:
    on a GPU a batch's size and an example's place in it are in the last bit of its gradient. On a CPU they are in none,
    or the slots are of no record's making (`separates_records`)."""
    if engine.takes_slots and count(y):
        there = None if present is None else torch.from_numpy(present).to(theta.device)
        yield from engine.parts(theta, x, y, coordinates, there)
        return
    if not one_by_one or theta.device.type == "cpu":
        if count(y):
            yield from engine.rows(theta, x, y, coordinates)
        return
    for x_part, y_part in zip(single_examples(x), single_examples(y)):
        yield from engine.rows(theta, x_part, y_part, coordinates)


def seeded(x: Tree, engine: Engine, chosen: NDArray[np.int64], records: int, forward: Stream) -> Tree:
    """Return the chosen examples' inputs, with seeds where a forward pass draws: each of an agent's records has a fresh
    one in every step, no matter who else is chosen, so that what it adds is still a function of that record alone."""
    if not engine.draws:
        return x
    seeds = forward.uint64(records).view(np.int64)[chosen]
    return x, torch.from_numpy(seeds).to(_device(x))


def rows_at_once(theta: Tensor, budget: int | None = None) -> int:
    """Return how many examples' gradients at θ to make together."""
    bytes_each = 4 * theta.numel()
    return max(1, (budget or (ROWS_BUDGET if theta.device.type == "cpu" else ROWS_BUDGET_GPU)) // bytes_each)


def _plain_mean(engine: Engine, theta: Tensor, x: Tree, y: Tree, batch: int) -> Tensor:
    """Return the sum over the batch, divided by the nominal B as in the private step."""
    if count(y) == 0:
        return torch.zeros_like(theta)
    try:
        mean = engine.mean(theta, x, y)
    except (RuntimeError, IndexError, ValueError) as error:  # nothing is private here: the error may say what it was
        raise DataError(f"the model fails on these records ({one_line(error)})") from error
    return mean * (count(y) / batch)


def _blanked(tree: Tree, there: NDArray[np.bool_] | None) -> Tree:
    """Fill empty slots with zeros: nothing about them may depend on a record, not even the time that they take."""
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
            raise DataError(f"{records} records do not fit into {self.count} slots")
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
