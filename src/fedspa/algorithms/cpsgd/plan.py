"""The plan of cpSGD: everything that decides an agent's guarantee, in one frozen object, as every mechanism has one.

Quantisation, noise, wire and accountant all read it; the levels' step, the noise and the event are derived from it.
cpSGD makes one release per round, of a batch of exactly B records. So sampling, relation and steps cannot be chosen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from fedspa.algorithms.cpsgd.event import KIND, MOST_TRIALS, BinomialEvent, spread
from fedspa.errors import PrivacyError
from fedspa.mechanisms.base import (
    Adversary,
    Aggregation,
    Asked,
    Clipping,
    Mechanism,
    PlanDefaults,
    check_clip,
)
from fedspa.mechanisms.gaussian.exact import Grid
from fedspa.privacy import accounting
from fedspa.privacy.event import MOST, PLD, Event, Neighbours, Sampling, Unit, check_word, told

# An example's bound (of a coordinate, or of the norm) in grid units: float32 knows no more digits of a gradient.
_COORDINATE_BITS, _NORM_BITS = 24, 28
_ROOM = 2**62


@dataclass(frozen=True, slots=True)
class BinomialPlan(PlanDefaults):
    """The terms of every agent. `clip_value` is X = G/√d (`coordinate`) or G (`l2`, with rotation), of an example.

    `agents` is n, who take part in every round. Under `secure-aggregation` the server sees no more than sums over
    `members` of them at least, and the noise of all but `colluders` counts. `records` is a public number m, the fewest
    that an agent holds.
    """

    dimension: int
    clip: Clipping
    clip_value: float
    bits: int
    trials: int
    rotation: bool
    adversary: Adversary
    agents: int
    batch: int
    records: int
    participations: int
    delta: float
    unit: Unit = "record"
    members: int = 0
    colluders: int = 0

    def __post_init__(self) -> None:
        check_clip(self.clip, self.clip_value)
        if self.clip == "l2" and not self.rotation:
            raise PrivacyError("clip is 'l2'; without rotation the levels span one coordinate: it must be 'coordinate'")
        check_word("adversary", self.adversary, Adversary)
        if not (1 <= self.agents <= MOST and 1 <= self.participations <= MOST):
            raise PrivacyError(
                f"agents is {told(self.agents)}, participations {told(self.participations)}; both must lie between 1 "
                f"and {MOST:g}"
            )
        if self.adversary == "local" and (self.members or self.colluders):
            raise PrivacyError("members and colluders belong to adversary 'secure-aggregation'; it is 'local'")
        if self.adversary != "local" and not self.members:
            raise PrivacyError("adversary 'secure-aggregation' needs members, the fewest agents that are ever added up")
        if self.members > self.agents:
            raise PrivacyError(f"members is {told(self.members)}; it must not exceed the agents, {self.agents}")
        _ = self.event  # checks batch, records, dimension, bits, trials, members and colluders
        if not 0 < self.delta < 1 / self.records:
            raise PrivacyError(f"delta is {self.delta}; it must lie between 0 and 1/records")

    @property
    def levels(self) -> int:
        """k = 2^b."""
        return 1 << self.bits

    @property
    def active(self) -> int:
        return self.dimension

    @property
    def coordinates(self) -> int:
        """How many numbers travel: d, or the power of two that a rotation pads it to."""
        return self.event.coordinates

    @property
    def compression(self) -> float:
        """p = log2(m + 2^b)/32: bits of a value, uncoded, over those of a float32."""
        return math.log2(self.trials + self.levels) / 32

    @property
    def sampling(self) -> Sampling:
        return "fixed"

    @property
    def neighbours(self) -> Neighbours:
        return "replace-one"

    @property
    def local_steps(self) -> int:
        return 1

    @property
    def reach(self) -> float:
        """X: the levels span ±X. With rotation wider than G/√d, as a rotated coordinate may pass that."""
        if not self.rotation:
            return self.clip_value
        return spread(self.event) * self.clip_norm / math.sqrt(self.coordinates)

    @property
    def step(self) -> float:
        """s = 2X/(k − 1), from a level to the next, in gradient units."""
        return 2 * self.reach / (self.levels - 1)

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
        return Aggregation(self.members, self.colluders, 0, most, self.coordinates)

    @property
    def event(self) -> BinomialEvent:
        """What one participation does."""
        aggregated = self.members - self.colluders if self.members else 1
        return BinomialEvent(
            self.batch,
            self.records,
            1,
            self.dimension,
            self.bits,
            self.trials,
            self.rotation,
            aggregated,
            unit=self.unit,
            members=self.members,
            colluders=self.colluders,
        )

    @property
    def floor_event(self) -> BinomialEvent | None:
        return self.event.floor() if self.members else None

    def update_noise(self, local_lr: float, scale: float) -> float:
        """Rounding to levels adds at most a quarter of a squared step."""
        return local_lr * self.step * math.sqrt(self.trials + 1) / 2

    def update_bound(self, local_lr: float, scale: float) -> float:
        """Numbers are bounded by what they are made of."""
        largest = local_lr * (self.reach + self.step * self.trials / 2)
        return largest * (math.sqrt(self.coordinates) if self.rotation else 1.0) * (1 + 1e-6)

    def require_sendable(self, *, exact: bool) -> None:
        reach(self)

    def summary(self) -> dict[str, Any]:
        return {"adversary": self.adversary, "bits": self.bits, "trials": self.trials, "whole_numbers": True}

    def report_rows(self) -> list[tuple[str, str, str]]:
        cohort = f"added up at least, of whom up to {self.colluders} may collude"
        return [
            ("2^b", f"{self.levels:,}", f"levels over ±{self.reach:.4g}{', of the rotated gradient' * self.rotation}"),
            ("trials", f"{self.trials:,}", "of the Binomial noise on each value"),
            ("adversary", self.adversary, "against whom ε holds"),
            *([("members", f"{self.members:,}", cohort)] if self.members else []),
        ]


def example_grid(plan: BinomialPlan) -> Grid:
    """One example's integers: a coordinate within ±2^24, or a row of norm up to 2^28."""
    if plan.clip == "coordinate":
        limit = 1 << _COORDINATE_BITS
        return Grid("coordinate", plan.clip_value / limit, 0, limit, plan.dimension * limit**2)
    limit = 1 << _NORM_BITS
    return Grid("l2", plan.clip_value / limit, 0, limit, limit**2)


