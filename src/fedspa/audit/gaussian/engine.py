"""Whole local training by a real engine, on data that turns an update into a window on the mechanism.

The model is the probe's. Steps are so small that it stays where it is: an update over −lr·scale is then the sum of the
τ releases.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from fedspa.audit.bounds import mu_lower
from fedspa.audit.gaussian.release import q_one
from fedspa.audit.gaussian.target import FAINT, Target
from fedspa.audit.probe import DIMENSION, INPUTS, SEED, WEIGHTS, answers, certain_model, replayed_keys
from fedspa.audit.questions import (
    Floats,
    columns,
    cosines,
    law_question,
    noise_size,
    sampler_questions,
    threshold_attack,
)
from fedspa.audit.result import UNBOUNDED, Question, certain
from fedspa.audit.setting import Setting
from fedspa.mechanisms.gaussian.plan import GaussianPlan
from fedspa.randomness.mask import layered_coordinates

ACTIVE = 48
# The mask is of weights only: float32 does not show small steps of a bias that is large.
LAYERS = ((WEIGHTS, ACTIVE), (2, 0))
# Updates travel as float32: what the pair test may be off by.
TOLERANCE = 1e-5
STEPS = 4
MOST_DRAWS = 400
SAMPLED_TASKS = 150


def _releases(
    setting: Setting,
    target: Target,
    plan: GaussianPlan,
    records: tuple[Tensor, Tensor],
    keys: Sequence[bytes],
    t: int = 0,
) -> Floats:
    """The sum of the τ releases in each update, [keys, k] in gradient units: one agent for each key."""
    return _of_agents(setting, target, plan, [(*records, key) for key in keys], t)[0]


def _of_agents(
    setting: Setting, target: Target, plan: GaussianPlan, agents: Sequence[tuple[Tensor, Tensor, bytes]], t: int = 0
) -> tuple[Floats, list[bytes]]:
    """The same of agents with these records x, y and keys, and the seed that each names as its mask's."""
    scale = plan.dimension / plan.active
    rate = 1e-6 / (scale * max(plan.sigma, plan.clip_norm / plan.batch))
    layers = LAYERS if plan.active < DIMENSION else None
    updates = answers(setting, target, certain_model(), plan, agents, t, rate, layers)
    values = np.stack([update.values for update in updates]).astype(np.float64) / (-rate * scale)
    return values, [update.mask_seed for update in updates]


def _probe_plan(plan: GaussianPlan) -> GaussianPlan:
    """The plan's clipping, noise, batch and sampling, on the probe's coordinates."""
    return replace(plan, dimension=DIMENSION, active=ACTIVE, local_steps=1)


def _records(plan: GaussianPlan, first: float | None) -> tuple[Tensor, Tensor]:
    """m records: the first of label 1 with x = first·(1, …, 1), or all of them null."""
    x, y = torch.ones(plan.records, INPUTS), torch.zeros(plan.records, dtype=torch.int64)
    if first is not None:
        x[0], y[0] = first, 1
    return x, y


def _pair(plan: GaussianPlan) -> tuple[float, float | None]:
    """The worst record, and what is in its place under the plan's relation."""
    large = 10 * plan.clip_norm
    return large, None if plan.neighbours == "add-remove" else -large


def _engine(setting: Setting, target: Target) -> str:
    model = certain_model()
    return f"engine {target.engine(setting, model.module, model.shape).name}"


def pair_question(setting: Setting, target: Target, plan: GaussianPlan) -> Question:
    """One step of the engine on worst neighbours with the same key: the distance without chance."""
    plan = _probe_plan(q_one(plan))
    claimed, key = target.claimed_mu(plan), setting.key("engine pair")
    worst, other = _pair(plan)
    right = _releases(setting, target, plan, _records(plan, other), [key])
    distances = []
    for first in (worst, 1e30, 3e38, math.inf, math.nan):
        left = _releases(setting, target, plan, _records(plan, first), [key])
        distances.append(float(np.linalg.norm((left - right) / plan.sigma)))
    distance = max(distances) if not any(map(math.isnan, distances)) else UNBOUNDED
    # With a private clip the gradients are only a part of the distance; the count does not leave in the update.
    reach = plan.noise_multiplier / plan.gradient_noise_multiplier
    holds = claimed * reach * (1 - TOLERANCE) <= distance <= claimed * (1 + TOLERANCE)
    detail = f"{_engine(setting, target)}: one update, worst and extreme records, k = {ACTIVE} of {DIMENSION}"
    return certain(f"engine: pair, {plan.neighbours}", "mu", claimed, distance, detail, holds)


