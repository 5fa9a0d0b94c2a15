"""The run loop. Every run goes through it, whatever carries the bytes: this process, Ray's workers or Flower.

select agents ─► request ─► collect payloads ─► decode and add ─► move θ ─► evaluate ─► checkpoint
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from fedspa.agent.participate import Request
from fedspa.data.columns import Schema
from fedspa.data.dataset import Dataset
from fedspa.errors import ConfigError, PayloadError, one_line, quoted
from fedspa.learning.tasks import Baseline, Task
from fedspa.learning.tasks.totals import Totals
from fedspa.mechanisms import event_of
from fedspa.runs.checkpoint import (
    ALL_RECORDS,
    PACKAGE,
    REPORTED,
    ROUNDING,
    Checkpoint,
    CheckpointError,
    Fact,
    load_latest,
    provenance,
    with_commits,
)
from fedspa.runs.config import Config, flat
from fedspa.runs.guarantee import Guarantee, LedgerTotal, finite, not_private_because, promised, warnings
from fedspa.runs.run_ledger import check_budget, check_same_event
from fedspa.runs.rundir import RoundMetrics, RunFolder, Stopped, better, label, read_summary, shown_score
from fedspa.runs.setup import Job, Simulated
from fedspa.runs.trials import Trials, trials_of
from fedspa.secagg.masking import Void
from fedspa.server.coordinator import Coordinator, Diverged, TotalsServer
from fedspa.server.evaluation import Closing
from fedspa.server.intake import Intake, MaskedIntake
from fedspa.server.optimizers import ServerOptimizer


class Transport(Protocol):
    """Reaches the agents of a run: `LocalTransport` in this process or on Ray's workers, `FlowerTransport` over Flower.

    It alone knows who was asked for what. So it counts the run's guarantee, and says what a checkpoint must hold of it.
    `run` is the run's name in ledgers. With fewer than `quorum` updates θ stays where it is.
    """

    run: str

    @property
    def job(self) -> Job:
        """Return what is trained."""

    @property
    def guarantee(self) -> Guarantee | None:
        """Return what was promised to each agent so far; None where nothing is private."""

    @property
    def quorum(self) -> int:
        """Return the minimum number of updates that is needed to move θ."""

    def begin(self, history: Sequence[RoundMetrics]) -> None:
        """Make the agents ready for the round after `history`, or raise if the run cannot continue."""

    def select(self, t: int, cohort: Sequence[int]) -> tuple[int, list[int]]:
        """Return which attempt at round t this is, and which agents of the cohort it asks; none where a sum would have
        too few members."""

    def name(self, number: int) -> str:
        """Return the name of an agent in a sum."""

    def public_key(self, number: int) -> bytes:
        """Return the key by which others mask their updates towards this agent."""

    def collect(self, request: Request, mask_seeds: Mapping[int, bytes]) -> Iterator[tuple[int, bytes]]:
        """Ask each agent that has a mask seed, and yield number and payload of those that answer. What they spend is
        written down before the first of them is asked."""

    def recover(self, request: Request, intake: MaskedIntake) -> None:
        """Recover the sum over those who answered, where the request's session allows it."""

    def reject(self, request: Request, number: int, error: PayloadError) -> None:
        """Take note that the server could not use an agent's payload."""

    def close(self, request: Request, taken: Sequence[int], void: Void | None) -> None:
        """Take note of the agents whose payloads were used, and of a sum that failed."""

    def checkpoint(self) -> Mapping[str, Any]:
        """Return what a checkpoint must say of this transport, once what it refers to is durable."""

    def total(self) -> LedgerTotal | None:
        """Return what all runs cost in a ledger that outlives this one, if there is one."""

    def complete(self, summary: dict[str, Any]) -> None:
        """Add to the summary what only this transport knows."""


