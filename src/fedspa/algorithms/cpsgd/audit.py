"""The audit of cpSGD: whole answers of agents against what its accounting assumes.

Answers go through `respond` and the engine of a run, which clips by itself. Small faults are seen by the questions
about the mechanism as accounted: how far apart neighbours are after rounding with the same coins, whether an answer
without gradients is Binomial, whether rounding is unbiased, who was drawn, and whose noise repeats. Neighbours are two
agents with the same keys that hold all records in common but one. Sampling (of all), coins and noise are the same, so
the answers differ by what that record may move: at most Δ∞ = ⌈(k − 1)/B⌉ in each coordinate, without chance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from fedspa.algorithms import chosen
from fedspa.algorithms.base import IntegerUpdate
from fedspa.algorithms.cpsgd.plan import BinomialPlan
from fedspa.algorithms.cpsgd.respond import dequantized, respond
from fedspa.audit import aggregation
from fedspa.audit.aggregation import Summed, few_members
from fedspa.audit.audited import Audited, Setting
from fedspa.audit.probes import (
    DIMENSION,
    INPUTS,
    WEIGHTS,
    MakeEngine,
    Probe,
    Respond,
    answers,
    certain_model,
    neighbours,
    null_records,
    replayed_keys,
    two_class_models,
)
from fedspa.audit.statistics import (
    UNBOUNDED,
    Finding,
    Floats,
    Question,
    certain,
    columns,
    cosines,
    epsilon_lower,
    law_question,
    sampler_questions,
    threshold_attack,
)
from fedspa.errors import ConfigError
from fedspa.privacy import accounting

# Of an agent's records: more cost time, and fewer are a harder case, accounted as such.
_MOST_BATCH = 32
DELTA = 0.1  # of the attack
MOST_DRAWS = 1000
SAMPLED, SILENT = 150, 200
# The finest levels there are. Both batches divide 2^16 − 1, so that ⌈(k − 1)/B⌉ rounds nothing up, and leave a record
# that weighs several times too much within the levels: beyond them it would be brought back, and not be seen.
BITS = 16
BATCHES = (17, 51)
# What the worst pair reaches of the claim, in L2: the margins of clipping (2·10⁻⁶) and rounding take less.
REACHED = 0.99


def largest_move(plan: BinomialPlan) -> int:
    """Return Δ∞, by how many levels one record moves a coordinate at most."""
    return -(-(plan.levels - 1) // plan.batch)


@dataclass(frozen=True, slots=True)
class Target:
    """`plan` is on the probe's coordinates. `sums` are attacked where the run's plan is of sums: `plan` is then what a
    member is asked for, as one sees it who colludes with all others. `claim` gives the accounted Δ∞."""

    plan: BinomialPlan
    engine: MakeEngine = Setting.make_engine
    respond: Respond[IntegerUpdate] = respond
    claim: Callable[[BinomialPlan], int] = largest_move
    sums: Summed | None = None


def of_plan(plan: BinomialPlan) -> Target:
    """Return the mechanism of a run."""
    if math.isinf(accounting.epsilon({plan.event: plan.participations}, plan.delta, neighbours=plan.neighbours)):
        raise ConfigError("there is no claim to audit: the noise is too small for any ε")
    own = replace(plan, dimension=DIMENSION, adversary="local", members=0, colluders=0)
    return Target(own, sums=None if plan.aggregation is None else _sums(plan))


def _sums(plan: BinomialPlan) -> Summed:
    """Return a cohort of the plan's members, on the probe and with few records."""
    batch, (members, colluders) = min(plan.batch, _MOST_BATCH), few_members(plan.members, plan.colluders)
    few = replace(plan, dimension=DIMENSION, batch=batch, records=batch, members=members, colluders=colluders)

    def law(shares: int) -> Any:
        """Return the law of a sum of null records: each member rounds ½ by a coin, which is one trial more."""
        return stats.binom(shares * (few.trials + 1), 0.5, loc=shares * (few.levels // 2 - 1))

    return Summed(few, chosen("cpsgd", "secure-aggregation"), law)


def questions(setting: Setting, target: Target) -> Iterator[Question]:
    """Yield all questions, in the order of the report."""
    yield from neighbour_questions(setting, target)
    yield from noise_questions(setting, target)
    yield rounding_question(setting, target)
    yield attack_question(setting, target)
    yield from sampler_of_rounds(setting, target)
    yield keys_question(setting, target)
    if target.sums is not None:
        yield from aggregation.sum_questions(setting, target.sums)


def answered(
    setting: Setting,
    target: Target,
    model: Probe,
    plan: BinomialPlan,
    agents: Sequence[tuple[Tensor, Tensor, bytes]],
    t: int = 0,
) -> NDArray[np.int64]:
    """Return the numbers of each answer, [agents, coordinates]."""
    sent = answers(setting, target, model, plan, agents, t)
    return np.stack([answer.values for answer in sent])


def neighbour_questions(setting: Setting, target: Target) -> list[Question]:
    """Compare the largest distances with those claimed, over all pairs, batches and models."""
    worst, slackest, pairs = [(0.0, 1.0)] * 3, math.inf, 0
    for model, own in two_class_models(setting.seed, partial(_fitted, target.plan)):
        for batch in BATCHES:
            fine = replace(own, bits=BITS, batch=batch, records=batch, delta=1e-3)
            key, largest = setting.key("neighbours", batch, fine.dimension), target.claim(fine)
            agents = [(x, y, key) for *pair, _ in neighbours(model, batch, setting.generator()) for x, y in pair]
            numbers = answered(setting, target, model, fine, agents)
            away = np.abs(numbers[::2] - numbers[1::2]).astype(np.float64)
            seen = (away.max(), away.sum(axis=1).max(), np.linalg.norm(away, axis=1).max())
            most = (largest, fine.dimension * largest, math.sqrt(fine.dimension) * largest * (1 + 1e-9))
            found = [(float(distance), float(claimed)) for distance, claimed in zip(seen, most)]
            worst = [max(pair, key=lambda of: of[0] / of[1]) for pair in zip(worst, found)]
            slackest = min(slackest, found[2][0] / found[2][1]) if model.full else slackest
            pairs += len(away)
    detail = f"{pairs} pairs of agents, the same keys for both"
    reached = slackest >= REACHED
    if not reached:
        detail += f"; the worst pair of one model reaches {slackest:.4g} of Δ₂ only: this test has lost its reach"
    return [
        certain(f"answer: {norm}", "levels", most, distance, detail, distance <= most and (reached or norm != "Δ₂"))
        for norm, (distance, most) in zip(("Δ∞", "Δ₁", "Δ₂"), worst)
    ]


def _fitted(plan: BinomialPlan, dimension: int, clip_value: float | None) -> BinomialPlan:
    return replace(plan, dimension=dimension, clip_value=plan.clip_value if clip_value is None else clip_value)


def noise_questions(setting: Setting, target: Target) -> list[Question]:
    """Answers of null records lie half-way between two levels: they are Binomial(m + 1, ½) above the lower one. The
    rounding's coin is one of the m + 1, and decides as much as the noise where m = 1."""
    found = []
    for what, trials in (("noise", target.plan.trials), ("coins", 1)):
        plan = replace(target.plan, batch=2, records=2, trials=trials)
        agents = [(*null_records(2), setting.key("silent", what, i)) for i in range(SILENT)]
        numbers = answered(setting, target, certain_model(), plan, agents)
        above = numbers - (plan.levels // 2 - 1)
        detail = f"distance from the law Binomial(m + 1, 1/2), in all and by coordinate; {len(numbers)} draws"
        found.append(law_question(f"answer: {what}", stats.binom(trials + 1, 0.5), [above, *above.T], detail))
        found.append(columns(f"answer: {what}, coordinates", above - (trials + 1) / 2))
    return found


def rounding_question(setting: Setting, target: Target) -> Question:
    """Values between levels, with the least noise there is: their mean over many answers is the gradient."""
    plan = replace(target.plan, batch=1, records=1, trials=1)
    x = torch.linspace(-0.5, 0.5, INPUTS) * plan.clip_value
    agents = [(*null_records(1, x), setting.key("rounding", i)) for i in range(_draws(setting))]
    sent = answered(setting, target, certain_model(), plan, agents)
    mean = dequantized(sent.mean(axis=0), plan)[:WEIGHTS]
    error = np.abs(mean - torch.cat([x, -x]).numpy().astype(np.float64)).max()
    errors = float(error) / (plan.step * math.sqrt((plan.trials + 1) / 4 / len(sent)))
    detail = f"largest error of a mean over {len(sent)} answers, in standard deviations"

    def finding(alpha: float) -> Finding:
        return Finding(float(stats.norm.isf(alpha / (2 * WEIGHTS))), errors, detail)

    return Question("answer: rounding", "deviation", finding)


def attack_question(setting: Setting, target: Target) -> Question:
    """One answer without sampling on the worst pair, distinguished by a threshold half-way."""
    batch = min(target.plan.batch, _MOST_BATCH)
    plan = replace(target.plan, batch=batch, records=batch, delta=1e-3)
    claimed = min(UNBOUNDED, accounting.epsilon({plan.event: 1}, DELTA, neighbours="replace-one"))
    direction = np.repeat([1.0, -1.0], INPUTS)

    def scores(side: str, first: float) -> Floats:
        records = null_records(batch, torch.full((INPUTS,), first))
        agents = [(*records, setting.key("attack", side, i)) for i in range(_draws(setting))]
        sent = answered(setting, target, certain_model(), plan, agents)
        found: Floats = dequantized(sent, plan)[:, :WEIGHTS] @ direction
        return found

    large = 10 * plan.clip_value
    bound = partial(epsilon_lower, DELTA)
    detail = f"threshold attack on one answer, q = 1, δ = {DELTA:g}"
    sides = scores("in", large), scores("out", -large)
    return threshold_attack("attack: ε", "epsilon", claimed, sides, 0.0, bound, detail)


def _draws(setting: Setting) -> int:
    return min(setting.draws, MOST_DRAWS)


def sampler_of_rounds(setting: Setting, target: Target) -> list[Question]:
    """Ask who was drawn, from answers in which each record moves a coordinate of its own and noise is faint."""
    batch = max(1, min(INPUTS // 2, round(INPUTS * target.plan.event.rate)))
    plan = replace(target.plan, bits=12, trials=1, batch=batch, records=INPUTS, delta=1e-3)
    x, y = 10 * plan.clip_value * torch.eye(INPUTS), torch.ones(INPUTS, dtype=torch.int64)
    drawn = np.zeros((2, SAMPLED, INPUTS), dtype=np.int64)
    for t in (0, 1):
        agents = [(x, y, setting.key("batches", i, t)) for i in range(SAMPLED)]
        sent = answered(setting, target, certain_model(), plan, agents, t)
        drawn[t] = np.rint(dequantized(sent, plan)[:, :INPUTS] / plan.clip_value * plan.batch)
    return sampler_questions("sampler", plan, drawn, "rounds")


def keys_question(setting: Setting, target: Target) -> Question:
    """Answers of null records, over agents and rounds, and once more with all public inputs the same."""
    plan = target.plan
    nothing = null_records(plan.records)
    sent = [
        answered(setting, target, certain_model(), plan, [(*nothing, key) for key in keys], t)
        for t, keys in replayed_keys(setting)
    ]
    values = np.concatenate(sent) - plan.trials / 2 - (plan.levels - 1) / 2
    return cosines("keys", values, "pairs of answers over agents, rounds and a replay")


AUDIT = Audited(
    name="cpsgd",
    of_plan=of_plan,
    questions=questions,
)
