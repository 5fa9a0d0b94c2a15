"""A run as its user starts it, from the config to the report: `fedspa.run`."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from itertools import islice
from pathlib import Path
from typing import Any

from torch import nn

from fedspa import report
from fedspa.data.dataset import Dataset
from fedspa.errors import ConfigError, RunWarning, SeededNoiseWarning, one_line, quoted, warn
from fedspa.learning.tasks import Loss
from fedspa.learning.threads import torch_threads
from fedspa.progress import Progress, watching
from fedspa.result import RunResult
from fedspa.runs import config as configs
from fedspa.runs.books import Books, refuse_over_budget
from fedspa.runs.config import Config
from fedspa.runs.course import Course
from fedspa.runs.ending import Stopping
from fedspa.runs.folder import RunFolder
from fedspa.runs.guarantee import SEEDED
from fedspa.runs.identity import digests_of, facts, refuse_ungiven, to_go_on, under_true_names
from fedspa.runs.metrics import RoundMetrics
from fedspa.runs.records import records_of
from fedspa.runs.setup import Simulated, prepare
from fedspa.runs.simulate import CAP_USED_UP, Simulation
from fedspa.runs.statement import SEEDED_NOISE
from fedspa.runs.trials import server_of
from fedspa.server.coordinator import Diverged
from fedspa.server.job import Metric
from fedspa.track import Tracking

log = logging.getLogger(__name__)


class Following(Tracking):
    """The tracker of a run, if it has one, and its report at the end, which can be made again."""

    def __init__(self, config: Config, folder: Path) -> None:
        super().__init__(config, folder)
        self._path = folder

    def finish(self, summary: Mapping[str, Any]) -> None:
        super().finish(summary)
        try:
            report.write([self._path], self._path / "report.html")
        except Exception as error:  # the run is over and written: nothing of a report may end it in an error
            log.warning("there is no report: %s; `fedspa report %s` tries again", one_line(error), self._path)


class Stopped(Stopping):
    """A run that was asked to stop did, after a whole round, and can be resumed."""

    def __init__(self, folder: Path, done: int, config: Config) -> None:
        super().__init__(
            f"stopped after round {done} of {config.federation.rounds}; to go on: {to_go_on(config, folder)}"
        )


def run(
    config: Config | Mapping[str, Any] | Path | str | None = None,
    *,
    data: Dataset | None = None,
    module: nn.Module | None = None,
    task: str | Loss | None = None,
    metrics: Mapping[str, Metric] | None = None,
    resume: Path | str | None = None,
    progress: bool | Progress | None = None,
    on_start: Callable[[Simulated, Path], None] | None = None,
    on_round: Callable[[RoundMetrics], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> RunResult:
    """Train a federation in this process, under a stated privacy guarantee.

    Everything is checked before anything is written. Killed at any instant and resumed, a run ends as if it had never
    been killed. Every agent spends of its own budget, in the run's ledger, before it trains.

    Args:
        config: The path of a TOML file, the same as a nested mapping, a `Config`, or None for the quickstart, which
            learns scikit-learn's digits in seconds. Unset keys have defaults; a private run needs `privacy.epsilon`.
        data: Records in place of those that the config names, made by `from_arrays`, `from_examples`, `from_agents`,
            `from_partitioner` or `from_table`.
        module: A `torch.nn.Module` in place of the model that the config names. It is trained in place.
        task: What is learned: a name, as `task.name` has, or a function loss(module, example) that gives one number for
            a batch of examples.
        metrics: Functions of all held-out outputs and targets, by name: scores beside the task's own.
        resume: The folder of an interrupted run. Without a `config`, its own is used; one that differs is refused.
        progress: Whether to show the rounds as they go by. By default that is so in terminals and notebooks.
        on_start: Called once everything is ready, with what was made ready and the run's folder.
        on_round: Called after each round, with its metrics.
        stop: Asked after each round; where it says True, the run is saved and `Stopped` is raised.

    Returns:
        What the run reached, what it promises, and the trained module.

    Raises:
        FedspaError: Something that was given is not allowed, or cannot be done; one line says what and what to do.

    Warns:
        SeededNoiseWarning: The noise follows from a seed: nothing of the run is private.
        MixingWarning: The module compares the examples of a batch, and trains otherwise than it evaluates.
        RunWarning: What the reader of ε or of the score must know, as in `summary["warnings"]`.

    Examples:
        >>> import fedspa
        >>> result = fedspa.run({
        ...     "federation": {"agents": 4, "rounds": 2, "per_round": 2},
        ...     "algorithm": {"compression": 0.1},
        ...     "privacy": {"epsilon": 2.0},
        ... })
        >>> result.summary["epsilon"] <= 2.0
        True
        >>> type(result.module).__name__
        'Sequential'
    """
    started = time.monotonic()
    if metrics is not None and not (isinstance(metrics, Mapping) and all(map(callable, metrics.values()))):
        raise ConfigError(f"metrics is {quoted(metrics)}; give functions of outputs and targets by name, as a dict")
    for name in metrics or ():
        if not isinstance(name, str) or not name.isprintable() or name in RoundMetrics.__slots__:
            raise ConfigError(f"a metric is called {quoted(name)}; give it a name that no other figure of a round has")
    for name, called in (("on_start", on_start), ("on_round", on_round), ("stop", stop)):
        if called is not None and not callable(called):
            raise ConfigError(f"{name} is {quoted(called)}; give a function, or leave it out")
    if resume is not None and not _holds_a_run(Path(resume)):
        raise ConfigError(f"resume is {quoted(str(resume))}, which holds no run: there is no config.toml")
    if resume is not None and config is None:
        config = Path(resume) / "config.toml"
    config = config if isinstance(config, Config) else configs.load(config)
    if resume is not None:
        refuse_ungiven(config, Path(resume), data=data, module=module, task=task)
    if isinstance(task, str):
        config, task = configs.with_task(config, task), None
    config = under_true_names(config, data, module, task)
    own = nullcontext(progress) if isinstance(progress, Progress) else watching(config, progress)
    with own as told:
        result = _simulated(config, data, module, task, metrics, resume, told, on_start, on_round, stop, started)
    for note in result.summary["warnings"]:
        if not note.startswith(SEEDED):  # of which one is warned before it begins
            warn(note, RunWarning)
    return result


# What the package's own code calls it: there `run` is a section of the config, a room and a folder.
simulate = run


def _simulated(
    config: Config,
    data: Dataset | None,
    module: nn.Module | None,
    task: Loss | None,
    metrics: Mapping[str, Metric] | None,
    resume: Path | str | None,
    progress: Progress,
    on_start: Callable[[Simulated, Path], None] | None,
    on_round: Callable[[RoundMetrics], None] | None,
    stop: Callable[[], bool] | None,
    started: float,
) -> RunResult:
    records = records_of(config, data, module)
    with ThreadPoolExecutor(1) as beside:
        digests = beside.submit(digests_of, records)
        job = prepare(config, records, module, task, metrics)
    config = job.config
    if config.private and config.privacy.noise == "seeded":
        warn(SEEDED_NOISE, SeededNoiseWarning)
    if resume is None:
        refuse_over_budget(job)
    server = server_of(job, records, {len(held) for held in job.holdings}, module, task, metrics)
    simulation, known = Simulation(job, server), facts(job, digests.result())
    if resume is None:
        simulation.server.try_scores()
    with (
        simulation.workers(),
        RunFolder(config, job.data_name, Following)
        if resume is None
        else RunFolder.reopen(Path(resume), config, Following) as folder,
    ):
        course = Course(job, simulation.server, folder, known, started, resume=resume is not None)
        done, module = course.history, job.server.model.module
        progress.resumed(done)
        with Books(job, folder.path, course.begun) as books, torch_threads(1):
            if course.begun is None:  # the ledger is there: from this checkpoint on it is never made again
                books.settle()
                course.save(books.run, books.kept)
            if on_start is not None and not course.over:
                on_start(job, folder.path)
            if resume is not None:
                books.catch_up(islice(job.cohorts(), len(done)), sum(metrics.agents for metrics in done))
            folder.begin()
            for cohort in islice(job.cohorts(), len(done), None):
                try:
                    measured = simulation.round(cohort, books)
                except Diverged as error:
                    raise Diverged(error.round, error.sign, folder.checkpoints) from error
                except Exception:
                    with suppress(Exception):  # keep what was paid for; the first error is the one to raise
                        course.keep_model()
                    raise
                course.add_round(measured)
                last = len(done) == config.federation.rounds
                stopping = not last and stop is not None and stop()
                if last or stopping or len(done) % config.run.checkpoint_every == 0:
                    books.settle()
                    course.save(books.run, books.kept)
                progress.advance(measured)
                if on_round is not None:
                    on_round(measured)
                if stopping:
                    raise Stopped(folder.path, len(done), config)
            summary = course.summary(books.guarantee, books.total())
            if books.skipped:
                summary["warnings"].append(f"{books.skipped} participations were skipped: {CAP_USED_UP}")
            if course.over:
                summary = _summarised_again(folder, summary)
        folder.finish(summary)
    return RunResult(summary, done, module, folder.path)


# Keys of a summary that neither checkpoint nor ledger decides: another machine may have another engine and rounding.
_OF_THE_MACHINE = ("engine", "engine_reason", "engine_hints", "tf32", "workers", "accuracy_by_class", "provenance")
_MAY_CHANGE = ("seconds", "tuning", "epsilon_total", "epsilon_total_floor", "accountant_total", "warnings")


def _summarised_again(folder: RunFolder, summary: dict[str, Any]) -> dict[str, Any]:
    """The summary of a finished run, with what the first one says of the machine that trained it. Warns where
    summary.json is not what checkpoint and ledger give: nothing else would notice a damaged ε. Other runs in a shared
    ledger may change the total."""
    before, now = folder.summary(), json.loads(json.dumps(summary))
    if before is None:
        return summary
    free = {*_OF_THE_MACHINE, *_MAY_CHANGE}
    changed = [key for key in now if key not in free and before.get(key) != now[key]]
    if changed:
        log.warning(
            "summary.json in %s was damaged: it said %s, which the run's checkpoint and ledger contradict; it is "
            "written again",
            *(folder.path, ", ".join(f"{key} {quoted(before.get(key))}" for key in changed)),
        )
    return {**summary, **{key: before[key] for key in _OF_THE_MACHINE if key in before}}


def _holds_a_run(folder: Path) -> bool:
    try:
        return (folder / "config.toml").is_file()
    except (OSError, ValueError):  # a name that no folder can have
        return False
