"""cpSGD's release by itself: the arithmetic after the gradients, which can be fed with any row."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from fedspa.audit.binomial.target import Target, variant
from fedspa.audit.bounds import epsilon_lower
from fedspa.audit.probe import SEED
from fedspa.audit.questions import Floats, columns, law_question, threshold_attack
from fedspa.audit.result import UNBOUNDED, Finding, Question, certain
from fedspa.audit.rows import row_pairs
from fedspa.audit.setting import Setting
from fedspa.mechanisms.binomial.plan import BinomialPlan
from fedspa.mechanisms.binomial.release import dequantized
from fedspa.privacy.accounting import epsilon
from fedspa.randomness.streams import Stream

# The attack's δ: 2·0.05, since a release is (ε, 2δ)-DP.
STEP_DELTA = 0.05
MOST_VALUES, MOST_DRAWS = 2_000_000, 2000


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
    claimed = min(UNBOUNDED, epsilon({replace(plan.event, records=plan.batch): 1}, delta, neighbours="replace-one"))
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
