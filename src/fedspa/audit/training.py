"""Attacks on whole training under Gaussian noise: by a run's engine, and through the simulator.

Local training is on data that turns an update into a window on the mechanism. The model is the probe's. Steps are so
small that it stays where it is: an update over −lr·scale is then the sum of the τ releases.

The simulated run has ledger, masks, engine, payloads and server. Every record of every agent is a canary: in by the
toss of a coin, else replaced by a record without a gradient. The server, which sees each agent's updates, guesses which
were in; the number of right guesses bounds ε of the whole run (Steinke, Nasr & Jagielski 2023). Canaries of one agent
have orthogonal gradients (rows of a Hadamard matrix). One run cannot see small faults: it catches noise that is missing
or several times too small, not a factor of √2.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats
from scipy.linalg import hadamard
from torch import Tensor

from fedspa.algorithms import Agent, Terms
from fedspa.audit.gaussian import FAINT, Target, q_one
from fedspa.audit.probes import DIMENSION, INPUTS, SEED, WEIGHTS, answers, certain_model, replayed_keys
from fedspa.audit.result import UNBOUNDED, Finding, Question, certain
from fedspa.audit.run import Setting
from fedspa.audit.statistics import (
    Floats,
    columns,
    cosines,
    epsilon_lower_one_run,
    law_question,
    mu_lower,
    noise_size,
    sampler_questions,
    threshold_attack,
)
from fedspa.data.dataset import Dataset
from fedspa.engine.task import Engine
from fedspa.examples import tensors
from fedspa.mechanisms.gaussian.plan import GaussianPlan
from fedspa.privacy.event import Neighbours
from fedspa.randomness.mask import active_coordinates, layered_coordinates
from fedspa.runs.books import Books
from fedspa.runs.config import Config, load
from fedspa.runs.setup import Simulated, prepare
from fedspa.runs.simulate import Simulation
from fedspa.server.coordinator import Diverged
from fedspa.wire.payload import Update

ACTIVE = 48
# The mask is of weights only: float32 does not show small steps of a bias that is large.
LAYERS = ((WEIGHTS, ACTIVE), (2, 0))
# Updates travel as float32: what the pair test may be off by.
TOLERANCE = 1e-5
STEPS = 4
MOST_DRAWS = 400
SAMPLED_TASKS = 150
# The simulated run.
RECORDS = 128
AGENTS, ROUNDS, RUN_STEPS = 32, 2, 2
NULL_AGENTS = 8
# A small δ costs the one-run bound least.
CANARY_DELTA = 1e-9
GUESSED = 0.25
NOISE = 4.0


def questions(setting: Setting, target: Target) -> Iterator[Question]:
    """All questions about training, in the order of the report."""
    for plan in target.plans():
        yield pair_question(setting, target, plan)
        yield mu_question(setting, target, plan)
    yield mask_question(setting, target)
    yield from noise_questions(setting, target)
    yield from update_sampler_questions(setting, target)
    yield from run_questions(setting, target)


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


@dataclass(frozen=True, slots=True)
class Overheard:
    """A finished run: what the server got from which agent, and how far θ moved."""

    job: Simulated
    sent: list[tuple[int, Update]]
    moved: Tensor


def run_questions(setting: Setting, target: Target) -> list[Question]:
    """Masks, keys and canaries. A run that the server refuses to go on with has failed them all: no honest update is
    beyond its bounds."""
    try:
        return _run_questions(setting, target)
    except Diverged as refused:
        return [certain("run: updates", "count", 0.0, 1.0, str(refused))]


def _run_questions(setting: Setting, target: Target) -> list[Question]:
    x = torch.from_numpy(hadamard(RECORDS).astype(np.float32)).repeat(AGENTS, 1)
    coins = setting.stream("coins").uint64(len(x)) >> np.uint64(63)
    inside = torch.from_numpy(coins.astype(np.int64))
    # Every record in every step (q = 1): canaries show best where no sampling hides them.
    canary_run = _federation(setting, target, x, inside, compression=1.0, batch=RECORDS)
    # Agents without a gradient, sparse updates, and a second run with all public inputs the same. (In `seeded` mode
    # that would repeat the first by design.)
    few = slice(0, NULL_AGENTS * RECORDS)
    nothing = torch.zeros_like(inside[few])
    again = 1 if setting.noise_mode == "seeded" else 2
    turns = [_federation(setting, target, x[few], nothing, compression=0.5, batch=8) for _ in range(again)]
    values = np.stack([update.values for turn in turns for _, update in turn.sent]).astype(np.float64)
    what = "pairs of updates over agents, rounds" + ("" if len(turns) == 1 else " and a second run of the same seed")
    return [_masks(turns[0]), cosines("run: keys", values, what), _canaries(target, canary_run, inside)]


def _federation(
    setting: Setting, target: Target, x: Tensor, labels: Tensor, *, compression: float, batch: int
) -> Overheard:
    data = Dataset(x, labels, x[:2], torch.tensor([0, 1]), 2, "canaries")
    model = certain_model(x.shape[1])
    with tempfile.TemporaryDirectory(prefix="fedspa-audit-") as folder:
        job = prepare(_config(setting, target, len(x) // RECORDS, compression, batch), data, model.module)
        sent: list[tuple[int, Update]] = []

        def overheard(theta: Tensor, terms: Terms, agents: Sequence[Agent], engine: Engine) -> Iterator[Update]:
            for agent, update in zip(agents, target.respond(theta, terms, agents, engine)):
                sent.append((agent.number, update))
                yield update

        job = replace(
            job,
            # One block of the Hadamard matrix to each agent.
            holdings=list(np.arange(len(x)).reshape(-1, RECORDS)),
            engine=target.engine(setting, model.module, model.shape),
            server=replace(job.server, algorithm=replace(job.server.algorithm, respond=overheard)),
        )
        simulation = Simulation(job)
        start = simulation.server.state.theta.clone()
        with Books(job, Path(folder)) as books:
            for cohort in job.cohorts():
                simulation.round(cohort, books)
    return Overheard(job, sent, simulation.server.state.theta - start)


def _config(setting: Setting, target: Target, agents: int, compression: float, batch: int) -> Config:
    federation = {"agents": agents, "rounds": ROUNDS, "per_round": agents}
    steps = {"local_steps": RUN_STEPS, "batch": batch, "local_lr": 1e-6}
    algorithm = {"compression": compression, "mask": "shared", "server": "average", **steps}
    clipping = {"sampling": target.plan.sampling, "clip": target.plan.clip, "clip_value": 0.1}
    privacy = {"noise_multiplier": NOISE, "delta": 1e-3, "noise": setting.noise_mode, **clipping}
    run = {"engine": setting.engine, "seed": setting.seed, "threads": 1}
    return load({"federation": federation, "algorithm": algorithm, "privacy": privacy, "run": run})


def _masks(run: Overheard) -> Question:
    """θ moves on the masks' coordinates and nowhere else."""
    reached = np.zeros(len(run.moved), dtype=np.bool_)
    for _, update in run.sent:
        reached[active_coordinates(update.mask_seed, update.dimension, update.active)] = True
    stray = int((run.moved.cpu().numpy()[~reached] != 0).sum())
    detail = f"coordinates outside every mask ({int((~reached).sum())} of {len(reached)}) that moved"
    return certain("run: masks", "count", 0.0, float(stray), detail)


