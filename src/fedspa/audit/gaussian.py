"""The audit of Gaussian noise (fedspa, dp-fed): whole answers of agents, by a run's engine, and the simulator.

Local training is on data that turns an update into a window on the mechanism. The model is the probe's. Steps are so
small that it stays where it is: an update over −lr·scale is then the sum of the τ releases.

- The pair test trains on two neighbours with the same key. The noise cancels, so what is left is the difference of the
  clipped gradients. In units of the noise it must stay within the claimed μ, and reach it for the worst pair. There is
  no chance in it.
- The attacks tell which of two worst neighbours was used.
- Updates of null records are pure noise: k independent Gaussians of the plan's σ, also where a batch is empty.

The simulated run has ledger, masks, engine, payloads and server. Every record of every agent is a canary: in by the
toss of a coin, else replaced by a record without a gradient. The server, which sees each agent's updates, guesses which
were in; the number of right guesses bounds ε of the whole run (Steinke, Nasr & Jagielski 2023). Canaries of one agent
have orthogonal gradients (rows of a Hadamard matrix). One run cannot see small faults: it catches noise that is missing
or several times too small, not a factor of √2.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats
from scipy.linalg import hadamard
from torch import Tensor

from fedspa.algorithms import Agent, Terms
from fedspa.algorithms.fedspa import respond
from fedspa.audit.audited import Audited, Setting
from fedspa.audit.probes import (
    DIMENSION,
    INPUTS,
    SEED,
    WEIGHTS,
    MakeEngine,
    Respond,
    answers,
    certain_model,
    replayed_keys,
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
    epsilon_lower_one_run,
    law_question,
    mu_lower,
    noise_size,
    sampler_questions,
    threshold_attack,
)
from fedspa.data.dataset import Dataset
from fedspa.engine.local import Engine
from fedspa.examples import tensors
from fedspa.mechanisms.gaussian.plan import GaussianPlan
from fedspa.privacy.event import Neighbours
from fedspa.randomness.mask import active_coordinates, layered_coordinates
from fedspa.randomness.streams import derive_key
from fedspa.runs.config import Config, load
from fedspa.runs.local import LocalTransport
from fedspa.runs.loop import run_round
from fedspa.runs.run_ledger import RunLedger
from fedspa.runs.setup import Given, Simulated, prepare
from fedspa.server.coordinator import Coordinator, Diverged
from fedspa.wire.payload import Update

ACTIVE = 48
# The mask is of weights only: float32 does not show small steps of a bias that is large.
LAYERS = ((WEIGHTS, ACTIVE), (2, 0))
# What float32 gradients may be off by.
TOLERANCE = 1e-5
# What float32 updates may be off by, in units of the noise: half a last place (2⁻²⁴) of each of k values of that size,
# in either update. It does not shrink with the distance of neighbours, so under much noise it is most of the error.
ROUNDING = 2 * 2.0**-24 * math.sqrt(ACTIVE)
# Noise so small that it hides nothing.
FAINT = 2.0**-12
# Where ε is bounded: so large a δ leaves events frequent enough to be counted.
DELTA = 0.1
STEPS = 4
MOST_DRAWS = 1000
SAMPLED_TASKS = 150
# The simulated run.
RECORDS = 128
AGENTS, ROUNDS, RUN_STEPS = 32, 2, 2
NULL_AGENTS = 8
# A small δ costs the one-run bound least.
CANARY_DELTA = 1e-9
GUESSED = 0.25
NOISE = 4.0


@dataclass(frozen=True, slots=True)
class Target:
    """The plan of a run, and what trains by it. `relations` are those under which its claim is tested. `claimed_share`
    is the claimed sensitivity under replace-one, in units of the plan's: 1 unless there is a fault."""

    plan: GaussianPlan
    relations: tuple[Neighbours, ...]
    engine: MakeEngine = Setting.make_engine
    respond: Respond[Update] = respond
    claimed_share: float = 1.0

    def plans(self) -> Iterator[GaussianPlan]:
        """The plan under each relation."""
        for relation in self.relations:
            yield replace(self.plan, neighbours=relation)

    def claimed_mu(self, plan: GaussianPlan) -> float:
        """Return the distance between worst neighbours in units of the noise: what Gaussian DP calls μ."""
        share = self.claimed_share if plan.neighbours == "replace-one" else 1.0
        return share * (1 if plan.neighbours == "add-remove" else 2) / plan.noise_multiplier

    def claimed_epsilon(self, plan: GaussianPlan, steps: int, delta: float, neighbours: Neighbours) -> float:
        """Return the verified ε of so many steps of the plan."""
        from fedspa.privacy.accounting import epsilon

        share = self.claimed_share if neighbours == "replace-one" else 1.0
        event = replace(plan.event, steps=steps, noise_multiplier=plan.noise_multiplier / share)
        return epsilon({event: 1}, delta, neighbours=neighbours)


