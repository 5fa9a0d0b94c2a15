"""Where a result comes from: the commit and the machine, read and not typed."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import torch

import fedspa


def commit() -> str | None:
    """The commit of this source; `-dirty` where it was edited since; None where that cannot be told.

    A copy of the source without its repository may be told by FEDSPA_COMMIT.
    """
    if named := os.environ.get("FEDSPA_COMMIT"):
        return named
    source = Path(fedspa.__file__).parent
    if _git(source, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    head, changes = _git(source, "rev-parse", "--short=12", "HEAD"), _git(source, "status", "--porcelain", ".")
    return head and (f"{head}-dirty" if changes else head)


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def hardware(device: str) -> str:
    """The processor and how many of its cores this process may use; the accelerator if one is used."""
    words = f"{cores()} cores of {_processor()}"
    if torch.device(device).type == "cuda":
        words += f", {torch.cuda.get_device_name(torch.device(device))}"
    return words


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _git(where: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(where), *words], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