def server_of(job: Job, records: Dataset, sizes: set[int]) -> Coordinator:
    """Return the server of a run whose agents hold so many records each."""
    tuning = job.config.tuning
    if isinstance(job.server.model.task, Totals):
        return TotalsServer(job.server)
    if tuning.candidates is not None:
        return trials_of(job, records, sizes)
    if tuning.scored_by is not None:  # `fedspa tune`, which chooses the candidates, reads it without any
        raise ConfigError("tuning.scored_by is for tuning.candidates, and there are none: name some")
    return Coordinator(job.server)


@dataclass(frozen=True)
class Observer:
    """Follows a run and may stop it: called with the rounds of the last checkpoint, with the run's folder before the
    first round of this process, and with each round when its checkpoint was saved. `should_stop` is asked after each
    round but the last; after a yes the run is saved and `Stopped` is raised."""

    restored: Callable[[Sequence[RoundMetrics]], object] = lambda history: None
    started: Callable[[Path], object] = lambda folder: None
    finished_round: Callable[[RoundMetrics], object] = lambda metrics: None
    should_stop: Callable[[], bool] = lambda: False


@dataclass(frozen=True)
class Start:
    """A run that was prepared and checked. `facts` says what is trained, `started` when this process began with it,
    and `resume` is the folder of a run that was interrupted."""

    job: Job
    server: Coordinator
    facts: Mapping[str, Fact]
    started: float
    resume: Path | None = None

    def check(self) -> None:
        """Raise where a new run would exceed a budget, or where its task or metrics fail on the first model."""
        if self.resume is None:
            check_budget(self.job)
            self.server.try_scores()


def train(
    start: Start,
    connect: Callable[[RunState], AbstractContextManager[Transport]],
    observer: Observer,
) -> tuple[dict[str, Any], RunState]:
    """Run the federation from its last checkpoint to the end; return its summary.

    Raises:
        Stopped: The observer asked for it. The run was saved after a whole round and can be resumed.
        Diverged: The model is no longer finite. The last good parameters are in the run's folder.
    """
    job, server, resume = start.job, start.server, start.resume
    with RunFolder(job.config, job.data_name, resume) as folder:
        state = RunState(job, server, folder, start.facts, start.started, resume=resume is not None)
        observer.restored(state.history)
        with connect(state) as transport:
            if state.begun is None:  # the ledger exists now; resuming never creates it again
                state.save(transport.run, transport.checkpoint())
            if not state.over:
                observer.started(folder.path)
            transport.begin(state.history)
            for cohort in islice(job.cohorts(), len(state.history), None):
                _advance(state, transport, observer, cohort)
            summary = state.summary(transport.guarantee, transport.total())
            transport.complete(summary)
            if state.over:
                summary = _summarised_again(folder, summary)
        folder.finish(summary)
    return summary, state


def _advance(state: RunState, transport: Transport, observer: Observer, cohort: Sequence[int]) -> None:
    """Run the next round and save what it left."""
    config, folder = state.job.config, state.folder
    try:
        metrics = run_round(state.server, transport, cohort)
    except Diverged as error:
        raise Diverged(error.round, error.sign, folder.checkpoints) from error
    except Exception:
        with suppress(Exception):  # keep what was paid for; the first error is the one to raise
            state.keep_model()
        raise
    state.add_round(metrics)
    done = len(state.history)
    last = done == config.federation.rounds
    stopping = not last and observer.should_stop()
    if last or stopping or done % config.run.checkpoint_every == 0:
        state.save(transport.run, transport.checkpoint())
    observer.finished_round(metrics)
    if stopping:
        raise Stopped(folder.path, done, config)


