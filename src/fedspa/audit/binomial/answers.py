"""Whole answers of agents: their noise, sampler and keys, and how far apart the answers of neighbours are.

The engine of a run clips here, and no function of `mechanisms`. Neighbours are two agents with the same keys that hold
all records in common but one. Sampling (of all), coins and noise are the same, so the answers differ by what that
record may move: at most Δ∞, Δ₁ and Δ₂ of `binomial.bound`. There are so many levels that rounding, by less than one
level per coordinate, hardly shows: the bounds hold of sound code without any chance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedspa.audit.binomial.release import binomial_law
from fedspa.audit.binomial.target import Target, variant
from fedspa.audit.neighbours import TwoClass, neighbours, two_class_models
from fedspa.audit.probe import DIMENSION, INPUTS, SEED, Probe, answers, certain_model, replayed_keys
from fedspa.audit.questions import cosines, sampler_questions
from fedspa.audit.result import Question, certain
from fedspa.audit.setting import Setting
from fedspa.mechanisms.binomial.plan import BinomialPlan
from fedspa.mechanisms.binomial.release import dequantized

SAMPLED, SILENT = 150, 200
# The finest levels there are. Both batches divide 2^16 − 1, so that ⌈(k − 1)/B⌉ rounds nothing up, and leave a record
# that weighs several times too much within the levels: beyond them it would be brought back, and not be seen.
BITS = 16
BATCHES = (17, 51)
# What the worst pair reaches of the claim, in L2: the margins of clipping (2·10⁻⁶) and rounding take less.
REACHED = 0.99
_ROUNDING = 1 + 1e-9


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


def noise_questions(setting: Setting, target: Target, plan: BinomialPlan) -> list[Question]:
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
