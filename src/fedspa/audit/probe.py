"""Whole local training by a real engine, on data that turns an update into a window on the mechanism.

The probe is a two-class linear model whose bias makes every label 0 certain: a record of label 0 has a gradient of
exactly zero, one of label 1 has ±x on the two rows of weights, of a size that clipping decides. Steps are so small that
the model stays where it is. An update over −lr·scale is then the sum of the τ releases.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedspa.audit.batches import overlap_check, shares_check, sizes_check
from fedspa.audit.bounds import mu_lower
from fedspa.audit.noise import cosines, limits
from fedspa.audit.pairs import q_one
from fedspa.audit.result import UNBOUNDED, Check
from fedspa.audit.setting import Setting
from fedspa.audit.target import Target
from fedspa.engine.task import Engine, LocalTask
from fedspa.mechanism.streams import agent_key, derive_key
from fedspa.privacy.plan import Plan

INPUTS = 32
ACTIVE = 48
WEIGHTS = 2 * INPUTS
DIMENSION = WEIGHTS + 2
CERTAIN = 500.0
# Updates travel as float32: what the pair test may be off by.
TOLERANCE = 1e-5
AGENTS, ROUNDS, STEPS = 6, 6, 4
MOST_DRAWS = 400
SAMPLED_TASKS = 150
# Noise so small that an update shows who was drawn; who was drawn does not depend on it.
FAINT = 2.0**-12


@dataclass(frozen=True)
class Probe:
    """An engine with the probe's model, θ and a mask of weights."""

    engine: Engine
    theta: Tensor
    coordinates: Tensor
    exact: bool

    def releases(self, plan: Plan, x: Tensor, y: Tensor, keys: Sequence[bytes], mask: Tensor | None) -> Tensor:
        """The sum of the τ releases in each update, [keys, k] in gradient units: one task for each key."""
        scale = plan.dimension / plan.active
        rate = 1e-6 / (scale * max(plan.sigma, plan.clip_norm / plan.batch))
        task = LocalTask(
            x, y, mask, scale, plan.sampling, plan.batch, plan.local_steps, rate, plan, b"", exact=self.exact
        )
        results = self.engine.train(self.theta, [replace(task, key=key) for key in keys])
        return torch.stack([result.delta.to("cpu", torch.float64) for result in results]) / (-rate * scale)


def make_probe(setting: Setting, target: Target) -> Probe:
    module = nn.Sequential(nn.Flatten(), nn.Linear(INPUTS, 2))
    theta = torch.zeros(DIMENSION)
    theta[WEIGHTS], theta[WEIGHTS + 1] = CERTAIN, -CERTAIN
    generator = torch.Generator().manual_seed(setting.seed)
    coordinates = torch.randperm(WEIGHTS, generator=generator)[:ACTIVE].sort().values
    return Probe(target.engine(module, (INPUTS,)), theta, coordinates, setting.exact)


def probe_plan(plan: Plan) -> Plan:
    """The plan's clipping, noise, batch and sampling, on the probe's coordinates."""
    return replace(plan, dimension=DIMENSION, active=ACTIVE, local_steps=1)


def _records(plan: Plan, first: float | None) -> tuple[Tensor, Tensor]:
    """m records: the first of label 1 with x = first·(1, …, 1), or all of them null."""
    x, y = torch.ones(plan.records, INPUTS), torch.zeros(plan.records, dtype=torch.int64)
    if first is not None:
        x[0], y[0] = first, 1
    return x, y


def _pair(probe: Probe, plan: Plan) -> tuple[float, float | None, Tensor]:
    """The worst record, what is in its place under the plan's relation, and the direction of its gradient."""
    large = 10 * plan.clip_norm
    signs = torch.where(probe.coordinates < INPUTS, 1.0, -1.0).to(torch.float64)
    return large, None if plan.neighbours == "add-remove" else -large, signs / math.sqrt(ACTIVE)


def engine_pair_check(setting: Setting, target: Target, probe: Probe, plan: Plan) -> Check:
    """One step of the engine on worst neighbours with the same key: the distance without chance."""
    plan = probe_plan(q_one(plan))
    claimed, key = target.claimed_mu(plan), derive_key(setting.root, "audit", "engine pair")
    worst, other, _ = _pair(probe, plan)
    distances = []
    for first, instead in ((worst, other), *((extreme, other) for extreme in (1e30, 3e38, math.inf, math.nan))):
        left, right = (
            probe.releases(plan, *_records(plan, which), [key], probe.coordinates)[0] for which in (first, instead)
        )
        distances.append(float(((left - right) / plan.sigma).norm()))
    distance = max(distances) if not any(map(math.isnan, distances)) else UNBOUNDED
    # With a private clip the gradients are only a part of the distance; the count does not leave in the update.
    reach = plan.noise_multiplier / plan.gradient_noise_multiplier
    holds = claimed * reach * (1 - TOLERANCE) <= distance <= claimed * (1 + TOLERANCE)
    detail = f"engine {probe.engine.name}: one update, worst and extreme records, k = {ACTIVE} of {DIMENSION}"
    return Check(f"engine: pair, {plan.neighbours}", "mu", claimed, distance, 1.0, holds, detail)