def run_round(server: Coordinator, transport: Transport, cohort: Sequence[int]) -> RoundMetrics:
    """Run one pass of Algorithm 1's outer loop over those agents of the cohort that can take part."""
    job, terms, noise = transport.job, server.terms(), transport.job.config.privacy.noise
    attempt, agents = transport.select(terms.round, cohort)
    aggregated = terms.plan is not None and terms.plan.aggregation is not None
    session = None
    if aggregated and agents:
        members = {transport.name(number): transport.public_key(number) for number in agents}
        recovery = transport.job.config.privacy.recovery
        session = server.session(transport.run, attempt, members, terms, noise, recovery=recovery)
    intake: Intake | MaskedIntake | None = None
    if session is not None:
        intake = server.masked_intake(terms, session)
    elif not aggregated:
        intake = server.intake(terms, len(agents))
    request = Request(
        run=transport.run,
        algorithm=server.job.algorithm,
        terms=terms,
        theta=server.state.theta,
        coding=server.job.coding,
        noise=noise,
        attempt=attempt,
        session=session,
        models=server.models,
    )
    mask_seeds = {number: server.mask_seed(terms, number) for number in agents}
    taken = []
    for number, payload in transport.collect(request, mask_seeds):
        try:
            if isinstance(intake, MaskedIntake):
                intake.take(transport.name(number), payload)
            elif intake is not None:
                server.received(number, intake.take(payload, seed=mask_seeds[number]))
        except PayloadError as error:
            transport.reject(request, number, error)
        else:
            taken.append(number)
    if isinstance(intake, MaskedIntake) and session is not None and session.threshold:
        transport.recover(request, intake)
    if session is None and len(taken) < transport.quorum:
        intake = None
    void = server.close_round(intake)
    transport.close(request, taken, void)
    if intake is None or void is not None:
        return measured(job, server, transport.guarantee, 0, 0)
    return measured(job, server, transport.guarantee, intake.count, intake.uplink_bytes)


# Keys of a summary that neither checkpoint nor ledger decides: another machine may have another engine and rounding.
_OF_THE_MACHINE = ("engine", "engine_reason", "engine_hints", "tf32", "workers", "accuracy_by_class", "provenance")


def _summarised_again(folder: RunFolder, summary: dict[str, Any]) -> dict[str, Any]:
    """Return the summary of a finished run, with what the first one says of the machine that trained it."""
    before: dict[str, Any] = {}
    with suppress(ConfigError):  # it is damaged, and written again
        before = read_summary(folder.path) or {}
    return {**summary, **{key: before[key] for key in _OF_THE_MACHINE if key in before}}


class RunState:
    """`begun` is the checkpoint that a resumed run starts from; None where nothing was kept yet. `known` are the
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
            server.restore(self.begun.state)
            self._facts = dict(self.begun.facts) if self.over else with_commits(self.begun.facts, known)
            self._saved_seconds = self.begun.seconds
            self.history = folder.rewind(self.begun)
            check_scores(server, self.history, job.config, folder.path)
        if self._trials is not None:
            self._trials.history = self.history

    @property
    def over(self) -> bool:
        """Return whether all rounds were done before."""
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
            summary["warnings"] += scored_otherwise(job) if summary["tuning"]["scored_by"] == "agents" else []
        return {**summary, "provenance": provenance(job.config, self._facts, summary["engine"])}


log = logging.getLogger(__name__)

# Where the files lie, how many there are and who else trains decides nothing about a run.
_FREE_KEYS = frozenset({"run.out", "run.code", "run.checkpoint_every", "run.workers"})


def saved(folder: RunFolder, config: Config, facts: Mapping[str, Fact]) -> Checkpoint | None:
    """Return the checkpoint to resume from; None where the run was interrupted before anything could be spent."""
    found = load_latest(folder.checkpoints)
    if found is None and folder.started():
        raise CheckpointError(f"{folder.path} holds a run that has begun but no checkpoint; restore one from a backup")
    if found is None:
        return None
    for line in found.damaged:
        log.warning("%s; resuming from the checkpoint before it", line)
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
        if key in REPORTED or before == after:
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
            f"the run in {folder} has the scores {', '.join(last.scores)}, and would continue with {', '.join(scores)}"
            ": give it the metrics that it was started with"
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
    """Return what a checkpoint says of it where no ledger does: a server's agents keep theirs to themselves."""
    return {} if job.plan is None else {"event": job.plan.event.to_json()}