def reach(plan: BinomialPlan) -> int:
    """What the levels span, in integers of the batch's (rotated) sum: ±B times an example's bound, times κ."""
    grid = example_grid(plan)
    most = plan.batch * grid.limit
    half = most
    if plan.rotation:
        norm = math.isqrt(grid.limit_square) + 1
        half = math.ceil(plan.batch * norm * spread(plan.event) * (1 + 1e-12))
        most *= plan.coordinates
    if max(most, 2 * half * plan.levels) >= _ROOM:
        raise PrivacyError(
            f"2^{plan.bits} levels of {plan.coordinates} coordinates over a batch of {plan.batch} pass 64-bit "
            "integers; take fewer bits or a smaller batch"
        )
    return half


def trials_for_compression(compression: float, bits: int) -> int:
    """The m at which p = log2(m + 2^b)/32 comes nearest to `compression`."""
    trials = round(2 ** (32 * compression)) - 2**bits if compression <= 1 else 0
    if not 1 <= trials <= MOST_TRIALS:
        raise PrivacyError(
            f"compression {compression} leaves {trials:,} trials beside 2^{bits} levels; it must lie between "
            f"{math.log2(1 + 2**bits) / 32:.4g} and {math.log2(MOST_TRIALS) / 32:.4g}"
        )
    return trials


