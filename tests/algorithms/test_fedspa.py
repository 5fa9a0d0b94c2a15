"""Fed-SPA's round against Algorithm 1 written out step by step, and where its noise lands."""

from __future__ import annotations

import math
import pickle
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from algorithm1 import fed_spa, local_update
from safetensors.torch import load_file
from torch import nn

import fedspa
from fedspa.agent.participate import Request
from fedspa.algorithms import ALGORITHMS, Agent, Terms, chosen
from fedspa.algorithms.algorithm import FED_SPA
from fedspa.engine.local import LocalResult, LocalTask
from fedspa.engine.native import NativeEngine, library
from fedspa.engine.per_example import PerExampleEngine
from fedspa.errors import ConfigError, PrivacyError
from fedspa.learning.flat import FlatModel
from fedspa.mechanisms.base import NoPlan
from fedspa.mechanisms.gaussian.plan import GaussianPlan
from fedspa.randomness.mask import active_coordinates
from fedspa.randomness.streams import Stream, agent_key, derive_key, draw_batch, mask_seed, root_key
from fedspa.runs.config import load
from fedspa.runs.local import LocalTransport
from fedspa.runs.setup import prepare
from fedspa.server.coordinator import Coordinator

ROOT = bytes(range(32))
D, K, B, M, TAU = 33, 11, 5, 20, 4  # a linear layer from 10 to 3


FREE = NoPlan(D, K, "poisson", B, TAU)


def among_others(who: Agent) -> Agent:
    """The same agent, its records between those of two others, in another order."""
    rows = M + torch.randperm(M, generator=torch.Generator().manual_seed(1))
    x, y = (
        torch.cat([agent(1).pool_x, who.pool_x, agent(2).pool_x]),
        torch.cat([agent(1).pool_y, who.pool_y, agent(2).pool_y]),
    )
    x[rows], y[rows] = who.pool_x, who.pool_y
    return replace(who, pool_x=x, pool_y=y, rows=rows)


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(10, 3))


def plan(**changes: object) -> GaussianPlan:
    base = GaussianPlan(D, K, "l2", 0.4, "poisson", B, M, TAU, 1, 1.3, "add-remove", 1e-3)
    return replace(base, **changes)  # type: ignore[arg-type]


def terms(**changes: object) -> Terms:
    base = Terms(3, "per-agent", None, 0.2, plan())
    return replace(base, **changes)  # type: ignore[arg-type]


def agent(number: int) -> Agent:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(M, 10, generator=generator)
    y = torch.randint(3, (M,), generator=generator)
    return Agent(number, x, y, mask_seed(ROOT, 3, number), agent_key(ROOT, 3, number))


def test_a_round_is_algorithm_1() -> None:
    """Lines 5–11 for one agent, in dense vectors and float64, with nothing shared but the streams and the mask."""
    model = FlatModel(net().double())
    theta = model.flatten().double()
    someone, announced = agent(7), terms()
    (update,) = ALGORITHMS["fedspa"].respond(FlatModel(net()).flatten(), announced, [someone], PerExampleEngine(net()))

    omega = torch.from_numpy(active_coordinates(someone.mask_seed, D, K))  # line 5
    mask = torch.zeros(D, dtype=torch.float64).index_fill(0, omega, 1.0)
    sampling, noise = (Stream(derive_key(someone.key, label)) for label in ("sampling", "noise"))
    local = theta.clone()  # line 6
    for _ in range(TAU):  # line 7
        batch = draw_batch("poisson", B, B / M, M, sampling)  # line 8
        total = torch.zeros(D, dtype=torch.float64)
        for i in batch:
            point = local.clone().requires_grad_()
            (g,) = torch.autograd.grad(
                model.mean_loss(point, someone.pool_x[i : i + 1].double(), someone.pool_y[i : i + 1]), point
            )
            g = mask * g
            total += g * min(1.0, 0.4 / float(g.norm()))
        b = torch.zeros(D, dtype=torch.float64)
        b[omega] = torch.from_numpy(noise.gaussian(K)) * 1.3 * 0.4
        local -= 0.2 * D / K * mask * (total + b) / B  # line 9
    delta = local - theta  # line 11

    assert update.round == 3
    assert update.mask_seed == someone.mask_seed
    assert np.allclose(update.values, delta[omega].numpy(), atol=1e-5)
    outside = torch.ones(D, dtype=torch.bool)
    outside[omega] = False
    assert (delta[outside] == 0).all()


