"""A run with trials in it: its first rounds try settings, the worse half is dropped, and the last one continues.

Every round, of a trial or not, is a round of one run: the same event, the same plan, the next cohort of the same
schedule, an entry in the same ledger before anything is trained. So search and final training together cost what an
ordinary run of as many rounds costs, by the same accountant. What may be tried is what leaves the event as it is; how
the server moves θ, and from which θ a round starts, may depend on all earlier releases (docs/tuning.md).

Which trial a round belongs to follows from the scores of the rounds before it, so a resumed run needs no more than its
metrics and its tensors to resume.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from fedspa.algorithms import Terms
from fedspa.algorithms.base import deviation, score_terms, share
from fedspa.data.dataset import Dataset
from fedspa.errors import ConfigError
from fedspa.learning.validate import try_scores
from fedspa.runs.halving import Halving, Settings, Turn, settled
from fedspa.runs.rundir import RoundMetrics
from fedspa.runs.setup import Job, prepare_server
from fedspa.secagg.masking import Void
from fedspa.server.coordinator import Coordinator, Diverged, ServerJob
from fedspa.server.evaluation import Evaluated
from fedspa.server.intake import Intake, MaskedIntake
from fedspa.server.optimizers import ServerState

_Job = TypeVar("_Job", bound=Job)


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
        self._left: tuple[int, ...] = ()  # of the round that was announced last

    @property
    def state(self) -> ServerState:
        """Return the state of the candidate at work, in the run's round, with the others' tensors beside it."""
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

    def restore(self, state: ServerState) -> None:
        waiting: dict[int, dict[str, Any]] = {}
        for name, tensor in state.moments.items():
            number, _, own = name.partition(" ")
            if own:
                waiting.setdefault(int(number), {})[own] = tensor.to(self._own.theta)
        self._waiting = {number: ServerState.of_tensors(tensors, 0) for number, tensors in waiting.items()}
        self.state = ServerState.of_tensors(
            {n: each.to(self._own.theta) for n, each in state.tensors.items()}, state.round
        )
        self._at_work = None  # the history, which says whose it is, is read after this

    @property
    def searching(self) -> bool:
        """Return whether the round that the run is in is a trial's."""
        return self._round < self.halving.rounds

    def turn(self, t: int) -> Turn:
        """Return what round t is for; all rounds before it must be done."""
        scores = [metrics.score if metrics.trials is None else metrics.trials for metrics in self.history[:t]]
        return self.halving.turn(scores, self.history[0].headline if self.history else "accuracy")

    @property
    def choice(self) -> int:
        """Return the candidate of the round that the run is in: the winner, once the search is over."""
        return self.turn(self._round).trial

    @property
    def own(self) -> list[RoundMetrics]:
        """The rounds that made the model of the choice: what a dropped one scored is no score of the run's result."""
        turns = [self.turn(t) for t in range(min(len(self.history), self.halving.rounds))]
        dropped = {t for t, turn in enumerate(turns) if turn.scoring or turn.trial != self.choice}
        return [metrics for t, metrics in enumerate(self.history) if t not in dropped]

    def chosen(self, job: _Job) -> _Job:
        """Return the job with the settings of the candidate that was chosen."""
        return replace(job, config=settled(job.config, self.candidates[self.choice]), server=self._jobs[self.choice])

    def terms(self) -> Terms:
        """Brings the candidate forward whose turn it is."""
        before = self._at_work if self._at_work is not None else self.turn(max(0, self._round - 1)).trial
        now, scoring, left = self.turn(self._round)
        if now != before:
            self._waiting[before] = self._own
            self._own = self._waiting.pop(now)
        if not self.searching:
            self._waiting.clear()
        self._at_work, self.job = now, self._jobs[now]
        states = {**self._waiting, now: self._own}
        self.models = torch.stack([states[number].model for number in left]) if scoring else None
        self._left = left
        return super().terms()

    def intake(self, terms: Terms, most: int) -> Intake:
        return super().intake(terms if self.models is None else score_terms(terms, len(self.models)), most)

    def close_round(self, intake: Intake | MaskedIntake | None) -> Void | None:
        self.scores_by_agents = None
        if self.models is not None:
            self._close_scores(intake)
            return None
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

    def _close_scores(self, intake: Intake | MaskedIntake | None) -> None:
        """No model moves. Where nobody answered, or a trial left the first model as it was, there is no score."""
        assert self.models is not None
        means = [None] * len(self._left) if intake is None or not intake.count else intake.mean().tolist()
        tried = (not torch.equal(model, self._starts[0].theta) for model in self.models)
        self.scores_by_agents = {
            number: share(mean) if moved and mean is not None else None
            for number, moved, mean in zip(self._left, tried, means)
        }
        self._stay()

    def evaluate(self) -> Evaluated:
        """Without scores after a trial's round that left the first model as it was: it diverged, or nothing came."""
        found = super().evaluate()
        tried = 0 < self._round <= self.halving.rounds
        if tried and torch.equal(self._own.theta, self._starts[0].theta):
            return Evaluated(dict.fromkeys(found.scores), found.loss)
        return found

    def describe(self) -> dict[str, Any]:
        """Return for the summary what was tried, in which rounds, with which scores, and what was chosen."""
        turns = [self.turn(t) for t in range(min(len(self.history), self.halving.rounds))]
        asked = [t for t, turn in enumerate(turns) if turn.scoring]
        return {
            "rounds": self.halving.rounds,
            "choice": self.choice,
            "scored_by": "agents" if self.halving.scoring else "server",
            "scoring": {
                "rounds": asked,
                "deviation": [self._deviation(t, len(turns[t].left)) for t in asked],
            },
            "trials": [
                {
                    "settings": dict(settings),
                    "rounds": [t for t, turn in enumerate(turns) if turn.trial == number and not turn.scoring],
                    "scores": self._scores(number, turns),
                }
                for number, settings in enumerate(self.candidates)
            ],
        }

    def _scores(self, number: int, turns: Sequence[Turn]) -> list[float | None]:
        """That the candidate was judged by: the server's after each of its rounds, or the agents' after each rung."""
        if not self.halving.scoring:
            own = (self.history[t].score for t, turn in enumerate(turns) if turn.trial == number)
            return [None if math.isnan(score) else score for score in own]
        scored = (self.history[t].trials or {} for t, turn in enumerate(turns) if turn.scoring and number in turn.left)
        return [found.get(number) for found in scored]

    def _deviation(self, t: int, models: int) -> float | None:
        """Return the deviation of the noise in agents' scores in round t; None if nobody scored."""
        agents = self.history[t].agents
        return deviation(self.job.plan, models, agents) if agents else None


