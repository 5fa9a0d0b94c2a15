"""The plan of cpSGD: everything that decides an agent's guarantee, in one frozen object, as every mechanism has one.

Quantisation, noise, wire and accountant all read it; the levels' step, the noise and the event are derived from it.
cpSGD makes one release per round, of a batch of exactly B records. So sampling, relation and steps cannot be chosen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

from fedspa.algorithms.cpsgd.accounting import MOST_TRIALS, BinomialEvent
from fedspa.errors import PrivacyError
from fedspa.mechanisms.base import CLIP_UNITS, Adversary, Aggregation, Clipping, Mechanism, Plan, PlanRequest, make_plan
from fedspa.privacy import accounting
from fedspa.privacy.event import MOST, Neighbours, Sampling, Unit, check_word

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
    from fedspa.algorithms.cpsgd.accounting import surely_infinite  # slow to import

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
        ("privacy.clip_rule", "given", "the levels lie within the clip value"),
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
