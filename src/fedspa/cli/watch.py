"""`fedspa watch`: a running run in the terminal, from its folder."""

from __future__ import annotations

import math
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fedspa.cli import interrupt
from fedspa.errors import ConfigError, real_path

if TYPE_CHECKING:
    from rich.table import Table

    from fedspa.runs.config import Config
    from fedspa.runs.metrics import RoundMetrics

State = Literal["running", "finished", "stopped", "failed", "killed"]
_BLOCKS = "▁▂▃▄▅▆▇█"


def watch(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    every: Annotated[float, typer.Option(min=0.1, max=3600, help="Seconds between two looks.")] = 1.0,
) -> None:
    """Follow a run until it is over, and say how it ended. Ctrl-C stops watching, not the run.

    Exit code 0: the run is finished; 1: it was stopped or killed, or it failed.

    Example: fedspa watch runs/my-run
    """
    if math.isnan(every):  # within every range, to a comparison
        raise ConfigError("--every is nan; it must be a number of seconds")
    from rich.console import Console
    from rich.live import Live

    signal.signal(signal.SIGINT, signal.default_int_handler)  # the terminal's cursor is to come back
    screen = Console()
    first = now = snapshot(folder)
    try:
        if screen.is_terminal:
            with Live(screenful(folder, now, None), console=screen, refresh_per_second=4) as live:
                while now.state == "running":
                    time.sleep(every)
                    now = snapshot(folder)
                    live.update(screenful(folder, now, first))
        else:
            now = _follow(folder, every)
    except KeyboardInterrupt:
        raise typer.Exit(interrupt.EXIT_CODE) from None
    how, then = over(folder, now)
    screen.print(how, highlight=False, markup=False)
    screen.print(then, highlight=False, markup=False, soft_wrap=True)  # to be copied
    if now.state != "finished":
        raise typer.Exit(1)


def over(folder: Path, now: Snapshot) -> tuple[str, str]:
    """How the run ended, and what to do next."""
    from fedspa.runs.rundir import resume_command

    rounds = f"after round {len(now.metrics)} of {now.config.federation.rounds}"
    if now.state == "finished":
        return f"The run is over: finished, all {len(now.metrics)} rounds.", f"report: {folder / 'report.html'}"
    how = {
        "failed": f"it failed {rounds}: {now.why}",
        "stopped": f"it was stopped {rounds}.",
        "killed": f"it was killed {rounds}: the process is gone and wrote no exit status.",
    }
    return f"The run is over: {how[now.state]}", f"to resume: {resume_command(now.config, folder)}"


def _follow(folder: Path, every: float) -> Snapshot:
    """One line per round, for what is no terminal; the last look."""
    from fedspa.runs.guarantee import shown, shown_bytes
    from fedspa.runs.metrics import label, shown_score

    seen = 0
    while True:
        now = snapshot(folder)
        for metrics in now.metrics[seen:]:
            spent = "" if metrics.epsilon is None else f", ε {shown(metrics.epsilon)} ({terms(now, metrics)})"
            score = f"{label(metrics.headline)} {shown_score(metrics.headline, metrics.score)}"
            print(
                f"round {metrics.round + 1} of {now.config.federation.rounds}: {score}{spent}, "
                f"{shown_bytes(metrics.uplink_bytes)}",
                flush=True,
            )
        seen = len(now.metrics)
        if now.state != "running":
            return now
        time.sleep(every)


def terms(now: Snapshot, metrics: RoundMetrics) -> str:
    """What the ε of a round is relative to."""
    from fedspa.mechanisms.base import relation
    from fedspa.privacy.cap import AGAINST_ALL, shown
    from fedspa.runs.guarantee import observer
    from fedspa.runs.plans import algorithm_of, cohort_of, flat

    privacy = now.config.privacy
    mechanism = algorithm_of(now.config).mechanism
    accountant = "pld" if mechanism is None else mechanism.accountant(flat(now.config))
    flaw = "" if metrics.private else "NOT PRIVATE, "
    if privacy.noise == "seeded":
        flaw = "NOT PRIVATE: SEEDED NOISE, "
    neighbours = relation(privacy.neighbours, privacy.sampling)
    unit = "record" if now.config.data.person is None else "person"
    of = f"{flaw}for each {unit}, δ = {privacy.delta:g}, {neighbours}, {privacy.sampling} sampling, {accountant}"
    cohort = cohort_of(now.config)
    if cohort is None:
        return of
    whom = observer({"members": cohort.members, "colluders": cohort.colluders})
    return f"{of}, against {whom}; floor {shown(metrics.epsilon_floor)} {AGAINST_ALL}"


