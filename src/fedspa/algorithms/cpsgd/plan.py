"""The plan of cpSGD: everything that decides an agent's guarantee, in one frozen object, as every mechanism has one.

Quantisation, noise, wire and accountant all read it; the levels' step, the noise and the event are derived from it.
cpSGD makes one release per round, of a batch of exactly B records. So sampling, relation and steps cannot be chosen.

Its cost is that of the exact mechanism, whose loss distribution is sampled and composed (docs/how-it-works.md has the
proof). Where noise can run out there is no guarantee, and ε is infinite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

import numpy as np

from fedspa.errors import PrivacyError
from fedspa.mechanisms.base import CLIP_UNITS, Adversary, Aggregation, Clipping, Mechanism, Plan, PlanRequest, make_plan
from fedspa.privacy import accounting
from fedspa.privacy.event import MOST, Event, Limits, Neighbours, NoiseMode, Sampling, Step, Unit, check_word
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


_ROOM = 2**62


@dataclass(frozen=True, slots=True)
class BinomialPlan(Plan):
    """The terms of every agent. `clip_value` is X = G/√d, the bound on a coordinate of an example's gradient.

    `agents` is n, who take part in every round. Under `secure-aggregation` the server sees no more than sums over
    `members` of them at least, and the noise of all but `colluders` counts. `records` is a public number m, the fewest
    that an agent holds.
    """

    event_type = BinomialEvent
    sampling: ClassVar[Sampling] = "fixed"
    neighbours: ClassVar[Neighbours] = "replace-one"
    clip: ClassVar[Clipping] = "coordinate"
    local_steps: ClassVar[int] = 1

    dimension: int
    clip_value: float
    bits: int
    trials: int
    adversary: Adversary
    agents: int
    batch: int
    records: int
    participations: int
    delta: float
    unit: Unit = "record"
    members: int = 0
    colluders: int = 0

    if TYPE_CHECKING:

        @property
        def event(self) -> BinomialEvent: ...

    def __post_init__(self) -> None:
        Plan.__post_init__(self)
        check_word("adversary", self.adversary, Adversary)
        if not 1 <= self.agents <= MOST:
            raise PrivacyError(f"agents is {self.agents}; it must lie between 1 and {MOST:g}")
        if self.adversary == "local" and (self.members or self.colluders):
            raise PrivacyError("members and colluders belong to adversary 'secure-aggregation'; it is 'local'")
        if self.adversary != "local" and not self.members:
            raise PrivacyError("adversary 'secure-aggregation' needs members, the fewest agents that are ever added up")
        if self.members > self.agents:
            raise PrivacyError(f"members is {self.members}; it must not exceed the agents, {self.agents}")

    @property
    def levels(self) -> int:
        """k = 2^b."""
        return 1 << self.bits

    @property
    def active(self) -> int:
        return self.dimension

    @property
    def compression(self) -> float:
        """p = log2(m + 2^b)/32: bits of a value, uncoded, over those of a float32."""
        return math.log2(self.trials + self.levels) / 32

    @property
    def step(self) -> float:
        """s = 2X/(k − 1), from a level to the next, in gradient units."""
        return 2 * self.clip_value / (self.levels - 1)

    @property
    def sigma(self) -> float:
        """Noise per coordinate of the mean gradient: s·√m/2, rounding aside."""
        return self.step * math.sqrt(self.trials) / 2

    @property
    def noise_multiplier(self) -> float:
        """The Binomial noise in the unit of Gaussian plans: on the sum of gradients, over the bound on one."""
        return self.sigma * self.batch / self.clip_norm

    @property
    def aggregation(self) -> Aggregation | None:
        if not self.members:
            return None
        most = self.agents * (self.trials + self.levels - 1)
        return Aggregation(self.members, self.colluders, 0, most, self.dimension)

    def update_noise(self, local_lr: float, scale: float) -> float:
        """Rounding to levels adds at most a quarter of a squared step."""
        return local_lr * self.step * math.sqrt(self.trials + 1) / 2

    def update_bound(self, local_lr: float, scale: float) -> float:
        """Numbers are bounded by what they are made of."""
        return local_lr * (self.clip_value + self.step * self.trials / 2) * (1 + 1e-6)

    def check_sendable(self, *, exact: bool) -> None:
        reach(self)

    def summary(self) -> dict[str, Any]:
        return {"adversary": self.adversary, "bits": self.bits, "trials": self.trials, "whole_numbers": True}

    def report_rows(self) -> list[tuple[str, str, str]]:
        cohort = f"added up at least, of whom up to {self.colluders} may collude"
        return [
            ("2^b", f"{self.levels:,}", f"levels over ±{self.clip_value:.4g}"),
            ("trials", f"{self.trials:,}", "of the Binomial noise on each value"),
            ("adversary", self.adversary, "against whom ε holds"),
            *([("members", f"{self.members:,}", cohort)] if self.members else []),
        ]


def reach(plan: BinomialPlan) -> int:
    """Return what the levels span, in integers of the batch's sum: ±B times an example's bound."""
    half = plan.batch * CLIP_UNITS
    if 2 * half * plan.levels >= _ROOM:
        raise PrivacyError(
            f"2^{plan.bits} levels over a batch of {plan.batch} pass 64-bit integers; take fewer bits or a smaller "
            "batch"
        )
    return half


def trials_for_compression(compression: float, bits: int) -> int:
    """Return the m at which p = log2(m + 2^b)/32 comes nearest to `compression`."""
    trials = round(2 ** (32 * compression)) - 2**bits if compression <= 1 else 0
    if not 1 <= trials <= MOST_TRIALS:
        raise PrivacyError(
            f"compression {compression} leaves {trials:,} trials beside 2^{bits} levels; it must lie between "
            f"{math.log2(1 + 2**bits) / 32:.4g} and {math.log2(MOST_TRIALS) / 32:.4g}"
        )
    return trials


def with_least_trials(plan: BinomialPlan, epsilon: float) -> BinomialPlan:
    """Return the plan with the fewest trials at which all its participations cost at most `epsilon`."""
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise PrivacyError(f"epsilon is {epsilon}; it must be positive and finite")
    trials = _fewest(plan, epsilon)
    if trials is None:
        raise PrivacyError(
            f"no Binomial noise of up to {MOST_TRIALS:,} trials keeps epsilon at {epsilon}; take fewer bits, a larger "
            "batch, a larger epsilon or delta, or fewer rounds"
        )
    return replace(plan, trials=trials)


def _cost(plan: BinomialPlan) -> float:
    return accounting.epsilon({plan.event: plan.participations}, plan.delta, neighbours="replace-one")


@lru_cache(maxsize=256)
def _fewest(plan: BinomialPlan, epsilon: float) -> int | None:
    """ε falls as trials grow: bisection. An `epsilon` of ∞ asks for any finite one.

    Near the fewest that have any ε it is huge and takes long to tell, and so it does at far too many: both are avoided.
    """
    from fedspa.algorithms.cpsgd.plan import surely_infinite  # slow to import

    def fits(trials: int) -> bool:
        cost = _cost(replace(plan, trials=trials))
        return cost < math.inf and cost <= epsilon

    def has_any(trials: int) -> bool:
        event = replace(plan, trials=trials).event
        return not surely_infinite(event, plan.participations, plan.delta)

    least = _first(has_any, 1)
    return None if least is None else _first(fits, least)


def _first(holds: Callable[[int], bool], start: int) -> int | None:
    """Return the first number of trials from `start` on of which `holds` is true, as it then stays; None up to the
    most."""
    short, enough = start - 1, start
    while not holds(enough):
        if enough == MOST_TRIALS:
            return None
        short, enough = enough, min(64 * enough, MOST_TRIALS)
    return accounting.last_that_fits(holds, enough, short)


# What decides the noise in a config.
_NOISE = ("privacy.epsilon", "algorithm.options.trials", "algorithm.options.compression")


def check(config: Mapping[str, Any]) -> None:
    """cpSGD takes one step per round, of every agent, on batches of a fixed size."""
    only: tuple[tuple[str, object, str], ...] = (
        ("federation.per_round", config["federation.agents"], "all agents take part in every round"),
        ("algorithm.local_steps", 1, "one step per round"),
        ("algorithm.coding", "int", "whole numbers travel"),
        ("privacy.sampling", "fixed", "batches of exactly B records"),
        ("privacy.neighbours", "replace-one", "batches are of a fixed size"),
        ("privacy.clip", "coordinate", "the levels span one coordinate"),
        ("privacy.noise_multiplier", None, "its noise is Binomial: give algorithm.options.trials"),
    )
    for key, allowed, why in only:
        value = config[key]
        if value != allowed and not (value is None and key in ("algorithm.coding", "privacy.neighbours")):
            shown = "unset" if allowed is None else repr(allowed)
            raise ValueError(f"{key} is {value!r}; for cpsgd it must be {shown}: {why}")
    given = [key for key in _NOISE if config.get(key) is not None]
    if len(given) != 1:
        raise ValueError(f"cpsgd takes exactly one of {', '.join(_NOISE)}; given: {', '.join(given) or 'none'}")


def calibrated(request: PlanRequest) -> BinomialPlan:
    options = request.options
    bits, compression = options["algorithm.options.bits"], options.get("algorithm.options.compression")
    trials = options.get("algorithm.options.trials") or 1
    if compression is not None:
        trials = trials_for_compression(compression, bits)
    plan = make_plan(BinomialPlan, request, bits=bits, trials=trials)
    return plan if request.epsilon is None else with_least_trials(plan, request.epsilon)


def upload(summary: Mapping[str, Any]) -> str:
    return f"p = {summary['compression']:.3g}: {2 ** summary['bits']} levels + Binomial({summary['trials']:,}, 1/2)"


BINOMIAL = Mechanism("binomial", BinomialPlan, check, calibrated, upload=upload)
