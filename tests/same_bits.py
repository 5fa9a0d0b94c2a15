"""Digests of seeded runs, to hold two states of the code together: same bits before and after walls were moved.

    python tests/same_bits.py > before.json         # on the state before
    python tests/same_bits.py --against before.json # on the state after: names every run that differs, exit 1

Each run leaves digests of its parameters, its metrics and its ledger, whose entries hold the digest of each payload.
The operating system's entropy is replaced by a counter, so that `secure` and `exact` noise repeat themselves too.
"""

# ruff: noqa: E402
from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import logging
import os
import random
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent / folder) for folder in ("runs", "learning", "..")]  # own data and models

from small_runs import ALGORITHMS, ledger_content, outcome, small
from small_sums import SUMS

import fedspa
from fedspa.flower import server_app
from fedspa.flower.nodes import PollingGrid
from fedspa.flower.settings import read_config
from fedspa.runs.rundir import Stopped
from flower.local_grid import SIMULATION, LocalGrid

Sections = dict[str, dict[str, Any]]


TASKS = (
    ("binary", "parity", "logistic"),
    ("multi-label", "bits", "mlp"),
    ("regression", "parity", "logistic"),
    ("next-token", "tokens", "small_records:Tagger"),
    ("token-classification", "tokens", "small_records:Tagger"),
    ("module", "tokens", "small_records:Tagger"),
    ("small_records:own_loss", "visits", "mlp"),
)


def settings() -> Iterator[tuple[str, Sections]]:
    """Every algorithm, mask, noise, clip, coding, server step and engine that differs in what it computes."""
    seeded = {"privacy": {"noise": "seeded"}}
    for name, noise in itertools.product(ALGORITHMS, ("seeded", "secure", "exact")):
        if name != "cpsgd" or noise != "exact":  # cpSGD's noise is of whole numbers in any mode
            yield f"{name}-{noise}", merged(ALGORITHMS[name], {"privacy": {"noise": noise}})
    for engine in ("native", "traced", "generic", "reference"):
        yield f"engine-{engine}", merged(seeded, {"run": {"engine": engine}})
    for key, values in {
        "mask": ("per-agent", "shared", "fixed"),
        "coding": ("int", "f32"),
        "server": ("adam", "average"),
        "ema": (0.5,),
    }.items():
        for value in values:
            yield f"{key}-{value}", merged(seeded, {"algorithm": {key: value}})
    yield "lr_decay-sqrt", merged(seeded, {"algorithm": {"schedule": "sqrt"}})
    for clip in ("coordinate", "l2"):
        yield f"{clip}-given", merged(seeded, {"privacy": {"clip": clip}})
    by_layer = {"mask": "fixed", "compression": [0.5, 1.0]}
    yield "layer-shares", merged(seeded, {"algorithm": by_layer})
    fixed = {"privacy": {"sampling": "fixed", "neighbours": "replace-one"}}
    yield "fixed-size", merged(seeded, fixed)
    yield "calibrated", merged(seeded, {"privacy": {"noise_multiplier": None, "epsilon": 4.0}})
    for name, noise in itertools.product(SUMS, ("seeded", "secure")):
        yield f"sums-{name}-{noise}", merged(SUMS[name], {"privacy": {"noise": noise}})
    for name, data, model in TASKS:
        task = {"task": {"name": name}, "data": {"name": f"small_records:{data}"}, "model": {"name": model}}
        yield f"task-{name}", merged(seeded, task, {"run": {"engine": "auto"}})
    visits = {"data": {"name": "small_records:visits"}, "algorithm": {"batch": 4}}
    for engine in ("auto", "reference"):
        yield f"persons-{engine}", merged(seeded, visits, {"run": {"engine": engine}})
    frozen = {"model": {"name": "frozen_nets:chain"}, "run": {"engine": "auto"}}
    for name in ALGORITHMS:
        yield f"frozen-{name}", merged(ALGORITHMS[name], seeded, frozen)
    yield "uniform", merged(seeded, {"federation": {"participation": "uniform"}})
    candidates = {
        "federation": {"rounds": 8},
        "tuning": {"candidates": [{"algorithm.local_lr": rate} for rate in (0.5, 0.1)], "rounds": 4},
    }
    yield "trials", merged(seeded, candidates, {"data": {"holdout": 0.2}})


