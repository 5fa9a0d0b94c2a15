"""The plan of a sum over agents with discrete Gaussian shares of the noise: what decides an agent's guarantee.

One step on all of an agent's records: sampling, steps and the way of clipping cannot be chosen.

In whole numbers: the sum of an agent's clipped gradients is a point on a grid, `FINE` steps of which are a unit. What
leaves the agent is a draw of the discrete Gaussian on the whole units around that point, of standard deviation `SIGMA`
units. One kind of event has one `SIGMA` and one `FINE`: how much noise that is, is said by the bound on an example's
gradient in steps of the grid. docs/secagg.md has the theorem.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Self

import numpy as np
from scipy import special

from fedspa.errors import PrivacyError
from fedspa.mechanisms.base import (
    CLIP_UNITS,
    Adversary,
    Aggregation,
    Clipping,
    Mechanism,
    Plan,
    PlanRequest,
    check_one_given,
    make_plan,
)
from fedspa.privacy import accounting
from fedspa.privacy.event import MOST, Event, Limits, Neighbours, NoiseMode, Sampling, Step, Unit
from fedspa.privacy.pld import DominatingPair, Removed

# The privacy cost of a sum of discrete Gaussian shares: no more than one Gaussian of nearly the same noise
# (docs/secagg.md).
#
# With s² = honest·SIGMA², F(t) = Σ_{j ≥ 0} ρ(t − j) for the density ρ of N(0, s²) is the distribution function of the
# sum around its centre, t units above it, and q = Φ⁻¹(F) is what it would be for a Gaussian of standard deviation 1:
# nearly t/s. A record that moves the centre by g moves q by no more than κ·g/s, everywhere, and so an observer of one
# coordinate learns no more than from N(κg/s, 1) against N(0, 1). Coordinates and participations add up as Gaussians do.

# κ is found for |q| up to here, so that a shift of up to `_MOST_SHIFT` is covered where |q| ≤ 12. What lies beyond has
# a chance of η a coordinate.
_LAST, _MOST_SHIFT, _ETA = 20.0, 8.0, 5e-32
# The noise of more honest members than these is not counted: κ would take long to find.
_MOST_HONEST = 4096
# Above what rounding can take from κ.
_SLACK = 1 + 1e-8
_COLUMNS = 64


@dataclass(frozen=True, slots=True)
class SharedNoise(Step):
    """`bound` in steps of the grid; `honest` shares; `active` coordinates."""

    bound: int
    honest: int
    active: int

    def gaussian_shift(self, neighbours: Neighbours) -> float:
        honest = min(self.honest, _MOST_HONEST)
        moved = self.bound * (1 if neighbours == "add-remove" else 2) / FINE
        shift = stretch(honest) * moved / (SIGMA * math.sqrt(honest))
        return shift if shift <= _MOST_SHIFT else math.inf

    def pairs(self, neighbours: Neighbours) -> tuple[DominatingPair, ...]:
        return (Removed(1.0, self.gaussian_shift(neighbours)),)

    def extra_delta(self, neighbours: Neighbours) -> float:
        return self.active * _ETA


@lru_cache(maxsize=64)
def stretch(honest: int) -> float:
    """κ: the greatest step of q from one point of the grid to the next, in units of their distance over s.

    F between two points of the grid is linear, as the point is chosen at random, and q is steepest where the normal
    density at either end is least.
    """
    deviation = SIGMA * math.sqrt(honest)
    last = math.ceil((_LAST + 9) * deviation)
    most = 0.0
    for first in range(0, FINE, _COLUMNS):
        t = np.arange(-last, last + 1)[:, None] + np.arange(first, first + _COLUMNS + 1) / FINE
        log_law = -((t / deviation) ** 2) / 2 - math.log(deviation * math.sqrt(2 * math.pi))
        below = np.logaddexp.accumulate(log_law, axis=0)
        above = np.logaddexp.accumulate(log_law[:0:-1], axis=0)[::-1]  # of all but the first row: what is beyond t
        below = below[:-1]
        q = np.where(below < above, special.ndtri_exp(below), -special.ndtri_exp(above))
        near = np.abs(q) <= _LAST
        near = near[:, 1:] | near[:, :-1]
        density = -(q**2) / 2 - math.log(2 * math.pi) / 2
        least = np.minimum(density[:, 1:], density[:, :-1])
        upwards = np.exp(below[:, 1:] - least) * -np.expm1(below[:, :-1] - below[:, 1:])
        downwards = np.exp(above[:, :-1] - least) * -np.expm1(above[:, 1:] - above[:, :-1])
        steepest = np.where(q[:, 1:] < 0, upwards, downwards)[near]
        most = max(most, float(steepest.max()))
    return most * FINE * deviation * _SLACK


# A coordinate of an agent's sum is held within a part of what it would be if all records pulled it with all their
# weight. Of many coordinates, gradients agree in none (docs/secagg.md has the largest sums seen). Of few, none
# are held.
_LEAST_REACH, _ALL_UP_TO = 1 / 8, 64
# Standard deviations of a sum's noise within its bounds.
_TAIL = 14
# Of one share, in units; and the steps of the grid that a unit has.
SIGMA, FINE = 4, 1024
MOST_BOUND = 2**24


@dataclass(frozen=True, slots=True)
class DiscreteGaussianEvent(Event):
    """One release of all `records` of an agent: the sum of their clipped gradients on `active` coordinates.

    `bound` is the most that one clipped gradient measures in L2, in steps of the grid. The adversary sees the sum over
    `members` agents at least, up to `colluders` of whom it knows; without members it sees this agent's own share.
    """

    kind: ClassVar[str] = "discrete-gaussian"
    sampling: ClassVar[Sampling] = "poisson"  # every record takes part: at rate 1
    steps: ClassVar[int] = 1

    records: int
    active: Annotated[int, Limits(1, 2**31 - 1)]
    bound: Annotated[int, Limits(1, MOST_BOUND)]
    members: int = 0
    colluders: int = 0
    noise: NoiseMode | None = None
    unit: Unit = "record"

    @property
    def batch(self) -> int:
        return self.records

    def worst_case(self) -> Self:
        return replace(self, members=0, colluders=0)

    @property
    def step(self) -> Step:
        return SharedNoise(self.bound, self.honest, self.active)

    def __str__(self) -> str:
        seen = "the agent's own share"
        if self.members:
            seen = f"in sums over {self.members} members with up to {self.colluders} colluding"
        return (
            f"1 step on all {self.records}{self._shown_unit or ' records'}, discrete Gaussian share of noise "
            f"{SIGMA * FINE / self.bound:.4g}{self._shown_mode}, {seen}"
        )


@dataclass(frozen=True, slots=True)
class DiscreteGaussianPlan(Plan):
    """The terms of every agent. `bound` is `clip_value` in steps of the grid: noise is fixed there, so that it alone
    says how much there is.

    The server sees sums over `members` agents at least and `most` at most, and up to `colluders` of them are with it.
    `records` is a public number m, the fewest that an agent holds: gradients are divided by it.
    """

    event_type = DiscreteGaussianEvent
    adversary: ClassVar[Adversary] = "secure-aggregation"
    sampling: ClassVar[Sampling] = "poisson"  # every record takes part: at rate 1
    local_steps: ClassVar[int] = 1
    clip: ClassVar[Clipping] = "l2"

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
        Plan.__post_init__(self)
        if self.members < 2:
            raise PrivacyError(f"members is {self.members}; it must be at least 2: a sum of one hides nothing")
        if not self.members <= self.most <= MOST:
            raise PrivacyError(
                f"most is {self.most}; a cohort has members = {self.members} at least, and {MOST:g} at most"
            )

    @property
    def batch(self) -> int:
        return self.records

    @property
    def noise_multiplier(self) -> float:
        """The noise of the agent's own share: the sum that the server sees has those of all members."""
        return SIGMA * FINE / self.bound

    @property
    def sigma(self) -> float:
        """Noise of the agent's own share on each coordinate of its mean gradient, before the 1/p scaling."""
        return self.noise_multiplier * self.clip_value / self.batch

    @property
    def reach(self) -> int:
        """The bound on a coordinate of an agent's sum, with `CLIP_UNITS` to the clip value."""
        return math.ceil(reach_share(self.active) * self.batch * CLIP_UNITS)

    @property
    def aggregation(self) -> Aggregation:
        signal = self.most * (self.reach * self.bound // (FINE * CLIP_UNITS) + 1)
        high = signal + math.ceil(_TAIL * SIGMA * math.sqrt(self.most))
        return Aggregation(self.members, self.colluders, -high, high, self.active)

    def update_bound(self, local_lr: float, scale: float) -> float:
        largest = self.clip_value * (self.reach / CLIP_UNITS) / self.batch
        return (local_lr * scale * largest + _TAIL * self.update_noise(local_lr, scale)) * (1 + 1e-6)

    def check_sendable(self, *, exact: bool) -> None:
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


def reach_share(active: int) -> float:
    """Return the part that a coordinate of an agent's sum may reach of what all its records together could give it."""
    return min(1.0, max(_LEAST_REACH, _ALL_UP_TO / active))


def check(config: Mapping[str, Any]) -> None:
    only: tuple[tuple[str, tuple[object, ...], str], ...] = (
        ("algorithm.local_steps", (1,), "one step on all records"),
        ("algorithm.coding", ("int", None), "whole numbers travel"),
        ("privacy.sampling", ("poisson",), "every record takes part"),
        ("privacy.clip", ("l2",), "noise is a share of the bound on a gradient's norm"),
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


def calibrated(request: PlanRequest) -> DiscreteGaussianPlan:
    if request.cohort is None:
        raise PrivacyError("shares of noise are for sums over agents: privacy.adversary = 'secure-aggregation'")
    if request.batch != request.records:
        raise PrivacyError(
            f"batch is {request.batch}; under secure aggregation a step is on all records, of which an agent holds "
            f"{request.records} at least: algorithm.batch = {request.records}"
        )
    noise = request.options["privacy.noise_multiplier"]
    plan = make_plan(DiscreteGaussianPlan, request, bound=1 if noise is None else _bound(noise))
    return plan if noise is not None else _with_most(plan, request.target)


def _bound(noise: float) -> int:
    """Return the clip value in steps of the grid at which an agent's own share is this noise, or a little more."""
    if not SIGMA * FINE / MOST_BOUND <= noise <= SIGMA * FINE:
        raise PrivacyError(
            f"noise multiplier is {noise}; a share takes {SIGMA * FINE / MOST_BOUND:g} to {SIGMA * FINE:g}"
        )
    return int(SIGMA * FINE / noise)


def _with_most(plan: DiscreteGaussianPlan, epsilon: float) -> DiscreteGaussianPlan:
    """Return the plan with the largest bound, hence the least noise, at which all participations cost at most ε."""

    def fits(bound: int) -> bool:
        events: dict[Event, int] = {replace(plan, bound=bound).event: plan.participations}
        return accounting.epsilon(events, plan.delta, neighbours=plan.neighbours) <= epsilon

    if not fits(1):
        raise PrivacyError(
            f"no share of noise keeps epsilon at {epsilon} with delta {plan.delta}; take a larger epsilon or delta, "
            "more members or fewer rounds"
        )
    return replace(plan, bound=accounting.last_that_fits(fits, 1, MOST_BOUND + 1))


DISCRETE_GAUSSIAN = Mechanism("discrete-gaussian", DiscreteGaussianPlan, check, calibrated)
