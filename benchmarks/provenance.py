"""Where a figure comes from: command, commit, machine, versions, date. Every kept result carries it.

A long benchmark keeps each part when it is done, and goes on where it stopped if code and settings are the same.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def stamp(*packages: str) -> dict[str, Any]:
    """For this process's command line; with the versions of `packages` that are installed."""
    return {
        "command": command(sys.argv),
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": {"cpu": cpu(), "cores": os.cpu_count(), "memory_gib": round(memory_gib(), 1)},
        "load": [round(load, 2) for load in os.getloadavg()],  # what else ran on the machine at the end
        "versions": {"python": platform.python_version()} | {name: version(name) for name in ("torch", *packages)},
    }


def command(arguments: list[str]) -> str:
    """As one would type it in the repository's root; where someone keeps data and environments is left out."""
    return shlex.join(["python", *(_path(argument) for argument in arguments)])


def _path(argument: str) -> str:
    path = Path(argument)
    if not path.is_absolute() or path.is_relative_to("/dev"):
        return argument
    if path.is_relative_to(ROOT):
        return str(path.relative_to(ROOT))
    return "DIR" if path.is_dir() else f"DIR/{path.name}"


def commit() -> str:
    """Of the code that ran; `+` where sources differ from it. FEDSPA_COMMIT tells it where there is no repository."""
    if named := os.environ.get("FEDSPA_COMMIT"):
        return named
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        sources = ("src", "benchmarks/*.py", "benchmarks/*/*.py", "reproduction/*.py", "reproduction/*.toml")
        return head + ("+" if _git("status", "--porcelain", "--", *sources) else "")
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


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def hardware(device: str) -> str:
    """The processor with the cores that this process may use, and the accelerator if one is used."""
    import torch

    accelerator = torch.device(device)
    used = f", {torch.cuda.get_device_name(accelerator)}" if accelerator.type == "cuda" else ""
    return f"{cores()} cores of {cpu()}{used}"


def memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def in_parts(
    key: str,
    names: Iterable[str],
    measure: Callable[[str], Any],
    settings: dict[str, Any],
    out: Path | None,
    stamped: Callable[[], dict[str, Any]],
) -> dict[str, Any]:
    """{"provenance", "settings", key: {name: what `measure` says}}, written to `out` after each part.

    Parts that `out` has already, from the same commit and with the same settings, are not measured again. Changed
    sources (`+`) are not the same as anything.
    """
    document: dict[str, Any] = {"provenance": stamped(), "settings": settings, key: {}}
    if out is not None and out.exists() and not document["provenance"]["commit"].endswith("+"):
        before = json.loads(out.read_text("utf-8"))
        if before["provenance"]["commit"] == document["provenance"]["commit"] and before["settings"] == settings:
            document[key] = before[key]
    for name in names:
        if name not in document[key]:
            document[key][name] = measure(name)
            document["provenance"] = stamped()
            if out is not None:
                out.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
            print(f"measured: {name}", file=sys.stderr)
    return document