def of_plan(plan: GaussianPlan) -> Target:
    """Return the mechanism of a run, under every relation that its sampling has an accountant for."""
    return Target(plan, ("add-remove", "replace-one") if plan.sampling == "poisson" else ("replace-one",))


def _releases(
    setting: Setting,
    target: Target,
    plan: GaussianPlan,
    records: tuple[Tensor, Tensor],
    keys: Sequence[bytes],
    t: int = 0,
) -> Floats:
    """Return the sum of the τ releases in each update, [keys, k] in gradient units: one agent for each key."""
    return _of_agents(setting, target, plan, [(*records, key) for key in keys], t)[0]


def _of_agents(
    setting: Setting, target: Target, plan: GaussianPlan, agents: Sequence[tuple[Tensor, Tensor, bytes]], t: int = 0
) -> tuple[Floats, list[bytes]]:
    """Return the same of agents with these records x, y and keys, and the seed that each names as its mask's."""
    scale = plan.dimension / plan.active
    rate = 1e-6 / (scale * max(plan.sigma, plan.clip_norm / plan.batch))
    layers = LAYERS if plan.active < DIMENSION else None
    updates = answers(setting, target, certain_model(), plan, agents, t, rate, layers)
    values = np.stack([update.values for update in updates]).astype(np.float64) / (-rate * scale)
    return values, [update.mask_seed for update in updates]


def _probe_plan(plan: GaussianPlan) -> GaussianPlan:
    """Return the plan's clipping, noise, batch and sampling, on the probe's coordinates."""
    return replace(plan, dimension=DIMENSION, active=ACTIVE, local_steps=1)


def _records(plan: GaussianPlan, first: float | None, others: float | None = None) -> tuple[Tensor, Tensor]:
    """m records: the first with x = first·(1, …, 1) and label 1, the others likewise; those of None are null."""
    x, y = torch.ones(plan.records, INPUTS), torch.zeros(plan.records, dtype=torch.int64)
    for place, size in ((slice(1), first), (slice(1, None), others)):
        if size is not None:
            x[place], y[place] = size, 1
    return x, y


def _pair(plan: GaussianPlan) -> tuple[float, float | None]:
    """Return the worst record, and what is in its place under the plan's relation."""
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
    least, most = claimed * (1 - TOLERANCE) - ROUNDING, claimed * (1 + TOLERANCE) + ROUNDING
    holds = least <= distance <= most
    detail = f"{_engine(setting, target)}: one update, worst and extreme records, k = {ACTIVE} of {DIMENSION}"
    return certain(f"pair, {plan.neighbours}", "mu", claimed, distance, detail, holds)


def q_one(plan: GaussianPlan) -> GaussianPlan:
    """Return the plan with every record in every step: no amplification to hide behind."""
    return replace(plan, records=plan.batch)


def _scores(
    setting: Setting, target: Target, plan: GaussianPlan, attack: str, sides: Sequence[tuple[Tensor, Tensor]]
) -> list[Floats]:
    """Return updates of either neighbour along the worst record's gradient, in units of the noise."""
    direction = np.where(layered_coordinates(SEED, LAYERS) < INPUTS, 1.0, -1.0) / math.sqrt(ACTIVE) / plan.sigma
    found = []
    for side, records in enumerate(sides):
        draws = range(min(setting.draws, MOST_DRAWS))
        keys = [setting.key(attack, plan.neighbours, side, i) for i in draws]
        found.append(_releases(setting, target, plan, records, keys) @ direction)
    return found


def mu_question(setting: Setting, target: Target, plan: GaussianPlan) -> Question:
    """One step with every record in it, distinguished by a threshold half-way. Batches of two: further records only
    cost time."""
    plan = _probe_plan(q_one(replace(plan, batch=min(2, plan.batch))))
    sides = _scores(setting, target, plan, "mu", [_records(plan, first) for first in _pair(plan)])
    middle = 0.0 if plan.neighbours == "replace-one" else 0.5 / plan.noise_multiplier
    detail = f"{_engine(setting, target)}: threshold attack on one update, q = 1"
    claimed = target.claimed_mu(plan)
    return threshold_attack(f"attack: μ, {plan.neighbours}", "mu", claimed, sides, middle, mu_lower, detail)


