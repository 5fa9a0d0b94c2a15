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

import numpy as np
import torch
from torch import Tensor, nn

from fedspa.algorithms import Agent, Terms
from fedspa.errors import FedspaError
from fedspa.federation.datasets import Dataset
from fedspa.federation.participation import schedule
from fedspa.mechanism.streams import agent_key, derive_key, mask_seed, root_key
from fedspa.runs import config as configs
from fedspa.runs.books import Books, refuse_over_budget
from fedspa.runs.config import Config
from fedspa.runs.folder import RunFolder
from fedspa.runs.initial_clip import median_clip
from fedspa.runs.setup import Job, prepare
from fedspa.runs.summary import summarise
from fedspa.server.aggregate import Aggregator
from fedspa.server.optimizers import ServerState, decayed
from fedspa.wire.payload import Expected, decode, encode


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
        job.model.load(simulation.state.theta)
        summary = summarise(job, history, books, time.monotonic() - started)
    folder.finish(summary, job.model.module)
    return RunResult(summary, history, job.model.module, folder.path)


class Simulation:
    """The round loop's state: θ and the server's moments, the clip value, the public and the private randomness."""

    def __init__(self, job: Job) -> None:
        self.job = job
        config = job.config
        theta = job.model.flatten()
        self.state: ServerState = job.optimizer.start(theta)
        self._public = derive_key(root_key("seeded", config.run.seed), "public")
        self._private = root_key(config.privacy.noise, config.run.seed)
        self._clip_value = job.plan.clip_value if job.plan is not None else None
        if job.plan is not None and job.plan.clip_rule == "median":
            self._clip_value = median_clip(job, theta)

    def cohorts(self) -> list[list[int]]:
        federation = self.job.config.federation
        return list(
            schedule(
                federation.participation,
                federation.agents,
                federation.per_round,
                federation.rounds,
                self.job.cap,
                seed=self.job.config.run.seed,
            )
        )

    def round(self, cohort: list[int], books: Books) -> RoundMetrics:
        """One pass of Algorithm 1's outer loop over the given agents."""
        terms = self._terms()
        books.reserve(terms.round, cohort)
        agents = [self._agent(number, terms.round) for number in cohort]
        updates = self.job.algorithm.respond(self.state.theta, terms, agents, self.job.engine)
        payloads = {
            agent.number: encode(update, self.job.coding, terms.update_noise) for agent, update in zip(agents, updates)
        }
        books.release(terms.round, payloads)
        total = Aggregator(terms.dimension, terms.update_bound, max(1, len(cohort)))
        clip_values: list[float] = []
        for agent in agents:
            received = decode(payloads[agent.number], self._expected(terms, agent))
            total.add(received)
            clip_values.append(received.clip_value)
        if cohort:
            mean = torch.from_numpy(total.mean()).to(self.state.theta)
            self.state = self.job.optimizer.apply(self.state, mean)
        self._adapt_clip(clip_values)
        return self._measure(terms.round, len(cohort), sum(map(len, payloads.values())), books)

    def _terms(self) -> Terms:
        job, config = self.job, self.job.config.algorithm
        t = self.state.round
        common = {"per-agent": None, "shared": t, "fixed": 0}[config.mask]
        plan = job.plan.with_clip_value(self._clip_value) if job.plan is not None and self._clip_value else None
        return Terms(
            round=t,
            dimension=job.model.dimension,
            active=job.active,
            mask=config.mask,
            mask_seed=None if common is None else mask_seed(self._public, common, -1),
            sampling=job.config.privacy.sampling,
            batch=config.batch,
            local_steps=config.local_steps,
            local_lr=decayed(config.local_lr, config.lr_decay, t),
            plan=plan,
        )

    def _agent(self, number: int, t: int) -> Agent:
        held = torch.from_numpy(self.job.holdings[number])
        return Agent(
            number=number,
            x=self.job.data.train_x[held],
            y=self.job.data.train_y[held],
            mask_seed=mask_seed(self._public, t, number),
            key=agent_key(self._private, t, number),
            exact=self.job.config.privacy.noise == "exact",
        )

    def _expected(self, terms: Terms, agent: Agent) -> Expected:
        return Expected(
            round=terms.round,
            dimension=terms.dimension,
            active=terms.active,
            bound=terms.update_bound,
            noise_std=terms.update_noise,
            codings=frozenset({self.job.coding}),
            seed=terms.mask_seed or agent.mask_seed,
        )

    def _adapt_clip(self, clip_values: list[float]) -> None:
        """The next round starts from the geometric mean of where the agents' private quantiles ended."""
        if self.job.plan is not None and self.job.plan.clip_rule == "quantile" and clip_values:
            self._clip_value = float(np.exp(np.mean(np.log(clip_values))))

    def _measure(self, t: int, agents: int, uplink: int, books: Books) -> RoundMetrics:
        with torch_threads(self.job.config.run.threads):
            accuracy, loss = evaluate(self.job, self.state.theta)
        if not np.isfinite(loss):
            raise FedspaError(
                f"the model diverged in round {t}: its loss is no longer finite; lower algorithm.local_lr or "
                "algorithm.server_lr, or clip tighter"
            )
        return RoundMetrics(t, accuracy, loss, agents, uplink, books.epsilon(), self._clip_value)


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


@torch.no_grad()
def evaluate(job: Job, theta: Tensor) -> tuple[float, float]:
    """Accuracy and mean loss on the held-out records, which belong to the server."""
    right, loss = 0, 0.0
    x, y = job.data.test_x, job.data.test_y
    for x_part, y_part in zip(torch.split(x, 256), torch.split(y, 256)):
        logits = job.model.logits(theta, x_part.to(theta.device))
        labels = y_part.to(theta.device)
        right += int((logits.argmax(dim=1) == labels).sum())
        loss += float(nn.functional.cross_entropy(logits, labels, reduction="sum"))
    return right / len(y), loss / len(y)
