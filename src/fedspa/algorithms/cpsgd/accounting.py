"""What cpSGD costs: the loss distribution of the exact mechanism, sampled and composed (docs/how-it-works.md).

The d coordinates of a release are independent, and each is the same channel: a in [0, k − 1], rounded at random to a
whole number, plus Bin(N, ½). One record moves a coordinate by at most ρ = (k − 1)/B. The channel's divergences are
convex in (a, a′) between whole numbers and grow with the shift, so they are largest between a whole number and the
mixture ρ above it. Up to ρ = 1 the pair (mixture, whole) lies above (whole, mixture) at every ε ≥ 0, and its positive
losses with their mirror image dominate both; beyond, ρ is rounded up to a whole number, where both are alike. The
d-fold product dominates a release, and the batch is a fixed-size sample (as in `fixed_size`). Where noise can run out
there is no guarantee, and ε is infinite.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Annotated, ClassVar, Self

import numpy as np

from fedspa.privacy.event import Event, Limits, Neighbours, NoiseMode, Sampling, Step, Unit
from fedspa.privacy.pld import LEFT_OUT, MOST_CELLS, Array, LossMass, composed_mass, split, tail_cutoff

# What a participation in cpSGD does, in whole numbers. Its loss distribution, under replace-one, composes with all
# others.

MOST_TRIALS = 2**31 - 1
# Standard deviations of the noise up to which draws have their law. Beyond, it counts as none.
FAR = 20


@dataclass(frozen=True, slots=True)
class BinomialEvent(Event):
    """`steps` releases of cpSGD, each of a fresh batch of exactly `batch` of `records` records (docs/how-it-works.md).

    The mean of `batch` clipped gradients of `dimension` coordinates, rounded at random onto 2^`bits` levels that span
    ±the clip bound, plus Binomial(`trials`, ½) in each coordinate. Where secure aggregation was run, the adversary sees
    their sum over `members` at least, up to `colluders` of whom it knows; else this agent's numbers.
    """

    kind: ClassVar[str] = "binomial"
    relations: ClassVar[tuple[Neighbours, ...]] = ("replace-one",)
    sampling: ClassVar[Sampling] = "fixed"

    batch: int
    records: int
    steps: int
    dimension: Annotated[int, Limits(1, 2**31 - 1)]
    bits: Annotated[int, Limits(1, 16)]
    trials: Annotated[int, Limits(1, MOST_TRIALS)]
    noise: NoiseMode | None = None
    unit: Unit = "record"
    members: int = 0
    colluders: int = 0

    def worst_case(self) -> Self:
        return replace(self, members=0, colluders=0)

    @property
    def step(self) -> Step:
        return rounded_step(self)

    def __str__(self) -> str:
        cohort = f", in sums over {self.members} members with up to {self.colluders} colluding"
        return (
            f"{self.steps} steps of cpsgd, fixed {self.batch}/{self.records}{self._shown_unit}, {2**self.bits} levels, "
            f"Binomial({self.trials}, 1/2) noise{self._shown_mode}{cohort * bool(self.members)}"
        )


# Cells of a coordinate's losses to a standard deviation. It decides tightness only.
_FINENESS = 16
# Above the relative error of a Binomial's probabilities here, and above that of sums over them.
_SLACK = 1 + 1e-12
_SKETCH_POINTS = 2000
# Probabilities below lose digits, then vanish: a shift far beyond the noise finds all its mass there, at infinite loss.
_LEAST_LAW = 1e-300
# Of a release whose chance of any finite loss is below e⁻²⁰, all is taken to be at infinite loss.
_LOG_NOTHING = -20.0


@dataclass(frozen=True, slots=True)
class RoundedStep(Step):
    """`rate` is q, `coordinates` d, `shift` ρ, `trials` N: all that the adversary cannot subtract."""

    rate: float
    coordinates: int
    shift: Fraction
    trials: int

    def pairs(self, neighbours: Neighbours) -> tuple[RoundedStep, ...]:
        """It is its own dominating pair, under replace-one; `BinomialEvent.accountant` refuses the other."""
        return (self,)

    def sketch(self, reach: float) -> tuple[Array, Array]:
        losses, mass, mirrored, unchanged, _ = self._atoms(reach)
        if not len(losses):
            return np.zeros(1), np.ones(1)
        size = max(1, len(losses) // _SKETCH_POINTS)
        starts = np.arange(0, len(losses), size)
        upper, lower = np.add.reduceat(mass, starts), np.add.reduceat(mirrored, starts)
        points = np.concatenate((-losses[starts], [0.0], losses[starts]))
        weights = np.concatenate((lower, [unchanged], upper))
        keep = weights > 0
        return points[keep], weights[keep] / weights[keep].sum()

    @lru_cache(maxsize=8)  # noqa: B019 (pairs are small values, equal ones share the entry)
    def discretise(self, interval: float, reach: float) -> LossMass:
        losses, mass, mirrored, unchanged, infinite = self._atoms(reach)
        cells = int(losses[-1] / interval) + 2 if len(losses) else 1
        upper, lower = np.zeros(cells + 1), np.zeros(cells + 1)
        index = np.floor(losses / interval).astype(np.int64)
        within = np.clip(losses - index * interval, 0.0, interval)
        # An atom of P-mass p at loss l, between two grid points: both its P- and its Q-mass are kept.
        down, up = split(mass, -mass * np.expm1(-within), 1e-15 * mass, interval)
        np.add.at(upper, index, down)
        np.add.at(upper, index + 1, up)
        down, up = split(mirrored, -mirrored * np.expm1(within - interval), 1e-15 * mirrored, interval)
        np.add.at(lower, index + 1, down)
        np.add.at(lower, index, up)
        whole = np.concatenate((lower[:0:-1], [lower[0] + unchanged + upper[0]], upper[1:]))
        return LossMass(interval, -cells, whole, infinite)

    @lru_cache(maxsize=8)  # noqa: B019
    def _atoms(self, reach: float) -> tuple[Array, Array, Array, float, float]:
        """Positive losses of the sampled step, their P-mass, that of their mirror images; P-mass at 0 and at ∞.

        Sampling B of m turns (p, p′) into ((1 − q)·p′ + q·p, p′): docs/how-it-works.md.
        """
        release = self._release(reach)
        positive = release.losses > 0
        losses = release.losses[positive]
        p = release.mass[positive]
        other = p * np.exp(-losses)
        mass = self.rate * p + (1 - self.rate) * other
        infinite = self.rate * release.infinite
        # Masses are from above and may sum to more than 1: what is over goes to 0 twice, so that none is ever missing.
        over = max(0.0, float(release.mass.sum()) + release.infinite - 1) + 1e-13
        unchanged = max(0.0, 1 - float(mass.sum()) - float(other.sum()) - infinite) + 2 * over
        keep = mass > 0
        sampled = losses + np.log(self.rate + (1 - self.rate) * np.exp(-losses))
        return sampled[keep], mass[keep], other[keep], unchanged, infinite

    def _release(self, reach: float) -> LossMass:
        """Return the loss distribution of all coordinates together, without sampling."""
        losses, with_it, without, infinite = _channel(self.shift, self.trials, reach)
        unchanged = max(0.0, 1 - float(with_it.sum()) - float(without.sum()) - infinite)
        if not len(losses):  # the shift leaves hardly an overlap: what it does leave is alike
            return LossMass(1.0, 0, np.array([unchanged]), min(1.0, self.coordinates * infinite))
        if infinite >= 1 or self.coordinates * math.log1p(-infinite) < _LOG_NOTHING:
            return LossMass(1.0, 0, np.zeros(1), 1.0)
        spread = math.sqrt(float((with_it + without) @ losses**2))
        # Where hardly any mass is at a finite loss, the spread is tiny beside the losses: a coarser grid.
        interval = 2.0 ** math.floor(math.log2(max(spread / _FINENESS, float(losses.max()) / MOST_CELLS)))
        index = np.floor(losses / interval).astype(np.int64)
        within = np.clip(losses - index * interval, 0.0, interval)
        cells = int(index.max()) + 1
        mass = np.zeros(2 * cells + 1)
        mass[cells] = unchanged
        down, up = split(with_it, -with_it * np.expm1(-within), 1e-15 * with_it, interval)
        np.add.at(mass, cells + index, down)
        np.add.at(mass, cells + index + 1, up)
        down, up = split(without, -without * np.expm1(within - interval), 1e-15 * without, interval)
        np.add.at(mass, cells - index - 1, down)
        np.add.at(mass, cells - index, up)
        one = LossMass(interval, -cells, mass * _SLACK, infinite * _SLACK)
        return composed_mass(one, self.coordinates)


def rounded_step(event: BinomialEvent) -> RoundedStep:
    """Return the pair that dominates a release of `event`."""
    shift = Fraction(2**event.bits - 1, event.batch)
    if shift > 1:
        shift = Fraction(math.ceil(shift))
    return RoundedStep(event.rate, event.dimension, shift, event.trials * event.honest)


def surely_infinite(event: BinomialEvent, participations: int, delta: float) -> bool:
    """Return whether infinite losses alone exceed `delta`, so that there is no ε: much less work than computing one."""
    steps = participations * event.steps
    pair = rounded_step(event)

    def passes(beyond: float) -> bool:
        return _any(steps, pair.rate * _any(pair.coordinates, beyond)) >= delta

    # What is left out at any number of trials may be enough: then none has to be looked at, however many there are.
    return passes(LEFT_OUT) or passes(_channel(pair.shift, pair.trials, tail_cutoff(steps, delta))[3])


def _any(count: int, chance: float) -> float:
    return -math.expm1(count * math.log1p(-chance)) if chance < 1 else 1.0


def _channel(shift: Fraction, trials: int, reach: float) -> tuple[Array, Array, Array, float]:
    """One coordinate, (whole + ρ, whole): its positive losses, their mass under both, and the mass at infinite loss."""
    low, part = int(shift), float(shift - int(shift))
    half = min(int((reach + 2) * math.sqrt(trials) / 2) + low + 2, int(FAR * math.sqrt(trials) / 2))
    first, last = max(0, (trials + 1) // 2 - half), min(trials, trials // 2 + half)
    x = np.arange(first, last + 1, dtype=np.longdouble)
    # P(x − 1)/P(x) = x/(N − x + 1): sums of its logarithm give both the law and its shifts, without cancellation.
    ratio = np.log(x) - np.log(trials - x + 1) if first > 0 else np.log(np.maximum(x, 0.5)) - np.log(trials - x + 1)
    if first == 0:
        ratio[0] = -np.inf
    steps = np.concatenate(([np.longdouble(0)], -ratio[1:]))
    log_law = np.cumsum(steps)
    log_law -= log_law.max()
    law = np.exp(log_law)
    law = (law / law.sum()).astype(np.float64)

    def shifted(by: int) -> Array:
        """P(x − by) on the same x; beyond the window nothing."""
        moved: Array = np.zeros_like(law)
        if by < len(law):
            moved[by:] = law[: len(law) - by]
        return moved

    with_it: Array = (1 - part) * shifted(low) + part * shifted(low + 1)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        losses = np.maximum(np.log(with_it / law), 0.0)
    # Where the loss is positive, whole numbers say: rounding must not count a loss of 0 on both sides.
    turn = low + (1 if part else 0)
    above = (2 * np.arange(first, last + 1) - turn > trials) & (with_it > 0)
    positive = above & (law > _LEAST_LAW)
    # What lies above the window under the shifted law, what is all but impossible without the shift, and what the
    # window cuts off on either side.
    beyond = max(0.0, 1 - float(with_it.sum())) + float(with_it[above & ~positive].sum()) + LEFT_OUT
    if first > 0 or last < trials:
        beyond += 2 * math.exp(-2 * half**2 / trials)
    return losses[positive], with_it[positive], law[positive], beyond
