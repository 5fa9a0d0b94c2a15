"""A run with trials in it: its first rounds try settings, the worse half is dropped, and the last one goes on.

Every round, of a trial or not, is a round of one run: the same event, the same plan, the next cohort of the same
schedule, an entry in the same ledger before anything is trained. So search and final training together cost what an
ordinary run of as many rounds costs, by the same accountant. What may be tried is what leaves the event as it is; how
the server moves θ, and from which θ a round starts, may depend on all earlier releases (docs/tuning.md).

Which trial a round belongs to follows from the scores of the rounds before it, so a resumed run needs no more than its
metrics and its tensors to go on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fedspa.algorithms import Terms
from fedspa.data.dataset import Dataset
from fedspa.errors import ConfigError
from fedspa.learning.tasks.own import Loss
from fedspa.privacy.event import same_event
from fedspa.runs.halving import Halving, Settings, settled
from fedspa.runs.metrics import RoundMetrics
from fedspa.runs.setup import Job, Simulated, prepare_server
from fedspa.secagg.total import Void
from fedspa.server.coordinator import Coordinator, Diverged
from fedspa.server.evaluation import Evaluated
from fedspa.server.intake import Intake
from fedspa.server.job import Metric, ServerJob
from fedspa.server.masked_intake import MaskedIntake
from fedspa.server.optimizers import ServerState


class Trials(Coordinator):
    """The server of a run with trials. `history` is the run's, a line for each round that is done.

    One candidate is at work at a time and its state is this coordinator's; those of the others wait, and are kept in
    checkpoints beside it until the search is over. A trial whose model diverges goes back to the first model, and has
    no score.
    """

    def __init__(self, jobs: Sequence[ServerJob], candidates: Sequence[Settings], halving: Halving) -> None:
        super().__init__(jobs[0])
        self._jobs, self.candidates, self.halving = jobs, candidates, halving
        self.history: Sequence[RoundMetrics] = []
        first = self._own.theta
        self._starts = [job.optimizer.start(first.clone()) for job in jobs]
        self._waiting = dict(enumerate(self._starts[1:], 1))
        self._at_work: int | None = 0

    @property
    def state(self) -> ServerState:
        """Of the candidate at work, in the round that the run is in; the others' tensors beside it."""
        others = {
            f"{number} {name}": tensor
            for number, state in self._waiting.items()
            for name, tensor in state.tensors.items()
        }
        return ServerState(self._own.theta, self._round, {**self._own.moments, **others})

    @state.setter
    def state(self, state: ServerState) -> None:
        moments = {name: tensor for name, tensor in state.moments.items() if " " not in name}
        self._own, self._round = ServerState(state.theta, 0, moments), state.round

    def restore(self, state: ServerState, clip_value: float | None) -> None:
        waiting: dict[int, dict[str, Any]] = {}
        for name, tensor in state.moments.items():
            number, _, own = name.partition(" ")
            if own:
                waiting.setdefault(int(number), {})[own] = tensor.to(self._own.theta)
        self._waiting = {number: ServerState.of_tensors(tensors, 0) for number, tensors in waiting.items()}
        self.state = ServerState.of_tensors(
            {n: each.to(self._own.theta) for n, each in state.tensors.items()}, state.round
        )
        self.clip_value = clip_value
        self._at_work = None  # the history, which says whose it is, is read after this

    @property
    def searching(self) -> bool:
        """Whether the round that the run is in is a trial's."""
        return self._round < self.halving.rounds

    def trial(self, t: int) -> int:
        """Whose round t is; all rounds before it must be done."""
        scores = [metrics.score for metrics in self.history[:t]]
        return self.halving.trial(scores, self.history[0].headline if self.history else "accuracy")

    @property
    def choice(self) -> int:
        """The candidate of the round that the run is in: the winner, once the search is over."""
        return self.trial(self._round)

    def chosen(self, job: Simulated) -> Simulated:
        """The job with the settings of the candidate that was chosen."""
        return replace(job, config=settled(job.config, self.candidates[self.choice]), server=self._jobs[self.choice])

    def terms(self) -> Terms:
        """Brings the candidate forward whose turn it is."""
        before = self._at_work if self._at_work is not None else self.trial(max(0, self._round - 1))
        now = self.choice
        if now != before:
            self._waiting[before] = self._own
            self._own = self._waiting.pop(now)
        if not self.searching:
            self._waiting.clear()
        self._at_work, self.job, self.clip_value = now, self._jobs[now], self._jobs[now].clip_value
        return super().terms()

    def close_round(self, intake: Intake | MaskedIntake | None) -> Void | None:
        trial, t = self.searching, self._round
        try:
            void = super().close_round(intake)
            if trial:
                super().evaluate()
        except Diverged:
            if not trial:
                raise
            assert self._at_work is not None  # since the round's terms
            self.state = replace(self._starts[self._at_work], round=t + 1)
            return None
        return void

    def evaluate(self) -> Evaluated:
        """Without scores after a trial's round that left the first model as it was: it diverged, or nothing came."""
        found = super().evaluate()
        tried = 0 < self._round <= self.halving.rounds
        if tried and torch.equal(self._own.theta, self._starts[0].theta):
            return Evaluated(dict.fromkeys(found.scores), found.loss)
        return found

    def told(self) -> dict[str, Any]:
        """For the summary: what was tried, in which rounds, with which scores, and what was chosen."""
        rounds = [self.trial(t) for t in range(min(len(self.history), self.halving.rounds))]
        return {
            "rounds": self.halving.rounds,
            "choice": self.choice,
            "trials": [
                {
                    "settings": dict(settings),
                    "rounds": [t for t, trial in enumerate(rounds) if trial == number],
                    "scores": [_plain(self.history[t].score) for t, trial in enumerate(rounds) if trial == number],
                }
                for number, settings in enumerate(self.candidates)
            ],
        }