@pytest.mark.parametrize("mask", ["per-agent", "shared", "fixed"])
def test_the_noise_of_an_update_is_what_the_server_expects(mask: str) -> None:
    """Clips so small that noise is all there is: σ²/p² a step for per-agent masks, σ² for the others, τ steps.

    100 agents × 11 values: the standard deviation is within 5 standard errors (false alarm below 1e-6).
    """
    tiny = plan(clip_value=1e-6, noise_multiplier=50.0)
    announced = terms(steps=tiny, mask=mask, mask_seed=None if mask == "per-agent" else bytes(16))
    updates = ALGORITHMS["fedspa"].respond(
        FlatModel(net()).flatten() * 0, announced, [agent(i) for i in range(100)], PerExampleEngine(net())
    )
    values = np.concatenate([update.values for update in updates])
    factor = D / K if mask == "per-agent" else 1.0
    assert announced.update_noise == pytest.approx(0.2 * factor * tiny.sigma * math.sqrt(TAU))
    assert values.std() == pytest.approx(announced.update_noise, rel=5 / math.sqrt(2 * values.size))


@pytest.mark.parametrize("clip", ["l2", "coordinate"])
def test_honest_updates_stay_within_the_plausible_bound(clip: str) -> None:
    announced = terms(steps=plan(clip=clip, clip_value=0.4))
    agents = [replace(agent(i), pool_x=agent(i).pool_x * 1e3) for i in range(20)]
    for update in ALGORITHMS["fedspa"].respond(FlatModel(net()).flatten(), announced, agents, PerExampleEngine(net())):
        assert np.abs(update.values).max() < announced.update_bound


def test_a_record_more_changes_no_other_records_chance() -> None:
    """Add-remove neighbours sample at one rate, the plan's: B over the public m, whatever an agent holds."""
    one = agent(0)
    more = replace(one, pool_x=torch.cat([one.pool_x, one.pool_x[:1]]), pool_y=torch.cat([one.pool_y, one.pool_y[:1]]))
    seen: list[LocalTask] = []

    class Watching(PerExampleEngine):
        def train(self, theta: torch.Tensor, tasks: Sequence[LocalTask]) -> list[LocalResult]:
            seen.extend(tasks)
            return super().train(theta, tasks)

    list(ALGORITHMS["fedspa"].respond(FlatModel(net()).flatten(), terms(), [one, more], Watching(net())))
    assert [len(task.y) for task in seen] == [M, M + 1]
    assert seen[0].rate == seen[1].rate == B / M


def test_fixed_batches_of_fewer_records_than_the_plan_names_are_refused() -> None:
    """There the rate would be larger than the one that is accounted."""
    few = replace(agent(0), pool_x=agent(0).pool_x[:-1], pool_y=agent(0).pool_y[:-1])
    fixed = plan(sampling="fixed", neighbours="replace-one")
    with pytest.raises(PrivacyError, match=f"{M - 1} records"):
        list(
            ALGORITHMS["fedspa"].respond(FlatModel(net()).flatten(), terms(steps=fixed), [few], PerExampleEngine(net()))
        )


# The real path, from config to θ, is Algorithm 1 as `algorithm1.py` beside this spells it out.


SEED = 7


def config(clip: str, **run: object) -> fedspa.Config:
    return load(
        {
            "federation": {"agents": 5, "rounds": 3, "per_round": 3},
            "algorithm": {
                "compression": 0.1,
                "local_steps": 3,
                "batch": 20,
                "local_lr": 0.3,
                "server": "adam",
                "coding": "f32",
            },
            "privacy": {"noise_multiplier": 1.5, "clip": clip, "clip_value": 0.2, "noise": "seeded"},
            "run": {"engine": "reference", "seed": SEED, **run},
        }
    )