def epsilon_question(setting: Setting, target: Target, plan: GaussianPlan) -> Question:
    """One step on a sample: sampler and release together, against the verified ε at a large δ. With fixed-size batches
    the other records pull against the first: whenever it is left out, one of them is in."""
    plan = _probe_plan(plan)
    q, (worst, other) = plan.event.rate, _pair(plan)
    delta = DELTA if q >= 0.4 else DELTA * q
    claimed = target.claimed_epsilon(plan, 1, delta, plan.neighbours)
    others = -worst if plan.sampling == "fixed" else None
    sides = _scores(setting, target, plan, "epsilon", [_records(plan, first, others) for first in (worst, other)])
    best, bound = partial(_best_threshold, plan, len(sides[0]), delta), partial(epsilon_lower, delta)
    detail = f"{_engine(setting, target)}: one step, q = {q:.3g}, δ = {delta:.3g}"
    return threshold_attack(f"attack: ε, {plan.neighbours}", "epsilon", claimed, sides, best, bound, detail)


@cache
def _best_threshold(plan: GaussianPlan, draws: int, delta: float, alpha: float) -> float:
    """Return where the bound would be largest if the claim were true, by the two densities in units of the noise."""
    q, shift = plan.event.rate, 1 / plan.noise_multiplier
    base = -plan.batch * shift if plan.sampling == "fixed" else 0.0
    step = 2 * shift if plan.sampling == "fixed" else shift
    other_step = -shift if plan.sampling == "poisson" and plan.neighbours == "replace-one" else 0.0
    candidates = base + np.linspace(-2.0, step + 3.0, 101)

    def above(distance: float) -> Floats:
        tail: Floats = q * stats.norm.sf(candidates - base - distance) + (1 - q) * stats.norm.sf(candidates - base)
        return tail

    bounds = [
        epsilon_lower(delta, round(hit * draws), round(false * draws), draws, alpha)
        for hit, false in zip(above(step), above(other_step))
    ]
    return float(candidates[int(np.argmax(bounds))])


def mask_question(setting: Setting, target: Target) -> Question:
    """Agents with one record each, which pulls at two weights: an update moves where its mask has these, and nowhere
    else, and the mask is the one that was announced. One that the records choose tells of them without any noise."""
    plan = _probe_plan(replace(target.plan, batch=1, records=1))
    key, one = setting.key("engine mask"), torch.ones(1, dtype=torch.int64)
    pulls = 10 * plan.clip_norm * torch.eye(INPUTS)
    agents = [(*_records(plan, None), key), *((pull[None], one, key) for pull in pulls)]
    values, seeds = _of_agents(setting, target, plan, agents)
    moved = np.abs(values[1:] - values[0]) > TOLERANCE * plan.clip_norm / plan.batch
    wanted = layered_coordinates(SEED, LAYERS) % INPUTS == np.arange(INPUTS)[:, None]
    wrong = int((moved != wanted).sum()) + sum(seed != SEED for seed in seeds)
    detail = f"{_engine(setting, target)}: values off the mask's places, or masks of another seed, of {len(agents)}"
    return certain("mask", "count", 0.0, float(wrong), detail)


def noise_questions(setting: Setting, target: Target) -> list[Question]:
    """Updates of null records, agent by agent and round by round, and once more with other private keys.

    Noise that is shared between agents or rounds would repeat within a turn; noise shared by the steps of one update
    would make it √τ too large. Updates of a single step say more of its law; of two records one is expected in a batch,
    so that a Poisson sample is empty once in four times, and has noise none the less.
    """
    plan = replace(_probe_plan(target.plan), local_steps=STEPS)
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
        noise_size("noise: size", target.claimed_mu(plan), groups, detail),
        law_question("noise: law", stats.norm, [single], f"{name}: distance from the normal law, {single.size} values"),
        columns("noise: coordinates", single),
        cosines("keys", values, "pairs of updates over agents, rounds and a replay"),
    ]


