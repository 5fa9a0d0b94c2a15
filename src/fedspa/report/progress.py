"""A run seen from outside, while it runs: what its folder says now. Nothing is locked, written or waited for."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fedspa.errors import ConfigError
from fedspa.report.read import read_metrics
from fedspa.runs.config import Config, load
from fedspa.runs.metrics import RoundMetrics, better

_BLOCKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """`at` is when the last round ended and `started` when the run did, in the file system's seconds."""

    config: Config
    metrics: tuple[RoundMetrics, ...]
    state: Literal["running", "finished", "interrupted"]
    started: float
    at: float

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
    problems: list[str] = []
    done = (folder / "summary.json").exists()  # before the metrics: once it is there, they are whole
    metrics = tuple(read_metrics(log, problems))
    if problems:
        raise ConfigError(f"{folder}: {problems[0]}")
    started = path.stat().st_mtime
    return Snapshot(
        config=load(path),
        metrics=metrics,
        state="finished" if done else "running" if _locked(folder) else "interrupted",
        started=started,
        at=log.stat().st_mtime if metrics else started,
    )


def sparkline(values: list[float], width: int) -> str:
    """The last `width` values as blocks, between the smallest and the largest of them; NaN is none."""
    values = [value for value in values if not math.isnan(value)][-width:]
    low, high = min(values, default=0.0), max(values, default=0.0)
    span = (high - low) or 1.0
    return "".join(_BLOCKS[min(7, int((value - low) / span * 8))] for value in values)


def _locked(folder: Path) -> bool:
    """Whether a process of this machine runs it, from the kernel's list: trying the lock could refuse it to a run.

    Where there is no such list nobody can tell, and the run is taken to be on.
    """
    try:
        lines = Path("/proc/locks").read_text("ascii").splitlines()
        status = folder.stat()
    except (OSError, ValueError):
        return True
    file = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    return any("FLOCK" in line and file in line.split() for line in lines)
