"""cpSGD's whole answers, of an agent whose records say nothing or who they are: noise, sampler and keys.

The probe is a two-class linear model that is certain of label 0: a record of label 0 has no gradient, one of label 1
has ±x. Answers are made as in a run, by the engine that a run would take.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedspa.algorithms import Agent, Terms
from fedspa.audit.batches import overlap_check, shares_check, sizes_check
from fedspa.audit.cpsgd_setting import SEED, CpsgdSetting, CpsgdTarget
from fedspa.audit.noise import binomial_law, cosines
from fedspa.audit.result import Check
from fedspa.mechanism.quantize import dequantized
from fedspa.mechanism.streams import agent_key
from fedspa.privacy.binomial_plan import BinomialPlan
from fedspa.wire.integers import IntegerUpdate

INPUTS, CERTAIN = 32, 500.0
AGENTS, ROUNDS = 6, 6
SAMPLED, SILENT = 150, 200


def answer_noise_checks(
    setting: CpsgdSetting, target: CpsgdTarget, plan: BinomialPlan, name: str, alpha: float
) -> list[Check]:
    """Answers of null records are Binomial(m + 1, ½) above the lower of the two levels around zero: the rounding's coin
    is one of the m + 1, and decides as much as the noise where m = 1."""
    who = _Probe(torch.ones(2, INPUTS), torch.zeros(2, dtype=torch.int64))
    checks = []
    for what, trials in (("noise", plan.trials), ("coins", 1)):
        silent = replace(plan, dimension=2 * INPUTS + 2, batch=2, records=2, trials=trials)
        keys = [setting.key("silent", what, name, i) for i in range(SILENT)]
        numbers = np.stack(who.answers(setting, target, silent, 0, keys)) - (plan.levels // 2 - 1)
        checks.append(binomial_law(f"answer: {what}, {name}", numbers, trials, alpha))
    return checks


def sampler_checks(setting: CpsgdSetting, target: CpsgdTarget, alpha: float) -> list[Check]:
    """Who was drawn, read off whole answers in which each record moves a coordinate of its own and noise is faint."""
    plan = setting.variants[0]
    batch = max(1, min(INPUTS // 2, round(INPUTS * plan.event.rate)))
    plan = replace(
        plan,
        dimension=2 * INPUTS + 2,
        clip="coordinate",
        rotation=False,
        bits=12,
        trials=1,
        batch=batch,
        records=INPUTS,
        delta=1e-3,
    )
    who = _Probe(10 * plan.clip_value * torch.eye(INPUTS), torch.ones(INPUTS, dtype=torch.int64))
    drawn = np.zeros((2, SAMPLED, INPUTS), dtype=np.int64)
    for t in (0, 1):
        answers = who.answers(setting, target, plan, t, [setting.key("batches", i, t) for i in range(SAMPLED)])
        shares = np.stack([dequantized(numbers, plan, SEED)[:INPUTS] for numbers in answers]) / plan.clip_value
        drawn[t] = np.rint(shares * batch)
    both = int((drawn[0] & drawn[1]).sum())
    return [
        sizes_check("sampler: batch sizes", plan, drawn.sum(axis=2).ravel(), 1, alpha),
        shares_check("sampler: records", plan, drawn.sum(axis=(0, 1)), 2 * SAMPLED, alpha),
        overlap_check("sampler: rounds", plan, both, SAMPLED, alpha),
    ]


def keys_check(setting: CpsgdSetting, target: CpsgdTarget, alpha: float) -> Check:
    """Answers of null records, over agents and rounds, and once more with all public inputs the same."""
    plan = replace(setting.variants[0], dimension=2 * INPUTS + 2, clip="coordinate", rotation=False)
    records = max(plan.records, plan.batch)
    who = _Probe(torch.ones(records, INPUTS), torch.zeros(records, dtype=torch.int64))
    values = [
        numbers - plan.trials / 2 - (plan.levels - 1) / 2
        for turn in (1, 2)
        for t in range(ROUNDS)
        for numbers in who.answers(
            setting, target, plan, t, [agent_key(setting.key("turn", turn), t, i) for i in range(AGENTS)]
        )
    ]
    return cosines("keys", np.stack(values), alpha, "pairs of answers over agents, rounds and a replay")


@dataclass(frozen=True, slots=True)
class _Probe:
    """A two-class linear model that is certain of label 0: such a record has no gradient, one of label 1 has ±x."""

    x: Tensor
    y: Tensor

    def answers(
        self, setting: CpsgdSetting, target: CpsgdTarget, plan: BinomialPlan, t: int, keys: list[bytes]
    ) -> list[NDArray[np.int64]]:
        module = nn.Sequential(nn.Flatten(), nn.Linear(INPUTS, 2))
        theta = torch.zeros(plan.dimension)
        theta[2 * INPUTS], theta[2 * INPUTS + 1] = CERTAIN, -CERTAIN
        agents = [Agent(i, self.x, self.y, SEED, key, setting.exact) for i, key in enumerate(keys)]
        engine = setting.make_engine(module, (INPUTS,))
        answers = list(target.respond(theta, terms_of(plan, t), agents, engine))
        return [answer.numbers for answer in answers if isinstance(answer, IntegerUpdate)]


def terms_of(plan: BinomialPlan, t: int) -> Terms:
    """The terms of round t."""
    return Terms(t, plan.dimension, plan.dimension, "shared", SEED, "fixed", plan.batch, 1, 1.0, plan)
