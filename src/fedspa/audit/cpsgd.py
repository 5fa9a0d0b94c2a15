"""The audit of cpSGD: its release and its whole answer, against what `privacy.binomial` assumes of them.

Where the claim is a bound (with rotation), it is so loose that the attack on ε sees noise several times too small
only. What sees small faults are the questions about the mechanism as accounted: how far apart neighbours are after
rounding with the same coins, whether a release of nothing is Binomial, whether rounding is unbiased, who was drawn, and
whose noise repeats. Questions named `answer` put them to `respond` and the engine of a run, which clips by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from fedspa.audit.bounds import epsilon_lower
from fedspa.audit.cpsgd_answers import answer_noise_checks, keys_check, sampler_checks
from fedspa.audit.cpsgd_neighbours import answer_checks
from fedspa.audit.cpsgd_setting import SEED, CpsgdSetting, CpsgdTarget, bounded
from fedspa.audit.noise import binomial_law, cosines
from fedspa.audit.pairs import HUGE
from fedspa.audit.result import Check, Report
from fedspa.mechanism.quantize import dequantized
from fedspa.mechanism.streams import Stream
from fedspa.privacy.accounting import epsilon
from fedspa.privacy.binomial_plan import BinomialPlan

# The attack's δ: 2·0.05, since a release is (ε, 2δ)-DP.
STEP_DELTA = 0.05
MOST_VALUES, MOST_DRAWS = 2_000_000, 2000
# Of chance: pair (two), noise (two), rounding, attack, answer (two); sampler (three) and keys.
QUESTIONS_A_VARIANT, QUESTIONS = 8, 4


def audit(setting: CpsgdSetting, target: CpsgdTarget) -> Report:
    """Attack the target. Holds on a sound mechanism except with chance `setting.false_alarm`, by the union bound."""
    alpha = setting.false_alarm / (QUESTIONS + QUESTIONS_A_VARIANT * len(setting.variants))
    checks: list[Check] = []
    for plan in setting.variants:
        name = f"{plan.clip}, rotated" if plan.rotation else plan.clip
        checks += pair_checks(setting, target, plan, name, alpha)
        checks += noise_checks(setting, target, plan, name, alpha)
        checks.append(rounding_check(setting, target, plan, name, alpha))
        checks.append(attack_check(setting, target, plan, name, alpha))
        checks += answer_checks(setting, target, plan, name)
        checks += answer_noise_checks(setting, target, plan, name, alpha)
    checks += sampler_checks(setting, target, alpha)
    checks.append(keys_check(setting, target, alpha))
    notes = ("seeded noise is a function of run.seed: whoever knows the seed can subtract it; not tested here",)
    return Report(tuple(checks), setting.false_alarm, notes if setting.noise_mode == "seeded" else ())


def worst_rows(plan: BinomialPlan, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """(an example, what replaces it): on the bound and against each other, beyond it, broken, random."""
    d = plan.dimension
    signs = torch.randint(0, 2, (d,), generator=generator) * 2.0 - 1
    on_bound = signs * plan.clip_norm / math.sqrt(d)
    yield on_bound, -on_bound
    yield HUGE * on_bound, -HUGE * on_bound
    yield HUGE * torch.randn(d, generator=generator), -on_bound
    yield on_bound, torch.full((d,), math.nan)
    yield torch.where(torch.arange(d) == 0, math.inf, on_bound), -on_bound
    yield torch.randn(d, generator=generator) * plan.clip_value, torch.randn(d, generator=generator)


def pair_checks(setting: CpsgdSetting, target: CpsgdTarget, plan: BinomialPlan, name: str, alpha: float) -> list[Check]:
    """Two neighbouring batches, the same coins and noise on both: how far apart the numbers are, in levels."""
    generator = torch.Generator().manual_seed(setting.seed)
    turns = max(2, min(25, MOST_VALUES // (plan.batch * plan.coordinates)))
    seen, pairs = np.zeros(3), 0
    for turn in range(turns):
        for row, other in worst_rows(plan, generator):
            others = torch.randn(plan.batch - 1, plan.dimension, generator=generator) * plan.clip_value
            numbers = [
                target.release([torch.cat([first[None], others])], plan, SEED, *_coins(setting, "pair", name, turn))
                for first in (row, other)
            ]
            away = np.abs(numbers[0] - numbers[1])
            seen = np.maximum(seen, [away.sum(), math.sqrt((away**2).sum()), away.max()])
            pairs += 1
    # Δ₁ and Δ₂ hold together but for δ a pair; Δ∞ without chance.
    l1, l2, largest = target.claim(plan, alpha / pairs)
    detail = f"{pairs} pairs of batches, the same coins and noise on both"
    return [
        bounded(f"pair: Δ∞, {name}", "levels", largest, float(seen[2]), 1.0, detail),
        bounded(f"pair: Δ₁, {name}", "levels", l1, float(seen[0]), 1 - alpha, detail),
        bounded(f"pair: Δ₂, {name}", "levels", l2, float(seen[1]), 1 - alpha, detail),
    ]


def noise_checks(
    setting: CpsgdSetting, target: CpsgdTarget, plan: BinomialPlan, name: str, alpha: float
) -> list[Check]:
    """A release of zero gradients lies half-way between two levels: it is Binomial(m + 1, ½) above the lower one."""
    draws = _draws(setting, plan)
    zeros = [torch.zeros(plan.batch, plan.dimension)]
    coins = _coins(setting, "noise", name)
    numbers = np.stack([target.release(zeros, plan, SEED, *coins) for _ in range(draws)]) - (plan.levels // 2 - 1)
    centred = (numbers - (plan.trials + 1) / 2).astype(np.float64)[:, :256]
    return [
        binomial_law(f"noise: law, {name}", numbers, plan.trials, alpha),
        cosines(f"noise: coordinates, {name}", centred.T, alpha, "pairs of coordinates"),
    ]


def rounding_check(setting: CpsgdSetting, target: CpsgdTarget, plan: BinomialPlan, name: str, alpha: float) -> Check:
    """Values between levels, with the least noise there is: their mean over many releases is the clipped mean."""
    plan = replace(plan, trials=1)
    draws = _draws(setting, plan) // 4
    rows = torch.linspace(-1, 1, plan.dimension).repeat(plan.batch, 1) * plan.clip_norm / math.sqrt(plan.dimension) / 2
    coins = _coins(setting, "rounding", name)
    total = np.zeros(plan.dimension)
    for _ in range(draws):
        total += dequantized(target.release([rows], plan, SEED, *coins), plan, SEED)
    error = np.abs(total / draws - rows[0].numpy().astype(np.float64)).max()
    deviation = plan.step * math.sqrt((plan.trials + 1) / 4 / draws)
    allowed = float(stats.norm.isf(alpha / (2 * plan.dimension)))
    detail = f"largest error of a mean over {draws} releases, in standard deviations"
    return bounded(f"rounding, {name}", "deviation", allowed, float(error) / deviation, 1 - alpha, detail)


def attack_check(setting: CpsgdSetting, target: CpsgdTarget, plan: BinomialPlan, name: str, alpha: float) -> Check:
    """One release without sampling on the worst pair, told apart by a threshold half-way; δ = 0.1."""
    every = replace(plan.event, records=plan.batch)
    claimed = epsilon({every: 1}, 2 * STEP_DELTA, neighbours="replace-one")
    generator = torch.Generator().manual_seed(setting.seed)
    row, other = next(worst_rows(plan, generator))
    draws = _draws(setting, plan)
    direction = row.sign().numpy().astype(np.float64)
    counts = []
    for side, first in (("in", row), ("out", other)):
        batch = torch.zeros(plan.batch, plan.dimension)
        batch[0] = first
        coins = _coins(setting, "attack", name, side)
        seen = [dequantized(target.release([batch], plan, SEED, *coins), plan, SEED) @ direction for _ in range(draws)]
        counts.append(int((np.array(seen) > 0).sum()))
    bound = epsilon_lower(counts[0], counts[1], draws, 2 * STEP_DELTA, alpha)
    detail = f"threshold attack on one release, q = 1, δ = {2 * STEP_DELTA:g}, {draws} draws a side"
    return bounded(f"attack: ε, {name}", "epsilon", claimed, bound, 1 - alpha, detail)


def _draws(setting: CpsgdSetting, plan: BinomialPlan) -> int:
    """A large model's releases cost more, and have more coordinates to look at."""
    return max(100, min(setting.draws, MOST_DRAWS, MOST_VALUES // plan.coordinates))


def _coins(setting: CpsgdSetting, *labels: str | int) -> tuple[Stream, Stream]:
    return setting.stream(*labels, "rounding"), setting.stream(*labels, "noise")
