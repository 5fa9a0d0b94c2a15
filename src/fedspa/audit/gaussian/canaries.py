"""A whole federated run with canaries in it, through the simulator: ledger, masks, engine, payloads, server.

Every record of every agent is a canary: in by the toss of a coin, else replaced by a record without a gradient. The
server, which sees each agent's updates, guesses which were in; the number of right guesses bounds ε of the whole run
(Steinke, Nasr & Jagielski 2023). Canaries of one agent have orthogonal gradients (rows of a Hadamard matrix).

One run cannot see small faults: it catches noise that is missing or several times too small, not a factor of √2.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg import hadamard
from torch import Tensor

from fedspa.algorithms import Agent, Terms
from fedspa.audit.bounds import epsilon_lower_one_run
from fedspa.audit.gaussian.target import Target
from fedspa.audit.probe import certain_model
from fedspa.audit.questions import cosines
from fedspa.audit.result import Finding, Question, certain
from fedspa.audit.setting import Setting
from fedspa.data.dataset import Dataset
from fedspa.engine.task import Engine
from fedspa.examples import tensors
from fedspa.privacy.event import Neighbours
from fedspa.randomness.mask import active_coordinates
from fedspa.runs.books import Books
from fedspa.runs.config import Config, load
from fedspa.runs.setup import Simulated, prepare
from fedspa.runs.simulate import Simulation
from fedspa.server.coordinator import Diverged
from fedspa.wire.payload import Update

RECORDS = 128
AGENTS, ROUNDS, STEPS = 32, 2, 2
NULL_AGENTS = 8
# A small δ costs the one-run bound least.
DELTA = 1e-9
GUESSED = 0.25
NOISE = 4.0


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
    steps = {"local_steps": STEPS, "batch": batch, "local_lr": 1e-6}
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
    steps = ROUNDS * STEPS
    claimed = target.claimed_epsilon(plan, steps, DELTA, neighbours)
    scores = _scores(run)
    order = np.argsort(scores)
    half = int(GUESSED * len(order) / 2)
    truth = inside.numpy()
    correct = int(truth[order[-half:]].sum() + (1 - truth[order[:half]]).sum())
    detail = (
        f"{correct} of {2 * half} guesses right on {len(order)} canaries, {steps} steps per agent, q = 1, "
        f"noise {NOISE:g}, δ = {DELTA:g}; weak: sees gross faults only"
    )

    def judge(alpha: float) -> Finding:
        return Finding(claimed, epsilon_lower_one_run(len(order), 2 * half, correct, DELTA, alpha), detail)

    return Question("run: canaries", "epsilon", judge)


def _scores(run: Overheard) -> NDArray[np.float64]:
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
