"""`fedspa watch`: follow a run from its folder. Nothing is locked, written or waited for."""

from __future__ import annotations

import math
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fedspa.cli.screen import INTERRUPTED
from fedspa.errors import ConfigError

if TYPE_CHECKING:
    from fedspa.runs.config import Config
    from fedspa.runs.rundir import RoundMetrics

State = Literal["running", "finished", "stopped", "failed", "killed"]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A run as its folder shows it now. `why` is the reason that a failed run left; a killed one left nothing."""

    config: Config
    metrics: tuple[RoundMetrics, ...]
    state: State
    why: str = ""


def watch(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    every: Annotated[float, typer.Option(min=0.1, max=3600, help="Seconds between two updates.")] = 1.0,
) -> None:
    """Print a line per round until the run is over, and how it ended. Ctrl-C stops watching, not the run.

    Exit code 0: the run is finished; 1: it was stopped or killed, or it failed.

    Example: fedspa watch runs/my-run
    """
    if math.isnan(every):  # within every range, to a comparison
        raise ConfigError("--every is nan; it must be a number of seconds")
    from fedspa.runs.guarantee import warnings

    signal.signal(signal.SIGINT, signal.default_int_handler)
    now, printer = snapshot(folder), RoundPrinter()
    for line in warnings(now.config):
        print(f"Note: {line}")
    try:
        while True:
            printer.show(now)
            if now.state != "running":
                break
            time.sleep(every)
            now = snapshot(folder)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    for line in describe_end(folder, now):
        print(line)
    if now.state != "finished":
        raise typer.Exit(1)


class RoundPrinter:
    """Prints a line for each round that it has not printed yet."""

    def __init__(self) -> None:
        self._printed = 0

    def __call__(self, folder: Path) -> None:
        """Print the new rounds of a run that may not have begun."""
        if (folder / "metrics.jsonl").exists():
            self.show(snapshot(folder))

    def show(self, now: Snapshot) -> None:
        for metrics in now.metrics[self._printed :]:
            print(format_round(now.config, metrics), flush=True)
        self._printed = len(now.metrics)


def format_round(config: Config, metrics: RoundMetrics) -> str:
    from fedspa.runs.guarantee import shown, shown_bytes
    from fedspa.runs.rundir import label, shown_score

    spent = "" if metrics.epsilon is None else f", ε {shown(metrics.epsilon)} ({terms(config, metrics)})"
    score = f"{label(metrics.headline)} {shown_score(metrics.headline, metrics.score)}"
    sent = shown_bytes(metrics.uplink_bytes)
    return f"round {metrics.round + 1} of {config.federation.rounds}: {score}{spent}, {sent}"


def describe_end(folder: Path, now: Snapshot) -> tuple[str, str]:
    """Return how the run ended, and what to do next."""
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


def terms(config: Config, metrics: RoundMetrics) -> str:
    """Return what the ε of a round is relative to."""
    from fedspa.mechanisms.base import relation
    from fedspa.privacy.budget import AGAINST_ALL, shown
    from fedspa.privacy.event import PLD
    from fedspa.runs.config import cohort_of
    from fedspa.runs.guarantee import observer

    privacy = config.privacy
    caveat = "" if metrics.private else "NOT PRIVATE, "
    if privacy.noise == "seeded":
        caveat = "NOT PRIVATE: SEEDED NOISE, "
    neighbours = relation(privacy.neighbours, privacy.sampling)
    unit = "record" if config.data.person is None else "person"
    of = f"{caveat}for each {unit}, δ = {privacy.delta:g}, {neighbours}, {privacy.sampling} sampling, {PLD}"
    cohort = cohort_of(config)
    if cohort is None:
        return of
    whom = observer({"members": cohort.members, "colluders": cohort.colluders})
    return f"{of}, against {whom}; worst case {shown(metrics.epsilon_worst_case)} {AGAINST_ALL}"


def snapshot(folder: Path) -> Snapshot:
    """Return the run in `folder`, now; a ConfigError where there is none."""
    from fedspa.runs import rundir
    from fedspa.runs.config import load
    from fedspa.runs.rundir import read_metrics

    rundir.check_is_run(folder)
    done = (folder / "summary.json").exists()  # before the metrics: once it is there, they are whole
    metrics = read_metrics(folder / "metrics.jsonl")
    state: State = "finished"
    why = ""
    if not done:
        state, why = _now(folder)
    return Snapshot(load(folder / "config.toml", own_code=False), metrics, state, why)


def _now(folder: Path) -> tuple[State, str]:
    """Return the state of a run that is not finished. If its lock cannot be seen, it is taken to be running."""
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