def _plain(score: float) -> float | None:
    return None if math.isnan(score) else score


def server_of(
    job: Simulated,
    records: Dataset,
    module: nn.Module | None = None,
    task: Loss | None = None,
    metrics: Mapping[str, Metric] | None = None,
) -> Coordinator:
    """The server of a simulation, with the trials that its config asks for."""
    tuning = job.config.tuning
    if tuning.candidates is None:
        if tuning.rounds is not None or tuning.ahead is not None:
            raise ConfigError("tuning.rounds and tuning.ahead are of tuning.candidates, and there are none: name some")
        return Coordinator(job.server)
    halving = Halving.within(len(tuning.candidates), tuning.rounds, tuning.ahead)
    _refuse(job, halving)
    sizes = {len(held) for held in job.holdings}
    jobs = []
    for settings in tuning.candidates:
        server = prepare_server(settled(job.config, settings), records, sizes, module, task, metrics).server
        _refuse_another_event(job, server, settings)
        jobs.append(replace(server, model=job.server.model, engine=job.engine))
    return Trials(jobs, tuning.candidates, halving)


def _refuse(job: Job, halving: Halving) -> None:
    config = job.config
    if job.plan is None:
        raise ConfigError(f"{config.algorithm.name} spends no budget, so that tuning it needs no trials within a run")
    if halving.rounds >= config.federation.rounds:
        raise ConfigError(
            f"the trials take {halving.rounds} of federation.rounds = {config.federation.rounds} and leave none to "
            "train with: allow more rounds, or name fewer candidates"
        )
    if config.data.holdout == 0:
        raise ConfigError(
            "data.holdout is 0, so that trials would be scored on the very records that the result is judged by; hold "
            "out some of the server's own, as in data.holdout = 0.1 (agents do not score: each score would be a "
            "release more)"
        )
    if config.privacy.clip_rule != "given" or config.algorithm.lr_decay != "none":
        raise ConfigError(
            f"privacy.clip_rule is {config.privacy.clip_rule!r} and algorithm.lr_decay {config.algorithm.lr_decay!r}; "
            "trials begin in different rounds and are compared: they take 'given' and 'none'"
        )


def _refuse_another_event(job: Job, server: ServerJob, settings: Settings) -> None:
    """The one thing that the guarantee rests on."""
    assert job.plan is not None
    plan = server.plan
    if plan is None or not same_event(plan.event, job.plan.event) or plan.participations != job.plan.participations:
        raise ConfigError(
            f"the candidate {json.dumps(dict(settings), ensure_ascii=False)} has another event than the run, so that "
            "the plan would not pay for it; try settings that leave it as it is"
        )
