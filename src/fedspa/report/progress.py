"""A run seen from outside, while it runs: what its folder says now. Nothing is locked, written or waited for."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fedspa.errors import ConfigError
from fedspa.report.read import read_metrics
from fedspa.runs import ending, project
from fedspa.runs.config import Config, load
from fedspa.runs.metrics import RoundMetrics, better

State = Literal["running", "finished", "stopped", "failed", "killed"]
_BLOCKS = "▁▂▃▄▅▆▇█"


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
    path, log = folder / "config.toml", folder / "metrics.jsonl"
    if not path.is_file():
        raise ConfigError(f"{folder} holds no run (there is no config.toml in it); give the folder of one")
    project.refuse(folder)
    problems: list[str] = []
    done = (folder / "summary.json").exists()  # before the metrics: once it is there, they are whole
    metrics = tuple(read_metrics(log, problems))
    if problems:
        raise ConfigError(f"{folder}: {problems[0]}")
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
    return ending.read(folder) or ("killed" if locked is False else "running", "")


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
