"""The server's app: `serverapp = "fedspa.flower.server_app:app"`.

It holds the config, θ and held-out records; of the agents' records it knows nothing. Where `flower.records` is set the
agents are real, and the noise is calibrated for the smallest one that may take part.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.supercore import log

from fedspa import report
from fedspa.errors import ConfigError
from fedspa.flower.nodes import PollingGrid
from fedspa.flower.settings import FlowerSettings, check_deployable, read_config
from fedspa.flower.transport import FlowerTransport
from fedspa.runs.checkpoint import facts
from fedspa.runs.config import Config
from fedspa.runs.guarantee import statement
from fedspa.runs.loop import Observer, RunState, Start, server_of, train
from fedspa.runs.rundir import label, shown_score
from fedspa.runs.setup import Job, prepare, prepare_server, records_of
from fedspa.server.coordinator import Coordinator

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train, evaluate and report; with `flower.resume`, from the last checkpoint in `run.out` on."""
    config, settings = read_config(context.run_config)
    serve(PollingGrid(grid, settings.poll), config, settings)


def serve(grid: PollingGrid, config: Config, settings: FlowerSettings) -> dict[str, Any]:
    """Train a whole run over `grid`; return its summary."""
    started = time.monotonic()
    job, server = _prepared(config, settings)
    resume = None
    if settings.resume:
        if job.config.run.out is None:
            raise ConfigError("flower.resume is true and run.out is not set; name the folder of the run to resume")
        resume = Path(job.config.run.out)
    start = Start(job, server, facts(job), started, resume)
    start.check()
    transports: list[FlowerTransport] = []

    def connect(state: RunState) -> AbstractContextManager[FlowerTransport]:
        transports.append(FlowerTransport(state, settings, grid))
        return nullcontext(transports[0])

    observer = Observer(finished_round=lambda metrics: transports[0].log_round(metrics))
    summary, state = train(start, connect, observer)
    report.write_or_warn(state.folder.path)
    name = summary["score"]
    log(INFO, "%s %s; %s", label(name), shown_score(name, summary["score_last"]), statement(summary))
    for warning in summary["warnings"]:
        log(WARNING, "%s", warning)
    return summary


def _prepared(config: Config, settings: FlowerSettings) -> tuple[Job, Coordinator]:
    """Return what is to be run, and the server of it. The agents of a deployment hold `flower.records` each at least;
    persons, where the config names data.person: the ids are the agents' own, and the server's records have none."""
    if settings.records is None:
        records = records_of(config)
        job = prepare(config, records)
        return job, server_of(job, records, {len(held) for held in job.holdings})
    check_deployable(config)
    records = records_of(config.model_copy(update={"data": config.data.model_copy(update={"person": None})}))
    deployed = prepare_server(config, records, {settings.records})
    return deployed, server_of(deployed, records, {settings.records})
