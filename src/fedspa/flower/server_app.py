"""The server's app: `serverapp = "fedspa.flower.server_app:app"`.

It holds the config, θ and held-out records; of the agents' records it knows nothing. Where `flower.records` is set the
agents are real, and the noise is calibrated for the smallest one that may take part.
"""

from __future__ import annotations

import time
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.supercore import log

from fedspa.agent.ledger.ledger import Ledger
from fedspa.agent.participate import agent_name
from fedspa.data.dataset import Dataset
from fedspa.errors import ConfigError, FedspaError
from fedspa.flower.nodes import PollingGrid
from fedspa.flower.settings import FlowerSettings, check_deployable, read_config
from fedspa.flower.strategy import FedSpa
from fedspa.running import ReportWriter
from fedspa.runs.config import Config
from fedspa.runs.guarantee import statement
from fedspa.runs.identity import facts
from fedspa.runs.metrics import label, shown_score
from fedspa.runs.records import records_of
from fedspa.runs.run_ledger import LedgerTotal, check_budget, largest_total, no_total, open_ledger
from fedspa.runs.run_state import RunState
from fedspa.runs.rundir import RunFolder
from fedspa.runs.setup import Job, prepare, prepare_server
from fedspa.runs.trials import server_of
from fedspa.server.coordinator import Coordinator

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train, evaluate and report; with `flower.resume`, from the last checkpoint in `run.out` on."""
    config, settings = read_config(context.run_config)
    serve(PollingGrid(grid, settings.poll), config, settings)


def serve(grid: PollingGrid, config: Config, settings: FlowerSettings) -> dict[str, Any]:
    """A whole run over `grid`; returns its summary."""
    started = time.monotonic()
    job, coordinator = _prepared(config, settings)
    if not settings.resume:
        check_budget(job)
    known = facts(job)
    if not settings.resume:
        coordinator.try_scores()
    with _folder(job, settings) as folder:
        course = RunState(job, coordinator, folder, known, started, resume=settings.resume)
        kept = {}
        if job.plan is not None and config.run.ledger is not None:  # opened before anyone trains, as the simulator does
            with open_ledger(Path(config.run.ledger), course.begun) as ledger:
                kept = {"ledger": ledger.name}
        strategy = FedSpa(course, settings, kept)
        if course.begun is None:
            strategy.save()
        # A resumed run may miss a site that is gone for good; a new one wants everybody, one that is over nobody.
        patience = (
            settings.start_timeout if not settings.resume else min(settings.start_timeout, settings.round_timeout)
        )
        if not course.over:
            _gather(grid, strategy, patience)
        strategy.start(grid, strategy.initial_arrays(), num_rounds=strategy.rounds_left, timeout=settings.round_timeout)
        strategy.dropped += grid.unused
        summary = course.summary(strategy.guarantee, _total(strategy))
        summary["dropped"] = dict(sorted(strategy.dropped.items()))
        if voids := sum(times for code, times in strategy.dropped.items() if code.startswith("void-")):
            summary["warnings"].append(f"{voids} rounds gave no sum, and everyone who was asked paid for them")
        folder.finish(summary)
    name = summary["score"]
    log(INFO, "%s %s; %s", label(name), shown_score(name, summary["score_last"]), statement(summary))
    for warning in summary["warnings"]:
        log(WARNING, "%s", warning)
    return summary


def _prepared(config: Config, settings: FlowerSettings) -> tuple[Job, Coordinator]:
    """What is to be run, and the server of it."""
    if settings.records is not None:
        job = deployed(config, settings.records)
        return job, server_of(job, own_records(config), {settings.records})
    records = records_of(config)
    job = prepare(config, records)
    return job, server_of(job, records, {len(held) for held in job.holdings})


def deployed(config: Config, records: int) -> Job:
    """The job of a server whose agents hold at least `records` records each; persons, where the config names
    data.person: the ids are the agents' own."""
    check_deployable(config)
    return prepare_server(config, own_records(config), {records})


def own_records(config: Config) -> Dataset:
    """Of the server: whose they are, it is not asked."""
    return records_of(config.model_copy(update={"data": config.data.model_copy(update={"person": None})}))


def _total(strategy: FedSpa) -> LedgerTotal | None:
    """As the simulator states it, where the agents of a simulation share a ledger that outlives the run.

    A node may write another one, by its node-config or on another machine: nothing is stated that leaves this run out.
    """
    job = strategy.job
    if job.plan is None or job.config.run.ledger is None:
        return None
    try:
        with Ledger.open(job.config.run.ledger, create=False) as ledger:
            for number, uploads in sorted(strategy.taken.items()):
                found = ledger.participations(agent_name(number), strategy.run)
                if found < uploads:
                    return LedgerTotal(
                        None,
                        f"no ε over all runs: {ledger.path} (run.ledger) holds {found} entries of this run by agent "
                        f"{number}, which sent {uploads} updates; let its node write the same file, which no ledger in "
                        "its node-config and a whole path in run.ledger see to",
                    )
            return largest_total(job.plan, ledger)
    except FedspaError as error:
        return no_total(error)


def _folder(job: Job, settings: FlowerSettings) -> RunFolder:
    out = job.config.run.out
    if not settings.resume:
        return RunFolder(job.config, job.data_name, ReportWriter)
    if out is None:
        raise ConfigError("flower.resume is true and run.out is not set; name the folder of the run to resume")
    return RunFolder.reopen(Path(out), job.config, ReportWriter)


def _gather(grid: PollingGrid, strategy: FedSpa, timeout: float) -> None:
    """Wait for the agents: all of them, or a quorum when the time is over."""
    end, wanted = time.monotonic() + timeout, strategy.job.config.federation.agents
    while (present := strategy.meet(grid)) < wanted and time.monotonic() < end:
        time.sleep(0.2)
    if present < strategy.quorum:
        refused = {} if strategy.introductions is None else strategy.introductions.refused
        codes = f" ({len(refused)} nodes are no members: {', '.join(sorted(set(refused.values())))})" if refused else ""
        raise FedspaError(
            f"{present} agents of this run are online after {timeout:g} s{codes}, and the quorum is {strategy.quorum}; "
            "start SuperNodes (a resumed run knows its nodes by their keys), or raise flower.start_timeout"
        )
    log(INFO, "%d of %d agents are online", present, wanted)
