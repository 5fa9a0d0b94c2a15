"""The real path, from config to θ, is Algorithm 1 as `algorithm1.py` beside this spells it out."""

from __future__ import annotations

import pytest
import torch
from algorithm1 import fed_spa, local_update
from safetensors.torch import load_file
from torch import nn

import fedspa
from fedspa.agent.participate import Request
from fedspa.algorithms.algorithm import FED_SPA
from fedspa.learning.flat import FlatModel
from fedspa.randomness.streams import agent_key, derive_key, mask_seed, root_key
from fedspa.runs.config import load
from fedspa.runs.local import LocalTransport
from fedspa.runs.setup import prepare
from fedspa.server.coordinator import Coordinator

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