def update_sampler_questions(setting: Setting, target: Target) -> list[Question]:
    """Who was drawn, read off updates of two steps in which each record moves a coordinate of its own. The noise is
    faint: who was drawn does not depend on it."""
    plan = replace(
        target.plan,
        dimension=DIMENSION,
        active=DIMENSION,
        clip="coordinate",
        batch=max(1, min(INPUTS // 2, round(INPUTS * target.plan.event.rate))),
        records=INPUTS,
        local_steps=2,
        noise_multiplier=FAINT,
    )
    everyone = 10 * plan.clip_norm * torch.eye(INPUTS), torch.ones(INPUTS, dtype=torch.int64)
    keys = [setting.key("engine batches", i) for i in range(SAMPLED_TASKS)]
    sums = _releases(setting, target, plan, everyone, keys)[:, :INPUTS] * (plan.batch / plan.clip_value)
    return sampler_questions("sampler", plan, np.rint(sums).astype(np.int64)[None])


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A finished run: what the server got from which agent, and how far θ moved."""

    job: Simulated
    sent: list[tuple[int, Update]]
    moved: Tensor


def run_questions(setting: Setting, target: Target) -> list[Question]:
    """Masks, keys and canaries. A run that the server refuses to continue has failed them all: no honest update is
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
) -> RecordedRun:
    data = Dataset(x, labels, x[:2], torch.tensor([0, 1]), 2, "canaries")
    model = certain_model(x.shape[1])
    with tempfile.TemporaryDirectory(prefix="fedspa-audit-") as folder:
        job = prepare(_config(setting, target, len(x) // RECORDS, compression, batch), data, Given(model.module))
        sent: list[tuple[int, Update]] = []

        def recording(theta: Tensor, terms: Terms, agents: Sequence[Agent], engine: Engine) -> Iterator[Update]:
            for agent, update in zip(agents, target.respond(theta, terms, agents, engine)):
                sent.append((agent.number, update))
                yield update

        job = replace(
            job,
            # One block of the Hadamard matrix to each agent.
            holdings=list(np.arange(len(x)).reshape(-1, RECORDS)),
            engine=target.engine(setting, model.module, model.shape),
            server=replace(job.server, algorithm=replace(job.server.algorithm, respond=recording)),
        )
        server = Coordinator(job.server)
        start = server.state.theta.clone()
        with RunLedger(job, Path(folder)) as accounts:
            transport = LocalTransport(job, accounts)
            for cohort in job.cohorts():
                run_round(server, transport, cohort)
    return RecordedRun(job, sent, server.state.theta - start)


def _config(setting: Setting, target: Target, agents: int, compression: float, batch: int) -> Config:
    federation = {"agents": agents, "rounds": ROUNDS, "per_round": agents}
    steps = {"local_steps": RUN_STEPS, "batch": batch, "local_lr": 1e-6}
    algorithm = {"compression": compression, "mask": "shared", "server": "average", **steps}
    clipping = {"sampling": target.plan.sampling, "clip": target.plan.clip, "clip_value": 0.1}
    privacy = {"noise_multiplier": NOISE, "delta": 1e-3, "noise": setting.noise_mode, **clipping}
    run = {"engine": setting.engine, "seed": setting.seed, "threads": 1}
    return load({"federation": federation, "algorithm": algorithm, "privacy": privacy, "run": run})


def _masks(run: RecordedRun) -> Question:
    """θ moves on the masks' coordinates and nowhere else."""
    reached = np.zeros(len(run.moved), dtype=np.bool_)
    for _, update in run.sent:
        reached[active_coordinates(update.mask_seed, update.dimension, update.active)] = True
    stray = int((run.moved.cpu().numpy()[~reached] != 0).sum())
    detail = f"coordinates outside every mask ({int((~reached).sum())} of {len(reached)}) that moved"
    return certain("run: masks", "count", 0.0, float(stray), detail)


def _canaries(target: Target, run: RecordedRun, inside: Tensor) -> Question:
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


def _canary_scores(run: RecordedRun) -> Floats:
    """Return how much each canary's own direction shows in its agent's updates: more is likelier in."""
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


# Three known mistakes, for `--self-test`. They are never used to train.


def _papers_sensitivity(target: Target) -> Target:
    """√2·√k·c (or √2·C) claimed under replace-one, where it is 2·√k·c (2C)."""
    return replace(target, claimed_share=1 / math.sqrt(2))


def _weak_noise(theta: Tensor, terms: Terms, agents: Sequence[Agent], engine: Engine) -> Iterator[Update]:
    """σ smaller than accounted by 1.5."""
    plan = terms.plan_of(GaussianPlan)
    weak = replace(plan, noise_multiplier=plan.noise_multiplier / 1.5)
    return respond(theta, replace(terms, steps=weak), agents, engine)


def _public_key(theta: Tensor, terms: Terms, agents: Sequence[Agent], engine: Engine) -> Iterator[Update]:
    """Randomness keyed by what the server knows: the mask's seed, the round and the agent's number."""
    roots = [blake2b(terms.mask_seed or agent.mask_seed, digest_size=32).digest() for agent in agents]
    keyed = [replace(each, key=derive_key(root, terms.round, each.number)) for each, root in zip(agents, roots)]
    return respond(theta, terms, keyed, engine)


FAULTS: dict[str, Callable[[Target], Target]] = {
    "sensitivity": _papers_sensitivity,
    "noise": lambda target: replace(target, respond=_weak_noise),
    "seed": lambda target: replace(target, respond=_public_key),
}


def questions(setting: Setting, target: Target) -> Iterator[Question]:
    """All questions, in the order of the report."""
    for plan in target.plans():
        yield pair_question(setting, target, plan)
        yield mu_question(setting, target, plan)
        yield epsilon_question(setting, target, plan)
    yield mask_question(setting, target)
    yield from noise_questions(setting, target)
    yield from update_sampler_questions(setting, target)
    yield from run_questions(setting, target)


GAUSSIAN = Audited(
    name="fedspa",
    of_plan=of_plan,
    questions=questions,
    faults=FAULTS,
)