def mu_question(setting: Setting, target: Target, plan: GaussianPlan) -> Question:
    """The threshold attack on updates. Batches of two: further records only cost time."""
    plan = _probe_plan(q_one(replace(plan, batch=min(2, plan.batch))))
    worst, other = _pair(plan)
    direction = np.where(layered_coordinates(SEED, LAYERS) < INPUTS, 1.0, -1.0) / math.sqrt(ACTIVE) / plan.sigma

    def scores(side: str, first: float | None) -> Floats:
        draws = range(min(setting.draws, MOST_DRAWS))
        keys = [setting.key("engine", plan.neighbours, side, i) for i in draws]
        return _releases(setting, target, plan, _records(plan, first), keys) @ direction

    sides = scores("in", worst), scores("out", other)
    middle = 0.0 if plan.neighbours == "replace-one" else 0.5 / plan.noise_multiplier
    detail = f"{_engine(setting, target)}: threshold attack on one update, q = 1"
    claimed = target.claimed_mu(plan)
    return threshold_attack(f"engine: μ, {plan.neighbours}", "mu", claimed, sides, middle, mu_lower, detail)


def mask_question(setting: Setting, target: Target) -> Question:
    """Agents with one record each, which pulls at two weights: an update moves where its mask has these, and nowhere
    else, and the mask is the one that was announced. One that the records choose tells of them without any noise."""
    plan = _probe_plan(replace(target.plan, batch=1, records=1, clip_rule="given"))
    key, one = setting.key("engine mask"), torch.ones(1, dtype=torch.int64)
    pulls = 10 * plan.clip_norm * torch.eye(INPUTS)
    agents = [(*_records(plan, None), key), *((pull[None], one, key) for pull in pulls)]
    values, seeds = _of_agents(setting, target, plan, agents)
    moved = np.abs(values[1:] - values[0]) > TOLERANCE * plan.clip_norm / plan.batch
    wanted = layered_coordinates(SEED, LAYERS) % INPUTS == np.arange(INPUTS)[:, None]
    wrong = int((moved != wanted).sum()) + sum(seed != SEED for seed in seeds)
    detail = f"{_engine(setting, target)}: values off the mask's places, or masks of another seed, of {len(agents)}"
    return certain("engine: mask", "count", 0.0, float(wrong), detail)


def noise_questions(setting: Setting, target: Target) -> list[Question]:
    """Updates of null records, agent by agent and round by round, and once more with other private keys.

    Noise that is shared between agents or rounds would repeat within a turn; noise shared by the steps of one update
    would make it √τ too large. Updates of a single step say more of its law; of two records one is expected in a batch,
    so that a Poisson sample is empty once in four times, and has noise none the less.
    """
    # A private clip, and with it the noise, would move from step to step.
    plan = replace(_probe_plan(target.plan), local_steps=STEPS, clip_rule="given")
    nothing = _records(plan, None)
    turns = [_releases(setting, target, plan, nothing, keys, t) for t, keys in replayed_keys(setting)]
    values = np.concatenate(turns) / (plan.sigma * math.sqrt(STEPS))
    few = replace(plan, local_steps=1, batch=1, records=2)
    keys = [setting.key("engine noise", i) for i in range(min(setting.draws, MOST_DRAWS))]
    single = _releases(setting, target, few, _records(few, None), keys) / few.sigma
    name = _engine(setting, target)
    detail = f"{name}: {len(values)} updates of {STEPS} steps, {len(single)} of one on few records"
    groups = [np.concatenate([values, single]), values, single, *single.T]
    return [
        noise_size("engine: noise", target.claimed_mu(plan), groups, detail),
        law_question(
            "engine: law", stats.norm, [single], f"{name}: distance from the normal law, {single.size} values"
        ),
        columns("engine: coordinates", single),
        cosines("engine: keys", values, "pairs of updates over agents, rounds and a replay"),
    ]


def update_sampler_questions(setting: Setting, target: Target) -> list[Question]:
    """Who was drawn, read off updates of two steps in which each record moves a coordinate of its own. The noise is
    faint: who was drawn does not depend on it."""
    plan = replace(
        target.plan,
        dimension=DIMENSION,
        active=DIMENSION,
        clip="coordinate",
        clip_rule="given",
        batch=max(1, min(INPUTS // 2, round(INPUTS * target.plan.event.rate))),
        records=INPUTS,
        local_steps=2,
        noise_multiplier=FAINT,
    )
    everyone = 10 * plan.clip_norm * torch.eye(INPUTS), torch.ones(INPUTS, dtype=torch.int64)
    keys = [setting.key("engine batches", i) for i in range(SAMPLED_TASKS)]
    sums = _releases(setting, target, plan, everyone, keys)[:, :INPUTS] * (plan.batch / plan.clip_value)
    return sampler_questions("engine", plan, np.rint(sums).astype(np.int64)[None])