def engine_mu_check(setting: Setting, target: Target, probe: Probe, plan: Plan, alpha: float) -> Check:
    """The threshold attack of `attacks.py` on updates. Batches of two: further records only cost time."""
    plan = probe_plan(q_one(replace(plan, batch=min(2, plan.batch))))
    claimed, draws = target.claimed_mu(plan), min(setting.draws, MOST_DRAWS)
    worst, other, direction = _pair(probe, plan)
    counts = []
    for side, first in (("in", worst), ("out", other)):
        keys = [derive_key(setting.root, "audit", "engine", plan.neighbours, side, i) for i in range(draws)]
        seen = probe.releases(plan, *_records(plan, first), keys, probe.coordinates) @ direction / plan.sigma
        middle = 0.0 if plan.neighbours == "replace-one" else 0.5 / plan.noise_multiplier
        counts.append(int((seen > middle).sum()))
    bound = mu_lower(counts[0], counts[1], draws, alpha)
    detail = f"engine {probe.engine.name}: threshold attack on one update, q = 1, {draws} draws a side"
    return Check(f"engine: μ, {plan.neighbours}", "mu", claimed, bound, 1 - alpha, bound <= claimed, detail)


def engine_noise_checks(setting: Setting, target: Target, probe: Probe, alpha: float) -> list[Check]:
    """Updates of null records, agent by agent and round by round, and once more with other private keys.

    All public inputs of the second turn equal those of the first. Noise that a public number decides would repeat;
    noise that is shared between agents or rounds would repeat within a turn; noise shared by the steps of one update
    would make it √τ too large.
    """
    plan = replace(probe_plan(setting.plan), local_steps=STEPS)
    if plan.clip_rule == "quantile":
        # The clip, and with it the noise, would move from step to step.
        plan = replace(plan, clip_rule="given")
    x, y = _records(plan, None)
    turns = [
        probe.releases(
            plan,
            x,
            y,
            [
                agent_key(derive_key(setting.root, "audit", "turn", turn), t, i)
                for t in range(ROUNDS)
                for i in range(AGENTS)
            ],
            probe.coordinates,
        )
        for turn in (1, 2)
    ]
    values = torch.cat(turns).numpy() / (plan.sigma * math.sqrt(STEPS))
    claimed, square = target.claimed_mu(plan), float((values**2).mean())
    low, high = limits(values.size, alpha)
    size = Check(
        "engine: noise",
        "mu",
        claimed,
        min(UNBOUNDED, claimed * math.sqrt(low / max(square, 1e-300))),
        1 - alpha,
        low <= square <= high,
        f"engine {probe.engine.name}: σ√τ of an update over claimed: {math.sqrt(square):.4f}, {values.size} values",
    )
    return [size, cosines("engine: keys", values, alpha, "pairs of updates over agents, rounds and a replay")]


def engine_sampler_checks(setting: Setting, probe: Probe, alpha: float) -> list[Check]:
    """Who was drawn, read off updates of two steps in which each record moves a coordinate of its own."""
    records = INPUTS
    batch = max(1, min(records // 2, round(records * setting.plan.event.rate)))
    plan = replace(
        setting.plan,
        dimension=DIMENSION,
        active=DIMENSION,
        clip="coordinate",
        clip_rule="given",
        batch=batch,
        records=records,
        local_steps=2,
        noise_multiplier=FAINT,
    )
    x, y = 10 * plan.clip_norm * torch.eye(records, INPUTS), torch.ones(records, dtype=torch.int64)
    keys = [derive_key(setting.root, "audit", "engine batches", i) for i in range(SAMPLED_TASKS)]
    sums = probe.releases(plan, x, y, keys, None)[:, :records] * (plan.batch / plan.clip_value)
    drawn: NDArray[np.int64] = sums.round().to(torch.int64).numpy()
    return [
        sizes_check("engine: batch sizes", plan, drawn.sum(axis=1), 2, alpha),
        shares_check("engine: records", plan, drawn.sum(axis=0), 2 * SAMPLED_TASKS, alpha),
        overlap_check("engine: steps", plan, int((drawn == 2).sum()), SAMPLED_TASKS, alpha),
    ]