def trials_of(job: Job, records: Dataset, sizes: set[int]) -> Trials:
    """Return the server of a run with the trials that its config asks for; its agents hold so many records each."""
    tuning = job.config.tuning
    assert tuning.candidates is not None
    halving = Halving.within(len(tuning.candidates), tuning.rounds, tuning.expected_gains, scoring_rounds(job))
    _check_trials(job, halving)
    jobs = []
    for settings in tuning.candidates:
        server = prepare_server(settled(job.config, settings), records, sizes, job.given).server
        _check_same_plan(job, server, settings)
        jobs.append(replace(server, model=job.server.model, engine=job.server.engine))
    return Trials(jobs, tuning.candidates, halving)


def scoring_rounds(job: Job) -> int:
    """Return how many rounds of each rung agents score in; 0 if the server scores."""
    config, by = job.config, job.config.tuning.scored_by
    if by is None:
        by = "server" if config.data.holdout else "agents"
    if by == "server":
        if config.data.holdout == 0:
            raise ConfigError(
                "tuning.scored_by is 'server' and data.holdout is 0, so that trials would be scored on the very "
                "records that the result is judged by: hold out some of the server's own, as in data.holdout = 0.1, or "
                "let the 'agents' score"
            )
        return 0
    if job.plan is not None and job.plan.scoring(1) is None:
        raise ConfigError(
            f"agents cannot score under algorithm {config.algorithm.name!r} and privacy.adversary "
            f"{config.privacy.adversary!r}: they need Gaussian noise that each adds alone; hold out records of the "
            "server's own, as in data.holdout = 0.1"
        )
    try_scores(job.training.request.module, job.training.record, job.server.model.task)
    return 1


def _check_trials(job: Job, halving: Halving) -> None:
    config = job.config
    if job.plan is None:
        raise ConfigError(f"{config.algorithm.name} spends no budget, so that tuning it needs no trials within a run")
    if halving.rounds >= config.federation.rounds:
        raise ConfigError(
            f"the trials take {halving.rounds} of federation.rounds = {config.federation.rounds} and leave none to "
            "train with: allow more rounds, or name fewer candidates"
        )
    schedule, warmup = config.algorithm.schedule, config.algorithm.warmup
    if schedule != "constant" or warmup:
        raise ConfigError(
            f"algorithm.schedule is {schedule!r} and algorithm.warmup {warmup}; trials begin in different rounds and "
            "are compared: they take 'constant' and 0"
        )


def _check_same_plan(job: Job, server: ServerJob, settings: Settings) -> None:
    """The one thing that the guarantee rests on."""
    assert job.plan is not None
    plan = server.plan
    if plan is None or plan.event != job.plan.event or plan.participations != job.plan.participations:
        raise ConfigError(
            f"the candidate {json.dumps(dict(settings), ensure_ascii=False)} has another event than the run, so that "
            "the plan would not pay for it; try settings that leave it as it is"
        )
