"""What a back end is asked for and what it gives back: Algorithm 1, lines 6–11, of one agent in one round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from torch import Tensor

from fedspa.errors import ConfigError, DataError, PrivacyError
from fedspa.examples import Examples, Tree, count, leaves, taken, tensors
from fedspa.mechanisms.base import NoPlan
from fedspa.mechanisms.gaussian.plan import GaussianPlan
from fedspa.privacy.event import Sampling


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
        """How many the agent holds."""
        return count(self.y) if self.rows is None else len(self.rows)

    def take(self, index: Tensor) -> Examples:
        """Those of its records."""
        index = index if self.rows is None else self.rows[index]
        return Examples(*(taken(tree, index.to(next(leaves(tree)).device)) for tree in (self.x, self.y)))

    def require_active(self, dimension: int) -> int:
        """How many of so many coordinates are trained; a PrivacyError where that is not the plan's number."""
        active = dimension if self.coordinates is None else self.coordinates.numel()
        if self.plan is not None and self.plan.active != active:
            raise PrivacyError(f"the plan has k = {self.plan.active}, the mask {active} coordinates; they must agree")
        return active

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """x and y where each is one tensor."""
        return tensors(self.x, self.y)

    @property
    def rate(self) -> float:
        """The chance of a record in a Poisson batch. The plan's, which is public: a rate made from the agent's own
        count would differ between neighbours that differ by a record."""
        return self.plan.rate if self.plan is not None else self.batch / self.records


@dataclass(frozen=True, slots=True)
class LocalResult:
    """Δ on the active coordinates, and the clip value after the last step (moved by a private quantile only).

    `zeroed` is for the agent's own log and is never released: it depends on the records without any noise. It says how
    many sampled examples, over all steps, counted as zero because their gradient was not finite (in float32 back ends,
    also those so large that it may overflow) or could not be taken: a label or token outside the model's, an exception
    of the model's own. Without a plan nothing is left out, and it is 0.
    """

    delta: Tensor
    clip_value: float
    zeroed: int = 0


def strange_labels(y: Tensor, classes: int) -> Tensor:
    """Which labels are none of the classes. In a private step that costs the record its gradient and nothing else: an
    error would tell that the record is there."""
    return (y < 0) | (y >= classes)


def strange_record() -> DataError:
    return DataError(
        "a label lies outside the model's classes, or a token outside its Embedding; labels must be 0 … classes - 1, "
        "tokens 0 … words - 1"
    )


def mask_outside(dimension: int) -> ConfigError:
    return ConfigError(f"the mask has coordinates outside 0 … {dimension - 1}")


def mask_unsorted() -> ConfigError:
    return ConfigError("the mask's coordinates do not increase; sort them and take each once")


class Engine(Protocol):
    """A back end. Results may differ between back ends by rounding, never by the order or number of tasks; but for the
    traced one on a GPU, where agents that step together are rounded together."""

    @property
    def name(self) -> str: ...

    @property
    def separates_records(self) -> bool:
        """Whether what a record adds to a release is a function of that record, θ and public numbers alone, to the
        bit: whoever else is sampled, wherever it stands among them, on any number of threads. Only then does one record
        move a sum by no more than the plan's bound for *every* θ; a site takes no other back end. Engines that
        compute `BatchedGradients` may use a record's slot, too, where others have no part in it (`SlotAssignment`)."""
        ...

    def train(self, theta: Tensor, tasks: Sequence[LocalTask]) -> list[LocalResult]:
        """Run every task from the same θ. Does not change θ."""
        ...


@runtime_checkable
class ReadsRows(Protocol):
    """A back end that finds an agent's records among those of others, so that nobody has to copy them together."""

    reads_rows: Literal[True]


@runtime_checkable
class Predicts(Protocol):
    """A back end with a forward pass of its own."""

    def logits(self, theta: Tensor, x: Tensor) -> Tensor:
        """The model's outputs at θ, a row a record, on as many threads as the engine has."""
        ...
