"""The audit of cpSGD, against what its accounting assumes: one release by itself, and whole answers of agents.

Where the claim is a bound (with rotation), it is so loose that the attack on ε sees noise several times too small
only. Small faults are seen by the questions about the mechanism as accounted: how far apart neighbours are after
rounding with the same coins, whether a release of nothing is Binomial, whether rounding is unbiased, who was drawn, and
whose noise repeats.

Questions named `answer` go through `respond` and the engine of a run, which clips by itself. Neighbours are two agents
with the same keys that hold all records in common but one. Sampling (of all), coins and noise are the same, so the
answers differ by what that record may move: at most Δ∞, Δ₁ and Δ₂ of the accounting. There are so many levels that
rounding, by less than one level per coordinate, hardly shows: the bounds hold of sound code without any chance.
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
from fedspa.algorithms.cpsgd.accounting import Sensitivity, sensitivity
from fedspa.algorithms.cpsgd.plan import BinomialPlan
from fedspa.algorithms.cpsgd.release import Integers, dequantized, release
from fedspa.algorithms.cpsgd.respond import respond
from fedspa.audit import aggregation
from fedspa.audit.aggregation import Summed, few_members
from fedspa.audit.probes import (
    DIMENSION,
    INPUTS,
    SEED,
    MakeEngine,
    Probe,
    Respond,
    TwoClass,
    answers,
    certain_model,
    neighbours,
    replayed_keys,
    row_pairs,
    two_class_models,
)
from fedspa.audit.result import UNBOUNDED, Finding, Question, certain
from fedspa.audit.run import Audited, Setting
from fedspa.audit.statistics import (
    Floats,
    columns,
    cosines,
    epsilon_lower,
    law_question,
    sampler_questions,
    threshold_attack,
)
from fedspa.errors import ConfigError
from fedspa.privacy import accounting
from fedspa.randomness.streams import Stream

Release = Callable[[list[Tensor], BinomialPlan, bytes, Stream, Stream], Integers]
Claim = Callable[[BinomialPlan, float], Sensitivity]
# Of a member's records: more cost time, and fewer are a harder case, priced as such.
_MOST_BATCH = 32
# The attack's δ: 2·0.05, since a release is (ε, 2δ)-DP.
STEP_DELTA = 0.05
MOST_VALUES, MOST_DRAWS = 2_000_000, 2000
SAMPLED, SILENT = 150, 200
# The finest levels there are. Both batches divide 2^16 − 1, so that ⌈(k − 1)/B⌉ rounds nothing up, and leave a record
# that weighs several times too much within the levels: beyond them it would be brought back, and not be seen.
BITS = 16
BATCHES = (17, 51)
# What the worst pair reaches of the claim, in L2: the margins of clipping (2·10⁻⁶) and rounding take less.
REACHED = 0.99
_ROUNDING = 1 + 1e-9


@dataclass(frozen=True, slots=True)
class Target:
    """`variants` are plans that differ in clipping and rotation; the first one's sampling is audited too. `sums` are
    attacked where the plan is of sums: the variants are then what a member is asked for, as one sees it who colludes
    with all others."""

    variants: tuple[BinomialPlan, ...]
    release: Release = release
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
    batch, (members, colluders) = min(plan.batch, _MOST_BATCH), few_members(plan.members, plan.colluders)
    few = replace(plan, dimension=DIMENSION, batch=batch, records=batch, members=members, colluders=colluders)

    def law(shares: int) -> Any:
        """Of null records each member rounds ½ by a coin, which is one trial more."""
        return stats.binom(shares * (few.trials + 1), 0.5, loc=shares * (few.levels // 2 - 1))

    return Summed(few, chosen("cpsgd", "secure-aggregation"), law)


def questions(setting: Setting, target: Target) -> Iterator[Question]:
    """All questions, in the order of the report."""
    for plan in target.variants:
        yield from pair_questions(setting, target, plan)
        yield from noise_questions(setting, target, plan)
        yield rounding_question(setting, target, plan)
        yield attack_question(setting, target, plan)
        yield from neighbour_questions(setting, target, plan)
        yield from answer_noise_questions(setting, target, plan)
    yield from round_sampler_questions(setting, target)
    yield keys_question(setting, target)
    if target.sums is not None:
        yield from aggregation.sum_questions(setting, target.sums)


def pair_questions(setting: Setting, target: Target, plan: BinomialPlan) -> list[Question]:
    """Two neighbouring batches, the same coins and noise on both: how far apart the numbers are, in levels."""
    generator = setting.generator()
    turns = max(2, min(17, MOST_VALUES // (plan.batch * plan.coordinates)))
    seen = []
    for turn in range(turns):
        for row, other in row_pairs(plan, generator):
            others = torch.randn(plan.batch - 1, plan.dimension, generator=generator) * plan.clip_value
            left, right = (
                target.release([torch.cat([first[None], others])], plan, SEED, *_coins(setting, "pair", plan, turn))
                for first in (row, other)
            )
            away = np.abs(left - right)
            seen.append((float(away.sum()), math.sqrt((away**2).sum()), float(away.max())))
    most = np.max(seen, axis=0).tolist()
    detail = f"{len(seen)} pairs of batches, the same coins and noise on both"

    def within(norm: int) -> Callable[[float], Finding]:
        """Δ₁ and Δ₂ are bounds that hold together, except with chance δ for each pair."""
        return lambda alpha: Finding(target.claim(plan, alpha / len(seen))[norm], most[norm], detail)

    # Δ∞ holds without chance, whatever δ.
    largest = target.claim(plan, STEP_DELTA).largest
    return [
        certain(f"pair: Δ∞, {variant(plan)}", "levels", largest, most[2], detail),
        Question(f"pair: Δ₁, {variant(plan)}", "levels", within(0)),
        Question(f"pair: Δ₂, {variant(plan)}", "levels", within(1)),
    ]


def noise_questions(setting: Setting, target: Target, plan: BinomialPlan) -> list[Question]:
    """A release of zero gradients lies half-way between two levels: it is Binomial(m + 1, ½) above the lower one."""
    zeros, coins = [torch.zeros(plan.batch, plan.dimension)], _coins(setting, "noise", plan)
    numbers = np.stack([target.release(zeros, plan, SEED, *coins) for _ in range(_draws(setting, plan))])
    return [
        binomial_law(f"noise: law, {variant(plan)}", numbers, plan),
        columns(f"noise: coordinates, {variant(plan)}", numbers - (plan.trials + plan.levels - 1) / 2),
    ]


def binomial_law(name: str, numbers: NDArray[np.int64], plan: BinomialPlan) -> Question:
    """Draws [n, d] of what is released of nothing: Binomial(m + 1, ½) above a level, in all and in each coordinate."""
    above = numbers - (plan.levels // 2 - 1)
    detail = f"distance from the law Binomial(m + 1, 1/2), in all and by coordinate; {len(numbers)} draws"
    return law_question(name, stats.binom(plan.trials + 1, 0.5), [above, *above.T], detail)


def rounding_question(setting: Setting, target: Target, plan: BinomialPlan) -> Question:
    """Values between levels, with the least noise there is: their mean over many releases is the clipped mean."""
    coins, plan = _coins(setting, "rounding", plan), replace(plan, trials=1)
    draws = _draws(setting, plan) // 4
    rows = torch.linspace(-1, 1, plan.dimension).repeat(plan.batch, 1) * plan.clip_norm / math.sqrt(plan.dimension) / 2
    total = np.zeros(plan.dimension)
    for _ in range(draws):
        total += dequantized(target.release([rows], plan, SEED, *coins), plan, SEED)
    error = np.abs(total / draws - rows[0].numpy().astype(np.float64)).max()
    errors = float(error) / (plan.step * math.sqrt((plan.trials + 1) / 4 / draws))
    detail = f"largest error of a mean over {draws} releases, in standard deviations"

    def judge(alpha: float) -> Finding:
        return Finding(float(stats.norm.isf(alpha / (2 * plan.dimension))), errors, detail)

    return Question(f"rounding, {variant(plan)}", "deviation", judge)


def attack_question(setting: Setting, target: Target, plan: BinomialPlan) -> Question:
    """One release without sampling on the worst pair, told apart by a threshold half-way; δ = 0.1."""
    delta = 2 * STEP_DELTA
    claimed = min(
        UNBOUNDED, accounting.epsilon({replace(plan.event, records=plan.batch): 1}, delta, neighbours="replace-one")
    )
    row, other = next(row_pairs(plan, setting.generator()))
    direction = row.sign().numpy().astype(np.float64)

    def scores(side: str, first: Tensor) -> Floats:
        batch = torch.zeros(plan.batch, plan.dimension)
        batch[0] = first
        coins, draws = _coins(setting, "attack", plan, side), range(_draws(setting, plan))
        released = (target.release([batch], plan, SEED, *coins) for _ in draws)
        return np.array([dequantized(numbers, plan, SEED) @ direction for numbers in released])

    sides = scores("in", row), scores("out", other)
    detail = f"threshold attack on one release, q = 1, δ = {delta:g}"
    bound = partial(epsilon_lower, delta)
    return threshold_attack(f"attack: ε, {variant(plan)}", "epsilon", claimed, sides, 0.0, bound, detail)


def _draws(setting: Setting, plan: BinomialPlan) -> int:
    """A large model's releases cost more, and have more coordinates to look at."""
    return max(100, min(setting.draws, MOST_DRAWS, MOST_VALUES // plan.coordinates))


def _coins(setting: Setting, label: str, plan: BinomialPlan, *more: str | int) -> tuple[Stream, Stream]:
    labels = (label, variant(plan), *more)
    return setting.stream(*labels, "rounding"), setting.stream(*labels, "noise")


def answered(
    setting: Setting,
    target: Target,
    model: Probe,
    plan: BinomialPlan,
    agents: Sequence[tuple[Tensor, Tensor, bytes]],
    t: int = 0,
) -> NDArray[np.int64]:
    """The numbers of each answer, [agents, coordinates]."""
    sent = answers(setting, target, model, plan, agents, t)
    return np.stack([answer.values for answer in sent])


def _silent(records: int) -> tuple[Tensor, Tensor]:
    return torch.ones(records, INPUTS), torch.zeros(records, dtype=torch.int64)


def answer_noise_questions(setting: Setting, target: Target, plan: BinomialPlan) -> list[Question]:
    """Answers of null records are Binomial(m + 1, ½) above the lower of the two levels around zero: the rounding's coin
    is one of the m + 1, and decides as much as the noise where m = 1."""
    found = []
    for what, trials in (("noise", plan.trials), ("coins", 1)):
        silent = replace(plan, dimension=DIMENSION, batch=2, records=2, trials=trials)
        agents = [(*_silent(2), setting.key("silent", what, variant(plan), i)) for i in range(SILENT)]
        numbers = answered(setting, target, certain_model(), silent, agents)
        found.append(binomial_law(f"answer: {what}, {variant(plan)}", numbers, silent))
    return found


def round_sampler_questions(setting: Setting, target: Target) -> list[Question]:
    """Who was drawn, read off whole answers in which each record moves a coordinate of its own and noise is faint."""
    plan = target.variants[0]
    plan = replace(
        plan,
        dimension=DIMENSION,
        clip="coordinate",
        rotation=False,
        bits=12,
        trials=1,
        batch=max(1, min(INPUTS // 2, round(INPUTS * plan.event.rate))),
        records=INPUTS,
        delta=1e-3,
    )
    x, y = 10 * plan.clip_value * torch.eye(INPUTS), torch.ones(INPUTS, dtype=torch.int64)
    drawn = np.zeros((2, SAMPLED, INPUTS), dtype=np.int64)
    for t in (0, 1):
        agents = [(x, y, setting.key("batches", i, t)) for i in range(SAMPLED)]
        numbers = answered(setting, target, certain_model(), plan, agents, t)
        shares = np.stack([dequantized(row, plan, SEED)[:INPUTS] for row in numbers]) / plan.clip_value
        drawn[t] = np.rint(shares * plan.batch)
    return sampler_questions("sampler", plan, drawn, "rounds")


def keys_question(setting: Setting, target: Target) -> Question:
    """Answers of null records, over agents and rounds, and once more with all public inputs the same."""
    plan = replace(target.variants[0], dimension=DIMENSION, clip="coordinate", rotation=False)
    nothing = _silent(max(plan.records, plan.batch))
    sent = [
        answered(setting, target, certain_model(), plan, [(*nothing, key) for key in keys], t)
        for t, keys in replayed_keys(setting)
    ]
    values = np.concatenate(sent) - plan.trials / 2 - (plan.levels - 1) / 2
    return cosines("keys", values, "pairs of answers over agents, rounds and a replay")


def neighbour_questions(setting: Setting, target: Target, plan: BinomialPlan) -> list[Question]:
    """The distances that come nearest to what is claimed, over all pairs, batches and models."""
    worst, slackest, pairs = [(0.0, 1.0)] * 3, math.inf, 0
    for model, own in two_class_models(setting.seed, partial(_fitted, plan)):
        for batch in BATCHES:
            fine = replace(own, bits=BITS, batch=batch, records=batch, delta=1e-3)
            away = np.abs(_differences(setting, target, model, fine)).astype(np.float64)
            seen = (away.max(), away.sum(axis=1).max(), np.linalg.norm(away, axis=1).max())
            found = [(float(distance), most) for distance, most in zip(seen, most_apart(target, fine))]
            worst = [max(pair, key=lambda of: of[0] / of[1]) for pair in zip(worst, found)]
            if model.full or fine.clip == "l2":
                slackest = min(slackest, found[2][0] / found[2][1])
            pairs += len(away)
    detail = f"{pairs} pairs of agents, the same keys for both"
    lost = f"; the worst pair of one model reaches {slackest:.4g} of Δ₂ only: this test has lost its reach"
    questions = []
    for norm, (distance, most) in zip(("Δ∞", "Δ₁", "Δ₂"), worst):
        sees = norm != "Δ₂" or slackest >= REACHED
        told = detail if sees else detail + lost
        name = f"answer: {norm}, {variant(plan)}"
        questions.append(certain(name, "levels", most, distance, told, distance <= most and sees))
    return questions


def most_apart(target: Target, plan: BinomialPlan) -> tuple[float, float, float]:
    """Δ∞, Δ₁, Δ₂ without chance: r and √d·r before rounding, which moves each coordinate by less than a level more.

    The claim at δ = 1, which leaves least to chance, is larger than that at so many levels, or free of chance (without
    rotation, where d·Δ∞ bounds it); where a claim is smaller than it should be, the claim counts.
    """
    l1, l2, largest = target.claim(plan, 1.0)
    r, d = 2 * plan.clip_norm / (plan.batch * plan.step), plan.coordinates
    # A pair may reach its claim to the last bit: `_ROUNDING` is above that of the few operations on either side.
    return largest, min(l1, math.sqrt(d) * r + d) * _ROUNDING, min(l2, r + math.sqrt(d)) * _ROUNDING


def _fitted(plan: BinomialPlan, dimension: int, clip_value: float | None) -> BinomialPlan:
    plan = replace(plan, dimension=dimension)
    return plan if clip_value is None else replace(plan, clip_value=clip_value)


def _differences(setting: Setting, target: Target, model: TwoClass, plan: BinomialPlan) -> NDArray[np.int64]:
    """Of the answers of each pair of agents, [pairs, coordinates]."""
    key = setting.key("neighbours", plan.clip, plan.batch, plan.dimension)
    agents = [(x, y, key) for *pair, _ in neighbours(model, plan.batch, setting.generator()) for x, y in pair]
    numbers = answered(setting, target, model, plan, agents)
    apart: NDArray[np.int64] = numbers[::2] - numbers[1::2]
    return apart


AUDIT = Audited(
    name="cpsgd",
    choices={},
    synthetic=synthetic,
    of_plan=of_plan,
    questions=questions,
)
