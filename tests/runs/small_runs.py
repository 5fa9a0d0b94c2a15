"""Runs of a fraction of a second, and what of a finished one must be equal to the bit."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedspa.agent.ledger.report import export

SMALL: dict[str, dict[str, Any]] = {
    "federation": {"agents": 6, "rounds": 4, "per_round": 3},
    "algorithm": {"compression": 0.2, "local_steps": 2, "batch": 10, "local_lr": 0.5, "server_lr": 1.0},
    "privacy": {"noise_multiplier": 2.0, "clip_value": 0.3, "noise": "seeded"},
    "run": {"engine": "generic", "threads": 1},
}
ALGORITHMS: dict[str, dict[str, dict[str, Any]]] = {
    "fedspa": {},
    "fedavg": {"algorithm": {"name": "fedavg", "compression": 1.0}},
    "dp-fed": {"algorithm": {"name": "dp-fed", "compression": 1.0}},
    "cpsgd": {
        "federation": {"per_round": 6},
        "algorithm": {
            "name": "cpsgd",
            "compression": 1.0,
            "local_steps": 1,
            "options": {"trials": 9000},
        },
        "privacy": {"noise_multiplier": None, "sampling": "fixed", "clip": "coordinate"},
    },
}


def small(out: Path, **sections: dict[str, Any]) -> dict[str, dict[str, Any]]:
    merged = {name: {**SMALL.get(name, {}), **sections.get(name, {})} for name in {*SMALL, *sections}}
    merged["run"].setdefault("out", str(out))
    return merged


def ledger_content(path: Path) -> list[dict[str, Any]]:
    """Entries without what must differ: the run's drawn name, times, and the hashes over them. Masks are bound to that
    name, and with them the digest of what leaves masked; there only whether it was sent is told."""
    kept = ("sequence", "agent", "message", "event", "digest")
    found = [{key: entry[key] for key in kept} for entry in export(path)["entries"]]
    for entry in found:
        if "members" in entry["event"]:
            entry["digest"] = entry["digest"] is not None
    return found


def outcome(folder: Path) -> dict[str, Any]:
    """All that a run leaves behind: parameters, metrics, summary and ledger."""
    summary = json.loads((folder / "summary.json").read_text("utf-8"))
    del (
        summary["seconds"],
        summary["provenance"]["commit of the working folder"],
    )  # a clock, and the folder that tests were started in
    ledger = folder / "ledger.sqlite"
    return {
        "model": (folder / "model.safetensors").read_bytes(),
        "metrics": (folder / "metrics.jsonl").read_bytes(),
        "summary": summary,
        "ledger": ledger_content(ledger) if ledger.exists() else None,
    }


def start(body: Callable[[], object]) -> int:
    """Run `body` in a forked child with all imports and the accountant's memory; it exits with 0 if that returned."""
    child = os.fork()
    if child == 0:
        code: object = 1
        try:
            body()
            code = 0
        except SystemExit as stop:
            code = stop.code
        finally:
            os._exit(code if isinstance(code, int) else 1)
    return child


def ended(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


# A policy that admits every plan of these runs.
WIDE_POLICY = """
epsilon = 1000.0
delta = 1e-3
neighbours = "add-remove"
min_noise_multiplier = 0.1
max_local_steps = 10
max_rounds = 10
max_compression = 1.0
clippings = ["l2"]
"""
