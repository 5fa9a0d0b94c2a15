"""What is attacked of cpSGD: plans, one release, whole answers, and the sensitivity that is claimed for a release.

Below it the plants: copies with one mistake each, which real code has made. They are never used to train.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from fedspa.algorithms import Agent, Terms, chosen
from fedspa.algorithms.cpsgd import respond
from fedspa.audit.engines import Longer, Overlooks, engine_with
from fedspa.audit.probe import DIMENSION, MakeEngine, Respond, one_key, public_key
from fedspa.audit.setting import Setting
from fedspa.audit.sums import plants as sums
from fedspa.audit.sums.cohort import Summed, answering, played
from fedspa.engine.task import Engine
from fedspa.errors import ConfigError
from fedspa.examples import taken
from fedspa.mechanisms.binomial import release as quantize
from fedspa.mechanisms.binomial.bound import Sensitivity, sensitivity
from fedspa.mechanisms.binomial.codec import IntegerUpdate
from fedspa.mechanisms.binomial.plan import BinomialPlan
from fedspa.mechanisms.binomial.release import Integers
from fedspa.privacy import accounting
from fedspa.randomness.streams import Stream

Release = Callable[[list[Tensor], BinomialPlan, bytes, Stream, Stream], Integers]
Claim = Callable[[BinomialPlan, float], Sensitivity]
# Of a member's records: more cost time, and fewer are a harder case, priced as such.
_MOST_BATCH = 32


@dataclass(frozen=True, slots=True)
class Target:
    """`variants` are plans that differ in clipping and rotation; the first one's sampling is audited too. `sums` are
    attacked where the plan is of sums: the variants are then what a member is asked for, as one sees it who colludes
    with all others."""

    variants: tuple[BinomialPlan, ...]
    release: Release = quantize.release
    engine: MakeEngine = Setting.make_engine
    respond: Respond[IntegerUpdate] = respond
    claim: Claim = lambda plan, delta: sensitivity(plan.event, delta)
    sums: Summed | None = None

    def __post_init__(self) -> None:
        if self.sums is None:
            for plan in self.variants:
                _require_claim(plan)


def _require_claim(plan: BinomialPlan) -> None:
    if math.isinf(accounting.epsilon({plan.event: plan.participations}, plan.delta, neighbours=plan.neighbours)):
        raise ConfigError("there is no claim to audit: the noise is too small for any ε")


def variant(plan: BinomialPlan) -> str:
    """Its name in the report."""
    return f"{plan.clip}, rotated" if plan.rotation else plan.clip


def synthetic() -> Target:
    """A small mechanism that the attacks see well: 16 coordinates, 2 of 8 records, little noise. Not the least that has
    an ε (17 and 31 trials): a claim so weak, of ε = 17 and 57, is beyond what thousands of draws could refute."""
    plan = BinomialPlan(16, "coordinate", 0.1, 2, 100, False, "local", 8, 2, 8, 1, 1e-3)
    rotated = replace(plan, rotation=True, trials=2000)
    summed = replace(plan, adversary="secure-aggregation", trials=400, members=4, colluders=1)
    return Target((plan, rotated, replace(rotated, clip="l2")), sums=_sums(summed))


def of_plan(plan: BinomialPlan) -> Target:
    """The mechanism of a run."""
    _require_claim(plan)
    if plan.aggregation is None:
        return Target((plan,))
    return Target((replace(plan, adversary="local", members=0, colluders=0),), sums=_sums(plan))


def _sums(plan: BinomialPlan) -> Summed:
    """A cohort of the plan's members, on the probe and with few records."""
    batch, (members, colluders) = min(plan.batch, _MOST_BATCH), played(plan.members, plan.colluders)
    few = replace(plan, dimension=DIMENSION, batch=batch, records=batch, members=members, colluders=colluders)

    def law(shares: int) -> Any:
        """Of null records each member rounds ½ by a coin, which is one trial more."""
        return stats.binom(shares * (few.trials + 1), 0.5, loc=shares * (few.levels // 2 - 1))

    return Summed(few, chosen("cpsgd", "secure-aggregation"), law)


def _half(plan: BinomialPlan, delta: float) -> Sensitivity:
    """G/B claimed as the distance of neighbouring means, where it is 2G/B: what a batch twice as large would have."""
    return sensitivity(replace(plan.event, batch=2 * plan.batch, records=2 * plan.records), delta)


def _weak(rows: list[Tensor], plan: BinomialPlan, seed: bytes, rounding: Stream, noise: Stream) -> Integers:
    """A standard deviation smaller than accounted by 1.5."""
    fewer = replace(plan, trials=max(1, round(plan.trials / 2.25)))
    numbers = quantize.release(rows, fewer, seed, rounding, noise)
    return numbers + (plan.trials - fewer.trials) // 2  # the mean as it should be


def _missing(rows: list[Tensor], plan: BinomialPlan, seed: bytes, rounding: Stream, noise: Stream) -> Integers:
    """No noise on one coordinate in four."""
    position = rounding.position
    numbers = quantize.release(rows, plan, seed, rounding, noise)
    rounding.seek(position)
    bare = quantize.release(rows, replace(plan, trials=1), seed, rounding, noise) + plan.trials // 2
    numbers[::4] = bare[::4]
    return numbers


def _clipped_mean(rows: list[Tensor], plan: BinomialPlan, seed: bytes, rounding: Stream, noise: Stream) -> Integers:
    """The batch's mean is clipped, not each example."""
    mean = torch.cat(rows).nan_to_num(0.0, 0.0, 0.0).mean(dim=0, keepdim=True)
    return quantize.release([mean.repeat(plan.batch, 1)], plan, seed, rounding, noise)


def _nearest(rows: list[Tensor], plan: BinomialPlan, seed: bytes, rounding: Stream, noise: Stream) -> Integers:
    """To the nearest level, without a coin."""

    class Tails:
        """A coin that never falls: ½ is added before rounding down."""

        def integers_below(self, n: int, bound: int) -> Integers:
            return np.full(n, bound // 2)

    return quantize.release(rows, plan, seed, Tails(), noise)  # type: ignore[arg-type]


def _epochs(theta: Tensor, terms: Terms, agents: Sequence[Agent], engine: Engine) -> Iterator[IntegerUpdate]:
    """Shuffled epochs, accounted as fresh samples: in round t the agent is handed the t-th batch of a shuffled order
    and no other records."""
    plan: Any = terms.plan
    only = replace(terms, steps=replace(plan, records=plan.batch))
    for agent in agents:
        order = torch.randperm(agent.records, generator=torch.Generator().manual_seed(agent.number))
        start = terms.round * plan.batch % (len(order) - plan.batch + 1)
        chosen = order[start : start + plan.batch]
        yield from respond(theta, only, [replace(agent, x=taken(agent.x, chosen), y=taken(agent.y, chosen))], engine)


def _half_share(sums: Summed) -> Summed:
    """Half of the trials: a standard deviation smaller than accounted by √2."""

    def fewer(theta: Tensor, terms: Terms, agents: Sequence[Agent], engine: Engine) -> Iterator[IntegerUpdate]:
        plan: Any = terms.plan
        half = replace(plan, trials=max(1, plan.trials // 2))
        for answer in respond(theta, replace(terms, steps=half), agents, engine):
            yield replace(answer, values=answer.values + (plan.trials - half.trials) // 2)  # the mean as it should be

    return answering(sums, fewer)


def _in_sums(plant: Callable[[Summed], Summed]) -> Callable[[Target], Target]:
    def planted(target: Target) -> Target:
        if target.sums is None:
            raise ConfigError(
                "this plant is a mistake in sums: give a config of privacy.adversary = 'secure-aggregation'"
            )
        return replace(target, sums=plant(target.sums))

    return planted


PLANTS: dict[str, Callable[[Target], Target]] = {
    "sensitivity": lambda target: replace(target, claim=_half),
    "noise": lambda target: replace(target, release=_weak),
    "noise-missing": lambda target: replace(target, release=_missing),
    "clip": lambda target: replace(target, release=_clipped_mean),
    "rounding": lambda target: replace(target, release=_nearest),
    "seed": lambda target: replace(target, respond=public_key(target.respond)),
    "seed-reused": lambda target: replace(target, respond=one_key(target.respond)),
    "sampling": lambda target: replace(target, respond=_epochs),
    "engine-clip": lambda target: replace(target, engine=engine_with(Longer)),
    "engine-norm": lambda target: replace(target, engine=engine_with(Overlooks)),
    "share": _in_sums(_half_share),
    **{name: _in_sums(plant) for name, plant in sums.PLANTS.items()},
}