def merged(*parts: Sections) -> Sections:
    sections: Sections = {}
    for part in parts:
        for name, keys in part.items():
            sections[name] = {**sections.get(name, {}), **keys}
    return sections


def digests(folder: Path) -> dict[str, str]:
    kept = outcome(folder)
    shared = folder.with_suffix(".sqlite")
    ledger = ledger_content(shared) if shared.exists() else kept["ledger"]
    parts = {"model": kept["model"], "metrics": kept["metrics"], "ledger": json.dumps(ledger, sort_keys=True).encode()}
    return {name: hashlib.sha256(data).hexdigest()[:16] for name, data in parts.items()}


def entropy_by_counter() -> None:
    """From here on, `os.urandom` and what is built on it give the same bytes in every process."""
    calls = itertools.count()

    def counted(size: int) -> bytes:
        return hashlib.shake_256(next(calls).to_bytes(8, "big")).digest(size)

    os.urandom = counted
    random._urandom = counted  # type: ignore[attr-defined]  # the module has taken its own name of it


def record(folder: Path, only: str) -> dict[str, dict[str, str]]:
    """Each setting whole, stopped after its second round and resumed, and (by algorithm) through Flower's messages."""
    found: dict[str, dict[str, str]] = {}
    for name, sections in settings():
        for way, run in (("whole", whole), ("resumed", resumed)):
            if only in f"{way}-{name}":
                found[f"{way}-{name}"] = tried(run, folder / f"{way}-{name}", sections)
    for name, sections in (ALGORITHMS | {f"sums-{name}": each for name, each in SUMS.items()}).items():
        if only in f"flower-{name}":
            seeded = merged(sections, {"privacy": {"noise": "seeded"}})
            found[f"flower-{name}"] = tried(through_flower, folder / f"flower-{name}", seeded)
    return found


def tried(run: Callable[[Path, Sections], None], folder: Path, sections: Sections) -> dict[str, str]:
    entropy_by_counter()
    try:
        run(folder, sections)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error).replace(str(folder.parent), '')[:200]}"}
    return digests(folder)


def whole(folder: Path, sections: Sections) -> None:
    fedspa.run(small(folder, **sections))


def resumed(folder: Path, sections: Sections) -> None:
    rounds = itertools.count(1)
    with contextlib.suppress(Stopped):
        fedspa.run(small(folder, **sections), stop=lambda: next(rounds) == 2)
    fedspa.run(resume=folder)


def through_flower(folder: Path, sections: Sections) -> None:
    run_config = {key: "" if value is None else value for key, value in flattened("", small(folder, **sections))}
    run_config |= {key: value for key, value in SIMULATION.items() if key.startswith("flower.")}
    if "privacy.members" in run_config:
        run_config["flower.quorum"] = ""  # a sum needs its whole cohort
    if run_config.get("algorithm.name") != "fedavg":
        run_config["run.ledger"] = str(folder.with_suffix(".sqlite"))
    grid = LocalGrid({100 + i: {"simulation": True} for i in range(6)}, run_config)
    config, how = read_config(run_config)
    server_app.serve(PollingGrid(grid, how.poll), config, how)


def flattened(prefix: str, tables: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in tables.items():
        if isinstance(value, Mapping):
            yield from flattened(f"{prefix}{key}.", value)
        else:
            yield f"{prefix}{key}", value


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="digests of another state, to compare with")
    parser.add_argument("--only", default="", help="runs whose name holds this")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as folder:
        found = record(Path(folder), arguments.only)
    if arguments.against is None:
        print(json.dumps(found, indent=1))
        return 0
    before = {name: kept for name, kept in json.loads(arguments.against.read_text()).items() if arguments.only in name}
    different = 0
    for name in sorted(before.keys() | found.keys()):
        was, now = before.get(name, {}), found.get(name, {})
        parts = [part for part in sorted(was.keys() | now.keys()) if was.get(part) != now.get(part)]
        if parts:
            different += 1
            print(f"{name}: {', '.join(parts)}")
    print(f"{len(found) - different} of {len(found)} runs have the same bits")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
