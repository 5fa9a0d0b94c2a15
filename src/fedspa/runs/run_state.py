"""A run between its rounds, on the server's side: where it stands, what it has reached, and how it is kept. The
simulator and a deployment go through the same."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedspa.errors import one_line
from fedspa.mechanisms import event_of
from fedspa.runs.checkpoint import Checkpoint, CheckpointError, Fact, load_latest
from fedspa.runs.config import Config
from fedspa.runs.guarantee import Guarantee
from fedspa.runs.identity import ALL_RECORDS, PACKAGE, ROUNDING, TOLD, provenance, with_commits
from fedspa.runs.metrics import RoundMetrics
from fedspa.runs.plans import flat
from fedspa.runs.run_ledger import LedgerTotal, check_budget, check_same_event
from fedspa.runs.rundir import RunFolder
from fedspa.runs.setup import Job
from fedspa.runs.summary import reached, summarise
from fedspa.runs.trials import Trials
from fedspa.server.coordinator import Coordinator
from fedspa.server.evaluation import Closing


class RunState:
    """`begun` is the checkpoint that a resumed run goes on from; None where nothing was kept yet. `known` are the
    facts of what is trained, and `started` is when this process began with it."""

    def __init__(
        self,
        job: Job,
        server: Coordinator,
        folder: RunFolder,
        known: Mapping[str, Fact],
        started: float,
        *,
        resume: bool,
    ) -> None:
        self.job, self.server, self.folder = job, server, folder
        self._facts, self._started = dict(known), started
        self._saved_seconds = 0.0
        self.history: list[RoundMetrics] = []
        # Which of them a round belongs to follows from the rounds before it.
        self._trials = server if isinstance(server, Trials) else None
        self.begun = saved(folder, job.config, known) if resume else None
        if resume and not self.over:  # what is done asks for no more budget, whatever others spent since
            check_budget(job, None if self.begun is None else self.begun.run)
        if self.begun is not None:
            server.restore(self.begun.state, self.begun.clip_value)
            self._facts = dict(self.begun.facts) if self.over else with_commits(self.begun.facts, known)
            self._saved_seconds = self.begun.seconds
            self.history = folder.rewind(self.begun)
            check_scores(server, self.history, job.config, folder.path)
        if self._trials is not None:
            self._trials.history = self.history

    @property
    def over(self) -> bool:
        """Whether all rounds were done before."""
        return self.begun is not None and self.begun.state.round == self.job.config.federation.rounds

    @property
    def seconds(self) -> float:
        """Spent so far, in all processes."""
        return (self.begun.seconds if self.begun is not None else 0.0) + time.monotonic() - self._started

    def add_round(self, metrics: RoundMetrics) -> None:
        self.history.append(metrics)
        self.folder.add_round(asdict(metrics))

    def save(self, run: str, extra: Mapping[str, Any]) -> None:
        """Save a checkpoint of the run, under its name in ledgers."""
        self._saved_seconds = self.seconds
        state = Checkpoint(
            state=self.server.state,
            clip_value=self.server.clip_value,
            run=run,
            config=self.job.config,
            seconds=self._saved_seconds,
            facts=self._facts,
            extra=extra,
        )
        self.folder.save(state)

    def keep_model(self) -> None:
        """Write the parameters that the server has now into the module, and the module into the folder."""
        self.job.server.model.load(self.server.state.model)
        self.folder.save_model(self.job.server.model)

    def summary(self, guarantee: Guarantee | None, total: LedgerTotal | None) -> dict[str, Any]:
        """Write the model with its last parameters, then summarise the run: nothing that follows, least of all the
        user's code, may cost the model. The last checkpoint, the ledger and the plan decide all of the summary, so that
        a finished run is summarised again the same way."""
        self.keep_model()
        # What is said of the result is said of the settings that made it.
        job = self.job if self._trials is None else self._trials.chosen(self.job)
        try:
            closing, failed = self.server.closing(), []
        except Exception as error:  # the user's module or task may raise anything
            closing, failed = Closing(None, None), [f"the last model could not be examined ({one_line(error)})"]
        summary = summarise(job, self.history, guarantee, self._saved_seconds, closing, total)
        summary["warnings"] += failed
        if self._trials is not None:
            summary |= {**reached(job.server.model.task, self._trials.own), "tuning": self._trials.describe()}
        return {**summary, "provenance": provenance(job.config, self._facts, summary["engine"])}


log = logging.getLogger(__name__)

# Where the files lie, how many there are and who else trains decides nothing about a run.
_FREE_KEYS = frozenset({"run.out", "run.code", "run.checkpoint_every", "run.track", "run.workers"})


def saved(folder: RunFolder, config: Config, facts: Mapping[str, Fact]) -> Checkpoint | None:
    """The checkpoint to go on from; None where the run was interrupted before anything could be spent."""
    found = load_latest(folder.checkpoints)
    if found is None and folder.started():
        raise CheckpointError(f"{folder.path} holds a run that has begun but no checkpoint; restore one from a backup")
    if found is None:
        return None
    for line in found.damaged:
        log.warning("%s; going on from the checkpoint before it", line)
    check_same_run(folder.checkpoints, found, config, facts)
    return found


def check_same_run(folder: Path, checkpoint: Checkpoint, config: Config, facts: Mapping[str, Fact]) -> None:
    """A resumed run must be the same run: name everything in which it would not be.

    Where noise is drawn anew nobody expects the same bits, so what only rounds otherwise is said and not refused.
    """
    then, now = flat(checkpoint.config), flat(config)
    # Where the digests of all records are known, they decide, wherever the files lie.
    free = _FREE_KEYS | {"data.dir"} if ALL_RECORDS in facts else _FREE_KEYS
    differences = [
        f"{key} was {_shown(then.get(key))} and is {_shown(now.get(key))}"
        for key in sorted(then.keys() | now.keys())
        if key not in free and then.get(key) != now.get(key)
    ]
    repeated = config.privacy.noise == "seeded"
    for key, after in facts.items():
        before = checkpoint.facts.get(key)
        if key in TOLD or before == after:
            continue
        hidden = key.startswith("digest")  # nothing to read in one, and those of records are for no log
        line = f"the {key} is another" if hidden else f"the {key} was {_shown(before)} and is {_shown(after)}"
        if key in {*ROUNDING, PACKAGE} and not repeated:
            log.warning("%s since the run began; the rounds from here on may round otherwise", line)
        else:
            differences.append(line)
    if differences:
        raise CheckpointError(
            f"the checkpoint in {folder} belongs to another run: {'; '.join(differences)}; resume with what the run "
            "was started with, or start a new run"
        )


def check_scores(server: Coordinator, done: list[RoundMetrics], config: Config, folder: Path) -> None:
    """The module at the checkpoint's parameters must score what it scored then: whatever of its code no digest found
    would show here."""
    if not done:
        return
    (scores, loss), last = server.evaluate(), done[-1]
    if last.scores and scores.keys() != last.scores.keys():
        raise CheckpointError(
            f"the run in {folder} has the scores {', '.join(last.scores)}, and would go on with {', '.join(scores)}: "
            "give it the metrics that it was started with"
        )
    exact = config.privacy.noise == "seeded" and config.run.device == "cpu"
    if (scores, loss) == (last.scores, last.loss):
        return
    if exact or not math.isclose(loss, last.loss, rel_tol=1e-3, abs_tol=1e-6):
        raise CheckpointError(
            f"the model in {folder} had a loss of {last.loss:.9g}{_format_scores(last.scores)} after round "
            f"{last.round + 1}, and now has {loss:.9g}{_format_scores(scores)} with the same parameters: the code "
            "of its task, of its module or of its features is another; resume with what the run was started "
            "with, or start a new run"
        )


def _format_scores(scores: Mapping[str, float | None]) -> str:
    return "".join(f", {name} {value:.6g}" for name, value in scores.items() if value is not None)


def noise(job: Job) -> dict[str, str]:
    """What a checkpoint says of it where no ledger does: a server's agents keep theirs to themselves."""
    return {} if job.plan is None else {"event": job.plan.event.to_json()}


def check_same_noise(checkpoint: Checkpoint, job: Job) -> None:
    """Raise where the rounds of the checkpoint did not have the noise that the job would go on with."""
    if job.plan is not None:
        check_same_event(event_of(checkpoint.extra["event"]), job.plan.event)


def _shown(value: object) -> str:
    return "unset" if value is None else repr(value)