def _canaries(target: Target, run: Overheard, inside: Tensor) -> Question:
    plan: Any = run.job.plan  # Gaussian: the config is that of fedspa
    neighbours: Neighbours = "add-remove" if plan.sampling == "poisson" else "replace-one"
    steps = ROUNDS * RUN_STEPS
    claimed = target.claimed_epsilon(plan, steps, CANARY_DELTA, neighbours)
    scores = _canary_scores(run)
    order = np.argsort(scores)
    half = int(GUESSED * len(order) / 2)
    truth = inside.numpy()
    correct = int(truth[order[-half:]].sum() + (1 - truth[order[:half]]).sum())
    detail = (
        f"{correct} of {2 * half} guesses right on {len(order)} canaries, {steps} steps per agent, q = 1, "
        f"noise {NOISE:g}, δ = {CANARY_DELTA:g}; weak: sees gross faults only"
    )

    def judge(alpha: float) -> Finding:
        return Finding(claimed, epsilon_lower_one_run(len(order), 2 * half, correct, CANARY_DELTA, alpha), detail)

    return Question("run: canaries", "epsilon", judge)


def _canary_scores(run: Overheard) -> Floats:
    """How much each canary's own direction shows in its agent's updates: more is likelier in."""
    x, _ = tensors(run.job.data.train_x, run.job.data.train_y)
    x = x.to(torch.float64)
    # The gradient of label 1 at the start: +x on the first row of weights, −x on the second, ±1 on the biases.
    ones = torch.ones(len(x), 1, dtype=torch.float64)
    gradients = torch.cat([x, -x, ones, -ones], dim=1)
    scores = torch.zeros(len(x), dtype=torch.float64)
    for agent, update in run.sent:
        held = torch.from_numpy(run.job.holdings[agent])
        active = active_coordinates(update.mask_seed, update.dimension, update.active)
        rows = gradients[held][:, torch.from_numpy(active)]
        scores[held] -= rows @ torch.from_numpy(update.values.astype(np.float64))
    return scores.numpy()