def check_same_noise(checkpoint: Checkpoint, job: Job) -> None:
    """Raise where the rounds of the checkpoint did not have the noise that the job would continue with."""
    if job.plan is not None:
        check_same_event(event_of(checkpoint.extra["event"]), job.plan.event)


def _shown(value: object) -> str:
    return "unset" if value is None else repr(value)


# What a round and a run come to: a line of metrics.jsonl, and one flat object for `--json`, summary.json and the
# screen.

TOGETHER = (
    "the engine of this run takes records together, so that the rounding of one may depend on another; a server that "
    "chooses its model to enlarge that could pass the clip, and a deployment takes none together so (docs/engines.md)"
)


def _takes_together(job: Simulated) -> bool:
    """Return whether rounding of one record may depend on another. Neighbours under Poisson sampling have a record more
    or less, and with it another number of slots: a simulation names no `max_records` (`fedspa.engine.local`)."""
    by_place = job.engine.takes_slots and job.config.privacy.sampling == "poisson"
    return by_place or not job.engine.separates_records


def measured(
    job: Job, server: Coordinator, guarantee: Guarantee | None, agents: int, uplink_bytes: int
) -> RoundMetrics:
    """Return the metrics of the round that the server has just closed, with the updates of so many agents."""
    scores, loss = server.evaluate()
    plan = job.plan
    return RoundMetrics(
        round=server.state.round - 1,
        accuracy=scores.get("accuracy"),
        loss=loss,
        agents=agents,
        uplink_bytes=uplink_bytes,
        epsilon=None if plan is None or guarantee is None else finite(guarantee.epsilon_max(plan.neighbours)),
        private=not_private_because(plan, job.config.privacy.noise) is None,
        clip_value=None if server.job.plan is None else server.job.plan.clip_value,  # of the trial, where there is one
        scores=scores,
        epsilon_worst_case=None if guarantee is None else finite(guarantee.epsilon_worst_case()),
        trials=server.scores_by_agents,
    )


def summarise(
    job: Job,
    history: Sequence[RoundMetrics],
    guarantee: Guarantee | None,
    seconds: float,
    closing: Closing,
    total: LedgerTotal | None = None,
) -> dict[str, Any]:
    """Return what was reached and what it cost. Privacy keys are None where the algorithm promises nothing.

    `epsilon` is the largest over agents in this run alone, by the accountant named beside it; `epsilon_total` adds
    the earlier runs of a ledger that outlives it, against a server that saw every upload, by `accountant_total`.
    `epsilon` is None, too, where seeded noise is too small for any ε. Where `members` says that at least so many
    uploads were aggregated, both are against the server with up to `colluders` of them, `epsilon_worst_case` and
    `epsilon_total_worst_case` against all others together, and null there is infinite. `uplink_bytes` is what an
    agent sent in the whole run (mean over all agents), `payload_bytes` one upload. `accuracy_by_class` is the last
    model's, None for a class without held-out records. `baseline` is what `baseline_answer`, which looks at no input,
    scores on the held-out records that it was chosen by: the server's own, so that nothing of an agent is in it.
    `adversary` says against whom ε holds; a plan adds keys of its own. `rounds_empty` had no update. `features` and
    `schema` are what it takes to use the model: how an image becomes its input, and what a table's columns mean.
    `agent_names` are those that the data brought, in the order of the agents' numbers.
    """
    config, server = job.config, job.server
    together = isinstance(job, Simulated) and _takes_together(job)
    uploads = sum(metrics.agents for metrics in history)
    sent = sum(metrics.uplink_bytes for metrics in history)
    empty = sum(metrics.agents == 0 for metrics in history)
    task = server.model.task
    baseline = task.baseline(server.test.y)
    return {
        "algorithm": config.algorithm.name,
        "task": task.name,
        **reached(task, history),
        "accuracy_by_class": closing.by_class,
        "baseline": None if baseline is None else baseline.score,
        "baseline_answer": None if baseline is None else baseline.answer,
        **promised(job.plan, guarantee, config.privacy.noise),
        "epsilon_total": None if total is None else total.epsilon,
        "epsilon_total_worst_case": None if total is None else total.worst_case,
        "accountant_total": None if total is None else total.accountant,
        "uplink_bytes": sent / config.federation.agents,
        "payload_bytes": sent / max(1, uploads),
        "coding": server.coding,
        "compression": job.plan.compression if job.plan is not None else server.terms.active / server.model.dimension,
        "dimension": server.model.dimension,
        "features": config.data.features,
        "schema": None if job.schema is None else job.schema.model_dump(exclude_none=True),
        "rounds": len(history),
        "rounds_empty": empty,
        "agents": config.federation.agents,
        "agent_names": list(job.agents) if isinstance(job, Simulated) and job.data.agents else None,
        **job.trained_by,
        "seconds": round(seconds, 3),
        "seed": config.run.seed,
        "warnings": [
            *warnings(config),
            *([task.headline_note] if task.headline_note else []),
            *([] if total is None or total.note is None else [total.note]),
            *([f"{empty} of {len(history)} rounds had no update and left the model as it was"] if empty else []),
            *([TOGETHER] if job.plan is not None and together else []),
            *_no_better(closing, baseline, history[-1], job.server.optimizer, job.schema),
        ],
    }