class Twin:
    """What `algorithm1` needs, from the same seeds as a run of `config`."""

    def __init__(self, config: fedspa.Config) -> None:
        job = prepare(config)
        self.job = job
        self.theta = job.server.model.flatten()
        x, y = job.data.train_x, job.data.train_y
        self.agents = [[(x[i], y[i]) for i in holding.tolist()] for holding in job.holdings]
        self._model = FlatModel(job.server.model.module.to(torch.float64))
        self.cohorts = job.cohorts()
        public, private = derive_key(root_key("seeded", SEED), "public"), root_key("seeded", SEED)
        self.mask_seed = lambda t, i: mask_seed(public, t, i)
        self.key = lambda t, i: agent_key(private, t, i)

    def gradient(self, theta: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        theta = theta.clone().requires_grad_()
        loss = nn.functional.cross_entropy(self._model.outputs(theta, x.double().unsqueeze(0)), y.unsqueeze(0))
        return torch.autograd.grad(loss, theta)[0]


@pytest.mark.parametrize("clip", ["l2", "coordinate"])
def test_a_whole_run_ends_at_the_same_parameters(clip, tmp_path):
    settings = config(clip, out=str(tmp_path / "run"))
    fedspa.run(settings)
    trained = torch.cat([values.reshape(-1) for values in load_file(tmp_path / "run/model.safetensors").values()])
    twin = Twin(settings)
    algorithm = settings.algorithm
    *_, theta = fed_spa(
        twin.theta,
        twin.agents,
        twin.gradient,
        twin.cohorts,
        twin.job.plan,
        twin.mask_seed,
        twin.key,
        local_lr=algorithm.local_lr,
        server_lr=algorithm.server_lr,
        beta1=algorithm.server_options.beta1,
        beta2=algorithm.server_options.beta2,
        kappa=algorithm.server_options.kappa,
    )
    assert not torch.equal(theta, twin.theta)
    # The names in the file are in order of the alphabet, so both are compared as sets of numbers: each is there.
    assert torch.equal(trained.sort().values, theta.sort().values)


@pytest.mark.parametrize("clip", ["l2", "coordinate"])
def test_an_agents_upload_has_the_same_bits(clip):
    twin = Twin(config(clip))
    job = prepare(config(clip))
    server = Coordinator(job.server)
    terms = server.terms()
    request = Request("run", FED_SPA, terms, server.state.theta, job.server.coding, "seeded")
    found = LocalTransport(job).agents(request, {number: server.mask_seed(terms, number) for number in (0, 3)})
    agents = list(found.values())
    for agent, update in zip(agents, FED_SPA.respond(server.state.theta, terms, agents, job.engine)):
        plain = local_update(
            twin.theta,
            twin.agents[agent.number],
            twin.gradient,
            twin.job.plan,
            twin.mask_seed(0, agent.number),
            twin.key(0, agent.number),
            terms.local_lr,
        )
        omega = torch.from_numpy(terms.coordinates(update.mask_seed))
        assert torch.equal(plain[omega].float(), torch.from_numpy(update.values))
        plain[omega] = 0
        assert not plain.any()


# What is to be known of an algorithm without running it.


def test_configs_and_reports_need_no_torch() -> None:
    code = "import sys, fedspa.runs.config, fedspa.report.record as p; p.cap_of; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", ["fedspa", "dp-fed", "cpsgd"])
def test_a_share_of_a_sum_is_never_encoded_by_itself(name: str) -> None:
    summed = chosen(name, "secure-aggregation")
    for way in (summed.encode, summed.decode):
        with pytest.raises(PrivacyError, match="masked"):
            way(*[None] * 5)  # type: ignore[arg-type]


@pytest.mark.parametrize("algorithm", ["fedspa", "fedavg"])
@pytest.mark.parametrize("native", [False, True])
def test_records_among_those_of_others_make_the_same_update(algorithm: str, native: bool) -> None:
    """Whether the engine reads them where they are or not."""
    if native and library.library() is None:
        pytest.skip("the native engine was not built")
    engine = NativeEngine(net(), 1) if native else PerExampleEngine(net())
    someone, announced = agent(7), terms() if algorithm == "fedspa" else terms(steps=FREE)
    assert among_others(someone).records == someone.records
    answers = [
        next(ALGORITHMS[algorithm].respond(FlatModel(net()).flatten(), announced, [who], engine))
        for who in (someone, among_others(someone))
    ]
    assert np.array_equal(answers[0].values, answers[1].values)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_one_is_chosen_by_its_name_and_its_adversary(name: str) -> None:
    local = chosen(name, "local")
    assert local is chosen(name, None) is ALGORITHMS[name]
    assert (local.adversary, local.mean) == ("local", None)
    if local.aggregated is None:
        with pytest.raises(ConfigError, match=f"privacy.adversary is 'secure-aggregation'; {name} is not run"):
            chosen(name, "secure-aggregation")
        return
    summed = chosen(name, "secure-aggregation")
    assert (summed.name, summed.adversary, summed.private) == (name, "secure-aggregation", True)
    for known in (local, summed):
        assert pickle.loads(pickle.dumps(known)) == known
