"""The simulated federation: every agent of every round in this process, through the code that a deployment runs.

Each update is encoded to a payload and decoded again, so the bytes that are reported are the bytes that would travel,
and each participation is written into a ledger before it trains.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedspa.algorithms import Agent
from fedspa.federation.datasets import Dataset
from fedspa.federation.participation import schedule
from fedspa.mechanism.streams import agent_key, mask_seed, root_key
from fedspa.runs import config as configs
from fedspa.runs.books import Books, refuse_over_budget
from fedspa.runs.config import Config
from fedspa.runs.coordinator import Coordinator
from fedspa.runs.folder import RunFolder
from fedspa.runs.setup import Job, prepare
from fedspa.runs.summary import summarise
from fedspa.wire.payload import encode


@dataclass(frozen=True, slots=True)
class RoundMetrics:
    """What is known after a round. `epsilon` is the largest over agents so far, verified; None without privacy."""

    round: int
    accuracy: float
    loss: float
    agents: int
    uplink_bytes: int
    epsilon: float | None
    clip_value: float | None


@dataclass(frozen=True)
class RunResult:
    """A finished run: what it reached, the trained module, and where its files are."""

    summary: Mapping[str, Any]
    metrics: list[RoundMetrics]
    module: nn.Module
    folder: Path = field(default_factory=Path)


def simulate(
    config: Config | Mapping[str, Any] | Path | str | None = None,
    *,
    data: Dataset | None = None,
    module: nn.Module | None = None,
    on_start: Callable[[Job, Path], None] | None = None,
    on_round: Callable[[RoundMetrics], None] | None = None,
) -> RunResult:
    """Simulate a whole federation.

    `config` is a `Config`, a nested mapping, the path of a TOML file, or None for the packaged quickstart. `data` and
    `module` are used in place of what the config names. Nothing is written before everything was checked.
    """
    config = config if isinstance(config, Config) else configs.load(config)
    job = prepare(config, data, module)
    refuse_over_budget(job)
    simulation = Simulation(job)
    folder = RunFolder(config, job.data.name)
    started = time.monotonic()
    if on_start is not None:
        on_start(job, folder.path)
    history: list[RoundMetrics] = []
    with Books(job, folder.path) as books, torch_threads(1):
        for cohort in simulation.cohorts():
            metrics = simulation.round(cohort, books)
            history.append(metrics)
            folder.add_round(asdict(metrics))
            if on_round is not None:
                on_round(metrics)
        job.model.load(simulation.server.state.theta)
        summary = summarise(job, history, books, time.monotonic() - started)
    folder.finish(summary, job.model.module)
    return RunResult(summary, history, job.model.module, folder.path)


class Simulation:
    """Every agent of a federation, and the server that coordinates them."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.server = Coordinator(job)
        self._private = root_key(job.config.privacy.noise, job.config.run.seed)

    def cohorts(self) -> Iterator[list[int]]:
        federation = self.job.config.federation
        return schedule(
            federation.participation,
            federation.agents,
            federation.per_round,
            federation.rounds,
            self.job.cap,
            seed=self.job.config.run.seed,
        )

    def round(self, cohort: list[int], books: Books) -> RoundMetrics:
        """One pass of Algorithm 1's outer loop over the given agents."""
        terms = self.server.terms()
        books.reserve(terms.round, cohort)
        agents = [self._agent(number, terms.round) for number in cohort]
        updates = self.job.algorithm.respond(self.server.state.theta, terms, agents, self.job.engine)
        payloads = {
            agent.number: encode(update, self.job.coding, terms.update_noise) for agent, update in zip(agents, updates)
        }
        books.release(terms.round, payloads)
        intake = self.server.intake(terms, len(cohort))
        for agent in agents:
            intake.take(payloads[agent.number], seed=agent.mask_seed)
        self.server.close_round(intake)
        with torch_threads(self.job.config.run.threads):
            accuracy, loss = self.server.evaluate()
        return RoundMetrics(
            round=terms.round,
            accuracy=accuracy,
            loss=loss,
            agents=intake.count,
            uplink_bytes=intake.uplink_bytes,
            epsilon=books.epsilon(),
            clip_value=self.server.clip_value,
        )

    def _agent(self, number: int, t: int) -> Agent:
        held = torch.from_numpy(self.job.holdings[number])
        return Agent(
            number=number,
            x=self.job.data.train_x[held],
            y=self.job.data.train_y[held],
            mask_seed=mask_seed(self.server.public_key, t, number),
            key=agent_key(self._private, t, number),
            exact=self.job.config.privacy.noise == "exact",
        )


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """One thread for the small tensors of local training: torch's barriers between two cost 10 times the work, wherever
    anything else wants the cores, and results must not depend on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