def reached(task: Task, history: Sequence[RoundMetrics]) -> dict[str, Any]:
    """Return the score that the task is judged by after these rounds, and accuracy under its own name."""
    best, last = _best_and_last(task.headline, [metrics.score for metrics in history])
    right = _best_and_last("accuracy", [math.nan if each.accuracy is None else each.accuracy for each in history])
    return {
        "score": task.headline,
        "score_best": best,
        "score_last": last,
        "scores": history[-1].scores,
        "accuracy_best": right[0],
        "accuracy_last": right[1],
    }


def _best_and_last(name: str, values: Sequence[float]) -> tuple[float | None, float | None]:
    known = [value for value in values if not math.isnan(value)]
    return better(name)(known) if known else None, None if math.isnan(values[-1]) else values[-1]


def scored_otherwise(job: Job) -> list[str]:
    """Say, of a run whose trials agents scored, where that was by something else than the run is judged by."""
    task = job.server.model.task
    if job.task.metric in (None, "accuracy"):
        return []
    how = "records whose class is found" if task.name == "classification" else "the mean of e^(-loss)"
    return [
        f"agents scored the trials by {how}, record by record, and not by {label(task.headline)}; to choose settings "
        "by that, hold out records of the server's own (data.holdout)"
    ]


def _no_better(
    closing: Closing,
    baseline: Baseline | None,
    last: RoundMetrics,
    optimizer: ServerOptimizer,
    schema: Schema | None,
) -> list[str]:
    """Warnings that the last model has learned nothing that shows."""
    found = []
    if (answer := closing.constant_prediction) is not None:
        names = None if schema is None else schema.class_names
        called = str(answer) if names is None else quoted(names[answer])
        found.append(f"the last model predicts class {called} for every held-out record")
    name, score = last.headline, last.score
    if baseline is not None and not math.isnan(score) and better(name)((score, baseline.score)) == baseline.score:
        # Where noise outweighs what was learned, a step that is scaled to one size is a step of noise.
        adaptive = (
            f"; the server's adam scales every step to about algorithm.server_lr = {optimizer.server_lr:g}: try "
            "algorithm.server = 'average'"
        )
        found.append(
            f"the last model is not better than no model: {label(name)} {shown_score(name, score)}, and "
            f"{shown_score(name, baseline.score)} by {baseline.answer} of the held-out records"
            + (adaptive if optimizer.step == "adam" else "")
        )
    return found
