"""The simulated federation: every agent of every round in this process, through the code that a deployment runs.

Each update is encoded to a payload and decoded again, so the bytes that are reported are the bytes that would travel,
and each participation is written into a ledger before it trains. Killed at any instant and resumed, a run ends as if it
had never been killed: who takes part and (seeded) noise follow from the seed, and all else is in its checkpoint.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedspa.algorithms import Agent
from fedspa.algorithms.base import finite
from fedspa.data.datasets import Dataset
from fedspa.data.participation import schedule
from fedspa.engine.task import ReadsRows
from fedspa.errors import ConfigError, FedspaError, PayloadError, SeededNoiseWarning, quoted
from fedspa.learning.threads import torch_threads
from fedspa.randomness.streams import agent_key, mask_seed, root_key
from fedspa.runs import config as configs
from fedspa.runs.books import Books, refuse_over_budget
from fedspa.runs.checkpoint import Checkpoint, Fact
from fedspa.runs.config import Config
from fedspa.runs.coordinator import Coordinator, Diverged
from fedspa.runs.folder import RunFolder
from fedspa.runs.guarantee import not_private_because
from fedspa.runs.metrics import RoundMetrics
from fedspa.runs.provenance import (
    digests_of,
    facts,
    provenance,
    refuse_ungiven,
    to_go_on,
    under_true_names,
    with_commits,
)
from fedspa.runs.resume import refuse_other_scores, saved
from fedspa.runs.setup import Job, prepare, records_of
from fedspa.runs.statement import SEEDED_NOISE
from fedspa.runs.summary import summarise

log = logging.getLogger(__name__)

_USED_UP = "rounds that were interrupted and drawn anew, with other noise, used up the turns that their ε has room for"


@dataclass(frozen=True)
class RunResult:
    """A finished run: what it reached, the trained module, and where its files are."""

    summary: Mapping[str, Any]
    metrics: list[RoundMetrics]
    module: nn.Module
    folder: Path = field(default_factory=Path)


class Stopped(FedspaError):
    """A run that was asked to stop did, after a whole round, and can be resumed."""

    def __init__(self, folder: Path, done: int, config: Config) -> None:
        super().__init__(
            f"stopped after round {done} of {config.federation.rounds}; to go on: {to_go_on(config, folder)}"
        )


def simulate(
    config: Config | Mapping[str, Any] | Path | str | None = None,
    *,
    data: Dataset | None = None,
    module: nn.Module | None = None,
    resume: Path | str | None = None,
    on_start: Callable[[Job, Path], None] | None = None,
    on_round: Callable[[RoundMetrics], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> RunResult:
    """Simulate a whole federation.

    `config` is a `Config`, a nested mapping, the path of a TOML file, or None for the packaged quickstart. `data` and
    `module` are used in place of what the config names. Nothing is written before everything was checked.

    `resume` is the folder of an interrupted run: without a `config`, its own is used; with one that differs, the run is
    refused. `stop` is asked after each round; where it says so, the run is saved and raises `Stopped`.

    Seeded noise, with which nothing is private, is a `SeededNoiseWarning`.
    """
    started = time.monotonic()
    if resume is not None and not isinstance(resume, str | Path):
        raise ConfigError(f"resume is {quoted(resume)}; give the path of an interrupted run's folder")
    for name, called in (("on_start", on_start), ("on_round", on_round), ("stop", stop)):
        if called is not None and not callable(called):
            raise ConfigError(f"{name} is {quoted(called)}; give a function, or leave it out")
    if resume is not None and config is None:
        config = Path(resume) / "config.toml"
    config = config if isinstance(config, Config) else configs.load(config)
    if resume is not None:
        refuse_ungiven(config, Path(resume), data, module)
    config = under_true_names(config, data, module)
    records = records_of(config, data)
    with ThreadPoolExecutor(1) as beside:
        digests = beside.submit(digests_of, records)
        job = prepare(config, records, module)
    if config.private and config.privacy.noise == "seeded":
        warnings.warn(SEEDED_NOISE, SeededNoiseWarning, stacklevel=2)
    if resume is None:
        refuse_over_budget(job)
    simulation = Simulation(job, facts(job, digests.result()))
    with RunFolder(config, job.data.name) if resume is None else RunFolder.reopen(Path(resume), config) as folder:
        begun = saved(folder, config, simulation.facts) if resume is not None else None
        over = begun is not None and begun.state.round == config.federation.rounds
        if resume is not None and not over:  # what is done asks for no more budget, whatever others spent since
            refuse_over_budget(job, None if begun is None else begun.run)
        done: list[RoundMetrics] = []
        if begun is not None:
            simulation.go_on(begun)
            done = folder.rewind(begun)
            refuse_other_scores(simulation.server, done, folder.path)
        with Books(job, folder.path, begun) as books, torch_threads(1):
            if over and (told := folder.summary()) is not None:
                job.model.load(simulation.server.state.model)
                folder.finish(told, job.model.module)
                return RunResult(told, done, job.model.module, folder.path)
            if begun is None:  # the ledger is there: from this checkpoint on it is never made again
                begun = simulation.checkpoint(books, 0.0)
                books.settle()
                folder.save(begun, config.run.keep)
            if on_start is not None:
                on_start(job, folder.path)
            if resume is not None:
                books.catch_up(islice(simulation.cohorts(), len(done)), sum(metrics.agents for metrics in done))
            for cohort in islice(simulation.cohorts(), len(done), None):
                try:
                    metrics = simulation.round(cohort, books)
                except Diverged as error:
                    raise Diverged(error.round, error.sign, folder.checkpoints) from error
                done.append(metrics)
                folder.add_round(asdict(metrics))
                last = len(done) == config.federation.rounds
                stopping = not last and stop is not None and stop()
                if last or stopping or len(done) % config.run.checkpoint_every == 0:
                    seconds = begun.seconds + time.monotonic() - started
                    books.settle()
                    folder.save(simulation.checkpoint(books, seconds), config.run.keep)
                if on_round is not None:
                    on_round(metrics)
                if stopping:
                    raise Stopped(folder.path, len(done), config)
            job.model.load(simulation.server.state.model)
            seconds = begun.seconds + time.monotonic() - started
            by_class = simulation.server.accuracy_by_class()
            summary = summarise(job, done, books, seconds, by_class, books.total())
            summary["provenance"] = provenance(config, simulation.facts, job.engine.name)
            if (turns := sum(map(len, simulation.cohorts())) - sum(metrics.agents for metrics in done)) > 0:
                summary["warnings"].append(f"{turns} turns of agents fell away: {_USED_UP}")
        folder.finish(summary, job.model.module)
    return RunResult(summary, done, job.model.module, folder.path)


class Simulation:
    """Every agent of a federation, and the server that coordinates them."""

    def __init__(self, job: Job, known: Mapping[str, Fact] | None = None) -> None:
        """`known` are the facts of the job, for its checkpoints."""
        self.job = job
        self.server = Coordinator(job)
        self.facts = dict(known or {})
        self._private = root_key(job.config.privacy.noise, job.config.run.seed)
        # Every round's records are copied to one place: fresh pages cost more than the copying.
        self._room: tuple[Tensor, ...] | None = None

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

    def go_on(self, begun: Checkpoint) -> None:
        """From a checkpoint of this run."""
        self.server.restore(begun.state, begun.clip_value)
        self.facts = with_commits(begun.facts, self.facts)

    def checkpoint(self, books: Books, seconds: float) -> Checkpoint:
        return Checkpoint(
            state=self.server.state,
            clip_value=self.server.clip_value,
            run=books.run,
            config=self.job.config,
            seconds=seconds,
            facts=self.facts,
            extra=books.kept,
        )

    def round(self, cohort: list[int], books: Books) -> RoundMetrics:
        """One pass of Algorithm 1's outer loop over the given agents."""
        terms = self.server.terms()
        intake = self.server.intake(terms, len(cohort))
        present = books.reserve(terms.round, cohort)
        if len(present) < len(cohort):
            log.warning(
                "round %d: %d of %d agents sit out: %s",
                terms.round + 1,
                len(cohort) - len(present),
                len(cohort),
                _USED_UP,
            )
        agents = self._agents(present, terms.round)
        updates = self.job.algorithm.respond(self.server.state.theta, terms, agents, self.job.engine)
        try:
            payloads = {
                agent.number: self.job.algorithm.encode(finite(update), terms, self.job.coding)
                for agent, update in zip(agents, updates)
            }
            books.release(terms.round, payloads)
            for agent in agents:
                intake.take(payloads[agent.number], seed=agent.mask_seed)
        except PayloadError as error:
            # Nobody lies in a simulation: an update that no server would take is what a diverged model gives.
            raise Diverged(terms.round, f"an update would be refused ({error})") from error
        self.server.close_round(intake)
        accuracy, loss = self.server.evaluate()
        return RoundMetrics(
            round=terms.round,
            accuracy=accuracy,
            loss=loss,
            agents=intake.count,
            uplink_bytes=intake.uplink_bytes,
            epsilon=books.epsilon(),
            private=not_private_because(self.job.plan, self.job.config.privacy.noise) is None,
            clip_value=self.server.clip_value,
        )

    def _agents(self, cohort: list[int], t: int) -> list[Agent]:
        """The agents of round t, with their records: valid until the next round's are asked for."""
        holdings = [self.job.holdings[number] for number in cohort]
        train = (self.job.data.train_x, self.job.data.train_y)
        if isinstance(self.job.engine, ReadsRows):
            return [self._agent(number, t, *train, torch.from_numpy(rows)) for number, rows in zip(cohort, holdings)]
        held = torch.from_numpy(np.concatenate([np.empty(0, np.int64), *holdings]))
        if self._room is None or len(self._room[0]) < len(held):
            self._room = tuple(records.new_empty(len(held), *records.shape[1:]) for records in train)
        sizes = [len(holding) for holding in holdings]
        x, y = (
            torch.split(torch.index_select(records, 0, held, out=room[: len(held)]), sizes)
            for records, room in zip(train, self._room)
        )
        return [self._agent(number, t, x[place], y[place]) for place, number in enumerate(cohort)]

    def _agent(self, number: int, t: int, x: Tensor, y: Tensor, rows: Tensor | None = None) -> Agent:
        return Agent(
            number=number,
            x=x,
            y=y,
            mask_seed=mask_seed(self.server.public_key, t, number),
            key=agent_key(self._private, t, number),
            exact=self.job.config.privacy.noise == "exact",
            rows=rows,
        )
