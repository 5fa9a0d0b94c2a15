"""The plan of a sum over agents with discrete Gaussian shares of the noise: what decides an agent's guarantee.

One step on all of an agent's records: sampling, steps and the way of clipping cannot be chosen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fedspa.errors import PrivacyError
from fedspa.mechanisms.base import (
    CLIP_UNITS,
    Adversary,
    Aggregation,
    Asked,
    Clipping,
    Mechanism,
    PlanDefaults,
    check_clip,
    check_one_given,
    relation,
)
from fedspa.mechanisms.discrete_gaussian.event import FINE, KIND, MOST_BOUND, SIGMA, DiscreteGaussianEvent
from fedspa.privacy import accounting
from fedspa.privacy.event import MOST, Event, Neighbours, Sampling, Unit, check_word, told

# A coordinate of an agent's sum is held within a part of what it would be if all records pulled it with all their
# weight. Of many coordinates, gradients agree in none (docs/shares.md has the largest sums seen). Of few, none
# are held.
_LEAST_REACH, _ALL_UP_TO = 1 / 8, 64
# Standard deviations of a sum's noise that its bounds leave room for.
_TAIL = 14


@dataclass(frozen=True, slots=True)
class DiscreteGaussianPlan(PlanDefaults):
    """The terms of every agent. `bound` is `clip_value` in steps of the grid: noise is fixed there, so that it alone
    says how much there is.

    The server sees sums over `members` agents at least and `most` at most, and up to `colluders` of them are with it.
    `records` is a public number m, the fewest that an agent holds: gradients are divided by it.
    """

    dimension: int
    active: int
    clip_value: float
    records: int
    participations: int
    bound: int
    neighbours: Neighbours
    delta: float
    members: int
    colluders: int
    most: int
    unit: Unit = "record"

    def __post_init__(self) -> None:
        if not 1 <= self.active <= self.dimension <= MOST:
            raise PrivacyError(
                f"k is {told(self.active)}; it must lie between 1 and d = {told(self.dimension)}, at most {MOST:g}"
            )
        check_clip("l2", self.clip_value)
        check_word("neighbours", self.neighbours, Neighbours)
        if not 1 <= self.participations <= MOST:
            raise PrivacyError(f"participations is {told(self.participations)}; it must lie between 1 and {MOST:g}")
        if self.members < 2:
            raise PrivacyError(f"members is {told(self.members)}; a sum that hides its agents is over 2 at least")
        if not self.members <= self.most <= MOST:
            raise PrivacyError(
                f"most is {told(self.most)}; a cohort has members = {told(self.members)} at least, and {MOST:g} at most"
            )
        _ = self.event  # checks records, bound, members and colluders
        if not 0 < self.delta < 1 / self.records:
            raise PrivacyError(f"delta is {self.delta}; it must lie between 0 and 1/records = {1 / self.records:.3g}")

    @property
    def adversary(self) -> Adversary:
        return "secure-aggregation"

    @property
    def sampling(self) -> Sampling:
        """Every record in every step: a Poisson sample at rate 1."""
        return "poisson"

    @property
    def batch(self) -> int:
        return self.records

    @property
    def local_steps(self) -> int:
        return 1

    @property
    def clip(self) -> Clipping:
        return "l2"

    @property
    def noise_multiplier(self) -> float:
        """Of the agent's own share: the sum that the server sees has those of all members."""
        return SIGMA * FINE / self.bound

    @property
    def sigma(self) -> float:
        """Noise of the agent's own share on each coordinate of its mean gradient, before the 1/p scaling."""
        return self.noise_multiplier * self.clip_value / self.batch

    @property
    def reach(self) -> int:
        """What a coordinate of an agent's sum is held to, with `CLIP_UNITS` to the clip value."""
        part = min(1.0, max(_LEAST_REACH, _ALL_UP_TO / self.active))
        return math.ceil(part * self.batch * CLIP_UNITS)

    @property
    def aggregation(self) -> Aggregation:
        signal = self.most * (self.reach * self.bound // (FINE * CLIP_UNITS) + 1)
        high = signal + math.ceil(_TAIL * SIGMA * math.sqrt(self.most))
        return Aggregation(self.members, self.colluders, -high, high, self.active)

    @property
    def event(self) -> DiscreteGaussianEvent:
        return DiscreteGaussianEvent(
            self.records, self.active, self.bound, self.members, self.colluders, unit=self.unit
        )

    @property
    def floor_event(self) -> DiscreteGaussianEvent:
        return self.event.floor()

    def update_noise(self, local_lr: float, scale: float) -> float:
        """Of one agent's share; that of a mean over n members is √n times less."""
        return local_lr * scale * self.sigma

    def update_bound(self, local_lr: float, scale: float) -> float:
        largest = self.clip_value * (self.reach / CLIP_UNITS) / self.batch
        return (local_lr * scale * largest + _TAIL * self.update_noise(local_lr, scale)) * (1 + 1e-6)

    def require_sendable(self, *, exact: bool) -> None:
        if self.reach * self.bound >= 2**62 or self.aggregation.high >= 2**61:
            raise PrivacyError(
                f"sums over {self.records} records with a bound of {self.bound} steps each pass 64-bit integers; take "
                "more noise, or fewer records"
            )

    def summary(self) -> dict[str, Any]:
        return {
            "adversary": self.adversary,
            "members": self.members,
            "colluders": self.colluders,
            "bound": self.bound,
        }

    def report_rows(self) -> list[tuple[str, str, str]]:
        return [
            ("k", f"{self.active:,}", "active coordinates: what an upload holds"),
            ("p", f"{self.compression:.4g}", "compression, k/d"),
            (
                "shares",
                f"{SIGMA}",
                f"standard deviation of each agent's noise, where the clip value is {self.bound / FINE:.4g}",
            ),
            ("members", f"{self.members:,}", f"added up at least, of whom up to {self.colluders} may collude"),
        ]


_MOST_MEMBERS = 2**31 - 1


def check(config: Mapping[str, Any]) -> None:
    only: tuple[tuple[str, tuple[object, ...], str], ...] = (
        ("algorithm.local_steps", (1,), "one step on all records"),
        ("algorithm.coding", ("int", None), "whole numbers travel"),
        ("privacy.sampling", ("poisson",), "every record takes part"),
        ("privacy.clip", ("l2",), "noise is a share of the bound on a gradient's norm"),
        ("privacy.clip_rule", ("given",), "all members' numbers must have one scale"),
    )
    for key, allowed, why in only:
        if config[key] not in allowed:
            shown = " or ".join("unset" if value is None else repr(value) for value in allowed)
            raise ValueError(f"{key} is {config[key]!r}; under secure aggregation it must be {shown}: {why}")
    if config["algorithm.mask"] == "per-agent" and config["algorithm.compression"] < 1:
        raise ValueError(
            "algorithm.mask is 'per-agent'; under secure aggregation it must be 'shared' or 'fixed': sums are over the "
            "same coordinates"
        )
    check_one_given(config)


def calibrated(asked: Asked) -> DiscreteGaussianPlan:
    cohort = asked.cohort
    if cohort is None:
        raise PrivacyError("shares of noise are for sums over agents: privacy.adversary = 'secure-aggregation'")
    if asked.batch != asked.records:
        raise PrivacyError(
            f"batch is {asked.batch}; under secure aggregation a step is on all records, of which an agent holds "
            f"{asked.records} at least: algorithm.batch = {asked.records}"
        )
    noise = asked.options["privacy.noise_multiplier"]
    bound = 1 if noise is None else _bound(noise)
    event = DiscreteGaussianEvent(asked.records, asked.active, bound, cohort.members, cohort.colluders, unit=asked.unit)
    return of_event(event if noise is not None else _with_most(event, asked), asked)


def _bound(noise: float) -> int:
    """The clip value in steps of the grid at which an agent's own share is this noise, or a little more."""
    if not SIGMA * FINE / MOST_BOUND <= noise <= SIGMA * FINE:
        raise PrivacyError(
            f"noise multiplier is {noise}; a share takes {SIGMA * FINE / MOST_BOUND:g} to {SIGMA * FINE:g}"
        )
    return int(SIGMA * FINE / noise)


def _with_most(event: DiscreteGaussianEvent, asked: Asked) -> DiscreteGaussianEvent:
    """The event with the largest bound, hence the least noise, at which all participations cost at most ε."""
    target = asked.target

    def fits(bound: int) -> bool:
        events: dict[Event, int] = {replace(event, bound=bound): asked.participations}
        neighbours = relation(asked.neighbours, asked.sampling)
        return accounting.epsilon(events, asked.delta, neighbours=neighbours) <= target

    if not fits(1):
        raise PrivacyError(
            f"no share of noise keeps epsilon at {target} with delta {asked.delta}; take a larger epsilon or delta, "
            "more members or fewer rounds"
        )
    return replace(event, bound=accounting.last_that_fits(fits, 1, MOST_BOUND + 1))


def of_event(event: Event, asked: Asked) -> DiscreteGaussianPlan:
    if not isinstance(event, DiscreteGaussianEvent):
        raise PrivacyError(f"the ledger holds events that are not of discrete Gaussian shares: {event}")
    return DiscreteGaussianPlan(
        dimension=asked.dimension,
        active=event.active,
        clip_value=asked.clip_value,
        records=event.records,
        participations=asked.participations,
        bound=event.bound,
        neighbours=relation(asked.neighbours, asked.sampling),
        delta=asked.delta,
        members=event.members,
        colluders=event.colluders,
        most=event.members if asked.cohort is None else asked.cohort.most,
        unit=event.unit,
    )


DISCRETE_GAUSSIAN = Mechanism(
    name="discrete-gaussian",
    events={KIND: DiscreteGaussianEvent},
    check=check,
    calibrated=calibrated,
    of_event=of_event,
    plan=DiscreteGaussianPlan,
    limits={
        "bound": (1, MOST_BOUND),
        "members": (2, _MOST_MEMBERS),
        "colluders": (0, _MOST_MEMBERS),
        "most": (2, _MOST_MEMBERS),
    },
)