def with_least_trials(plan: BinomialPlan, epsilon: float) -> BinomialPlan:
    """The plan with the fewest trials at which all its participations cost at most `epsilon`."""
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
    from fedspa.algorithms.cpsgd.accounting import surely_infinite  # slow to import

    def fits(trials: int) -> bool:
        cost = _cost(replace(plan, trials=trials))
        return cost < math.inf and cost <= epsilon

    def has_any(trials: int) -> bool:
        event = replace(plan, trials=trials).event
        return plan.rotation or not surely_infinite(event, plan.participations, plan.delta)

    least = _first(has_any, 1)
    return None if least is None else _first(fits, least)


def _first(holds: Callable[[int], bool], start: int) -> int | None:
    """The first number of trials from `start` on of which `holds` is true, as it then stays; None up to the most."""
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
        ("privacy.clip_rule", "given", "the levels lie within the clip value"),
        ("privacy.noise_multiplier", None, "its noise is Binomial: give algorithm.options.trials"),
    )
    for key, allowed, why in only:
        value = config[key]
        if value != allowed and not (value is None and key in ("algorithm.coding", "privacy.neighbours")):
            shown = "unset" if allowed is None else repr(allowed)
            raise ValueError(f"{key} is {value!r}; for cpsgd it must be {shown}: {why}")
    if config["privacy.clip"] == "l2" and not config["algorithm.options.rotation"]:
        raise ValueError(
            "privacy.clip is 'l2'; cpsgd without algorithm.options.rotation needs 'coordinate': its levels span one "
            "coordinate"
        )
    given = [key for key in _NOISE if config.get(key) is not None]
    if len(given) != 1:
        raise ValueError(f"cpsgd takes exactly one of {', '.join(_NOISE)}; given: {', '.join(given) or 'none'}")


def calibrated(asked: Asked) -> BinomialPlan:
    options, cohort = asked.options, asked.cohort
    bits, compression = options["algorithm.options.bits"], options.get("algorithm.options.compression")
    trials = options.get("algorithm.options.trials") or 1
    if compression is not None:
        trials = trials_for_compression(compression, bits)
    drawn = BinomialEvent(
        batch=asked.batch,
        records=asked.records,
        steps=1,
        dimension=asked.dimension,
        bits=bits,
        trials=trials,
        rotation=options["algorithm.options.rotation"],
        aggregated=1 if cohort is None else cohort.members - cohort.colluders,
        unit=asked.unit,
        members=0 if cohort is None else cohort.members,
        colluders=0 if cohort is None else cohort.colluders,
    )
    plan = of_event(drawn, asked)
    return plan if asked.epsilon is None else with_least_trials(plan, asked.epsilon)


def of_event(event: Event, asked: Asked) -> BinomialPlan:
    if not isinstance(event, BinomialEvent):
        raise PrivacyError(f"the ledger holds events that are not of Binomial noise: {event}")
    adversary = asked.options["privacy.adversary"]
    if event.members and adversary == "local":
        raise PrivacyError(
            f"the ledger says that sums over {event.members} members were sent, the config privacy.adversary = "
            f"{adversary!r}: rely on no ε of this page"
        )
    return BinomialPlan(
        dimension=event.dimension,
        clip=asked.clip,
        clip_value=asked.clip_value,
        bits=event.bits,
        trials=event.trials,
        rotation=event.rotation,
        adversary=adversary,
        agents=asked.agents,
        batch=event.batch,
        records=event.records,
        participations=asked.participations,
        delta=asked.delta,
        unit=event.unit,
        members=event.members,
        colluders=event.colluders,
    )


def upload(summary: Mapping[str, Any]) -> str:
    return f"p = {summary['compression']:.3g}: {2 ** summary['bits']} levels + Binomial({summary['trials']:,}, 1/2)"


def _accountant(config: Mapping[str, Any]) -> str:
    return KIND if config["algorithm.options.rotation"] else PLD


BINOMIAL = Mechanism(
    name="binomial",
    events={KIND: BinomialEvent},
    check=check,
    calibrated=calibrated,
    of_event=of_event,
    plan=BinomialPlan,
    limits={"bits": (1, 16), "trials": (1, MOST_TRIALS), "members": (0, MOST_TRIALS), "colluders": (0, MOST_TRIALS)},
    accountant=_accountant,
    upload=upload,
)
