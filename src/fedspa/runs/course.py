"""A run between its rounds, on the server's side: where it stands, what it has reached, and how it is kept. The
simulator and a deployment go through the same."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from fedspa.errors import one_line
from fedspa.runs.books import LedgerTotal, refuse_over_budget
from fedspa.runs.checkpoint import Checkpoint, Fact
from fedspa.runs.folder import RunFolder
from fedspa.runs.guarantee import Guarantee
from fedspa.runs.identity import provenance, with_commits
from fedspa.runs.metrics import RoundMetrics
from fedspa.runs.resume import refuse_other_scores, saved
from fedspa.runs.setup import Job
from fedspa.runs.summary import reached, summarise
from fedspa.runs.trials import Trials
from fedspa.server.coordinator import Coordinator
from fedspa.server.evaluation import Closing


class Course:
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
            refuse_over_budget(job, None if self.begun is None else self.begun.run)
        if self.begun is not None:
            server.restore(self.begun.state, self.begun.clip_value)
            self._facts = dict(self.begun.facts) if self.over else with_commits(self.begun.facts, known)
            self._saved_seconds = self.begun.seconds
            self.history = folder.rewind(self.begun)
            refuse_other_scores(server, self.history, job.config, folder.path)
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
        self.folder.save(state, self.job.config.run.keep)

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
            summary |= {**reached(job.server.model.task, self._trials.own), "tuning": self._trials.told()}
        return {**summary, "provenance": provenance(job.config, self._facts, summary["engine"])}