def screenful(folder: Path, now: Snapshot, first: Snapshot | None) -> Table:
    """One screen about a run. `first` is an earlier look, for the time that is left."""
    from datetime import timedelta

    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    from fedspa.runs.guarantee import shown, shown_bytes, warnings
    from fedspa.runs.metrics import label, shown_score

    rounds, done = now.config.federation.rounds, len(now.metrics)
    table = Table(box=None, show_header=False, title=Text(real_path(folder).name), title_justify="left")
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    left = now.seconds_left(first) if now.state == "running" else None
    ending = "" if left is None else f", {timedelta(seconds=round(left))} left"
    table.add_row("round", f"{done} of {rounds}, {now.state}{ending}")
    table.add_row("", ProgressBar(total=rounds, completed=done, width=50))
    if now.metrics:
        last = now.metrics[-1]
        name, best = last.headline, now.best
        table.add_row(
            label(name),
            f"{shown_score(name, last.score)}, best {shown_score(name, best.score)} in round {best.round + 1}",
        )
        table.add_row("", sparkline([metrics.score for metrics in now.metrics], 50))
        table.add_row("loss", f"{last.loss:.4f}")
        if last.epsilon is not None:
            table.add_row("ε so far", Text(f"{shown(last.epsilon)} ({terms(now, last)})"))
        table.add_row("uploaded", f"{shown_bytes(now.sent)} by all agents, {shown_bytes(last.uplink_bytes)} last round")
    for line in warnings(now.config):
        table.add_row(Text("note", style="red"), Text(line))
    return table


@dataclass(frozen=True, slots=True)
class Snapshot:
    """`at` is when the last round ended and `started` when the run did, in the file system's seconds. `why` is what a
    run that failed left as its reason. One that was killed left nothing, not even its lock."""

    config: Config
    metrics: tuple[RoundMetrics, ...]
    state: State
    started: float
    at: float
    why: str = ""

    @property
    def left(self) -> int:
        return self.config.federation.rounds - len(self.metrics)

    @property
    def sent(self) -> int:
        return sum(metrics.uplink_bytes for metrics in self.metrics)

    @property
    def best(self) -> RoundMetrics:
        from fedspa.runs.metrics import better

        known = [metrics for metrics in self.metrics if not math.isnan(metrics.score)] or self.metrics[-1:]
        wanted = better(self.metrics[-1].headline)(metrics.score for metrics in known)
        return next((metrics for metrics in known if metrics.score == wanted), known[-1])

    def seconds_left(self, earlier: Snapshot | None = None) -> float | None:
        """From the rounds since `earlier`, where there are any; else from all of them, of a run that was never
        resumed. None where none is done."""
        done = len(self.metrics) - (0 if earlier is None else len(earlier.metrics))
        if done > 0 and earlier is not None:
            return (self.at - earlier.at) / done * self.left
        return (self.at - self.started) / len(self.metrics) * self.left if self.metrics else None


def snapshot(folder: Path) -> Snapshot:
    """The run in `folder`, now; a ConfigError where there is none."""
    from fedspa.report.record import read_metrics
    from fedspa.runs import rundir
    from fedspa.runs.config import load

    path, log = folder / "config.toml", folder / "metrics.jsonl"
    if not path.is_file():
        raise ConfigError(f"{folder} holds no run (there is no config.toml in it); give the folder of one")
    rundir.check_is_run(folder)
    done = (folder / "summary.json").exists()  # before the metrics: once it is there, they are whole
    metrics = read_metrics(log)
    started = path.stat().st_mtime
    state: State = "finished"
    why = ""
    if not done:
        state, why = _now(folder)
    return Snapshot(
        config=load(path, own_code=False),
        metrics=metrics,
        state=state,
        started=started,
        at=log.stat().st_mtime if metrics else started,
        why=why,
    )


def sparkline(values: list[float], width: int) -> str:
    """The last `width` values as blocks, between the smallest and the largest of them; NaN is none."""
    values = [value for value in values if not math.isnan(value)][-width:]
    low, high = min(values, default=0.0), max(values, default=0.0)
    span = (high - low) or 1.0
    return "".join(_BLOCKS[min(7, int((value - low) / span * 8))] for value in values)


def _now(folder: Path) -> tuple[State, str]:
    """Of a run that is not finished. Where nobody can tell whether it is on, it is taken to be, until it says else."""
    locked = _locked(folder)
    if locked:
        return "running", ""
    from fedspa.runs import rundir

    return rundir.read_ending(folder) or ("killed" if locked is False else "running", "")


def _locked(folder: Path) -> bool | None:
    """Whether a process of this machine runs it, from the kernel's list: trying the lock could refuse it to a run. None
    where there is no such list."""
    try:
        lines = Path("/proc/locks").read_text("ascii").splitlines()
        status = folder.stat()
    except (OSError, ValueError):
        return None
    file = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    return any("FLOCK" in line and file in line.split() for line in lines)
