"""Where a figure comes from: command, commit, machine, versions, date. Every kept result carries it."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def stamp(*packages: str) -> dict[str, Any]:
    """For this process's command line; with the versions of `packages` that are installed."""
    return {
        "command": shlex.join(["python", os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:]]),
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": {"cpu": cpu(), "cores": os.cpu_count(), "memory_gib": round(memory_gib(), 1)},
        "load": [round(load, 2) for load in os.getloadavg()],  # what else ran on the machine at the end
        "versions": {"python": platform.python_version()} | {name: version(name) for name in ("torch", *packages)},
    }


def commit() -> str:
    """Of the code that ran; `+` where sources differ from it."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        return head + (
            "+" if _git("status", "--porcelain", "--", "src", "benchmarks/*.py", "benchmarks/*/*.py") else ""
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    return subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True, check=True).stdout.strip()


def cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
