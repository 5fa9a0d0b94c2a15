"""A run as its user starts it, from the config to the report: `fedspa.run`; and its progress, in one line."""

from __future__ import annotations

import html
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from fedspa import report
from fedspa.data.dataset import Dataset
from fedspa.errors import ConfigError, RunWarning, SeededNoiseWarning, quoted, warn
from fedspa.learning.forward import torch_threads
from fedspa.learning.tasks import Loss, Metric
from fedspa.privacy.event import shown
from fedspa.result import RunResult
from fedspa.runs import config as configs
from fedspa.runs.checkpoint import digests_of, facts, record_inputs
from fedspa.runs.config import Config
from fedspa.runs.guarantee import SEEDED, SEEDED_NOISE, shown_bytes
from fedspa.runs.local import LocalTransport
from fedspa.runs.loop import Observer, RunState, Start, server_of, train
from fedspa.runs.run_ledger import RunLedger, with_ledger
from fedspa.runs.rundir import RoundMetrics, check_given, check_is_run, shown_score
from fedspa.runs.setup import Given, Simulated, prepare, records_of

if TYPE_CHECKING:
    from rich.console import Console

    from fedspa.runs.ray_workers import WorkerPool


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
        data: Records in place of those that the config names, made by `from_arrays`, `from_examples`, `from_agents`
            or `from_table`.
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
    if resume is not None:
        check_is_run(Path(resume))
        config = Path(resume) / "config.toml" if config is None else config
    config = config if isinstance(config, Config) else configs.load(config)
    if resume is not None:
        check_given(config, Path(resume), data=data, module=module, task=task)
    if isinstance(task, str):
        config, task = configs.with_task(config, task), None
    config = with_ledger(record_inputs(config, data, module, task), None if resume is None else Path(resume))
    with nullcontext(progress) if isinstance(progress, Progress) else watching(config, progress) as display:
        records = records_of(config, data, module)
        with ThreadPoolExecutor(1) as beside:
            digests = beside.submit(digests_of, records)
            job = prepare(config, records, Given(module, task, metrics))
        if config.private and config.privacy.noise == "seeded":
            warn(SEEDED_NOISE, SeededNoiseWarning)
        folder = None if resume is None else Path(resume)
        server = server_of(job, records, {len(held) for held in job.holdings})
        start = Start(job, server, facts(job, digests.result()), started, folder)
        start.check()

        @contextmanager
        def in_process(state: RunState) -> Iterator[LocalTransport]:
            with RunLedger(job, state.folder.path, state.begun) as accounts, torch_threads(1):
                yield LocalTransport(job, accounts, pool)

        def finished(metrics: RoundMetrics) -> None:
            display.advance(metrics)
            if on_round is not None:
                on_round(metrics)

        def begun(path: Path) -> None:
            if on_start is not None:
                on_start(job, path)

        workers: AbstractContextManager[WorkerPool | None] = nullcontext()
        if job.config.run.workers > 1:
            from fedspa.runs.ray_workers import start_workers

            workers = start_workers(job)
        with workers as pool:
            observer = Observer(display.resumed, begun, finished, stop or (lambda: False))
            summary, state = train(start, in_process, observer)
    report.write_or_warn(state.folder.path)
    result = RunResult(summary, state.history, job.server.model.module, state.folder.path)
    for note in result.summary["warnings"]:
        if not note.startswith(SEEDED):  # of which one is warned before it begins
            warn(note, RunWarning)
    return result


Show = Callable[[int, str], None]  # rounds that are done, and words


class Progress:
    """Formats the state of a run for whatever displays it."""

    def __init__(self, config: Config, show: Show) -> None:
        self._config, self._show = config, show
        self._done = self._sent = 0

    def resumed(self, history: Sequence[RoundMetrics]) -> None:
        """Continue after these rounds."""
        self._done, self._sent = len(history), sum(metrics.uplink_bytes for metrics in history)

    def advance(self, metrics: RoundMetrics) -> None:
        """A round is done."""
        self._done, self._sent = metrics.round + 1, self._sent + metrics.uplink_bytes
        privacy = self._config.privacy
        flaw = "" if metrics.private else f" ({not_private(privacy.noise)})"
        worst = f" (worst case {shown(metrics.epsilon_worst_case)})" if privacy.adversary != "local" else ""
        spent = "" if metrics.epsilon is None else f"  ε {shown(metrics.epsilon)}{worst}{flaw}"
        self.say(f"{shown_score(metrics.headline, metrics.score)}{spent}  {shown_bytes(self._sent)}")

    def say(self, words: str) -> None:
        self._show(self._done, words)


def not_private(noise: str | None) -> str:
    """Return what stands beside an ε that is no guarantee."""
    return "SEEDED NOISE: not private" if noise == "seeded" else "not private"


@contextmanager
def watching(config: Config, asked: bool | None, console: Console | None = None) -> Iterator[Progress]:
    """The progress of a run, where there is somebody to see it or it was `asked` for: a bar in terminals and notebooks,
    else a line per round on standard error."""
    from rich.console import Console

    screen = console if console is not None else Console(stderr=True)
    rounds = config.federation.rounds
    if asked is False or (asked is None and not screen.is_terminal and not screen.is_jupyter):
        yield Progress(config, lambda done, words: None)
        return
    with _on(screen, rounds) as show:
        progress = Progress(config, show)
        with _log_features(progress.say):
            yield progress


@contextmanager
def _on(screen: Console, rounds: int) -> Iterator[Show]:
    if screen.is_jupyter:
        yield _in_notebook(rounds)
    elif not screen.is_terminal:
        yield lambda done, words: print(f"round {done} of {rounds}  {words}", file=sys.stderr, flush=True)
    else:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Columns

        text = TextColumn("{task.description}", markup=False)
        columns = (TextColumn("round"), MofNCompleteColumn(), BarColumn(bar_width=14), TimeRemainingColumn(), text)
        with Columns(*columns, console=screen) as bar:
            task = bar.add_task("", total=rounds)
            yield lambda done, words: bar.update(task, completed=done, description=words)


def _in_notebook(rounds: int) -> Show:
    """Display by IPython alone: rich needs ipywidgets in notebooks, which few have."""
    from IPython.display import HTML, display

    handle = display(HTML(""), display_id=True)

    def show(done: int, words: str) -> None:
        bar = f'<progress value="{done}" max="{rounds}"></progress>'
        handle.update(HTML(f"{bar} round {done} of {rounds} &nbsp; {html.escape(words)}"))

    return show


@contextmanager
def _log_features(tell: Callable[[str], None]) -> Iterator[None]:
    """The first pass through a frozen body can take minutes: pass on what it logs meanwhile."""
    logger, handler = logging.getLogger("fedspa.learning.features"), logging.Handler()
    handler.emit = lambda record: tell(record.getMessage())  # type: ignore[method-assign]
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
