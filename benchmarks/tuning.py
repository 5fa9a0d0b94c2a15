"""What tuning inside the budget reaches: beside settings that were tuned for free, and beside no tuning at all.

    python benchmarks/tuning.py mnist cifar10 --data DIR --jobs 16 --out benchmarks/results/tuning.json
    python benchmarks/tuning.py breast-cancer wine rings --jobs 16 --out benchmarks/results/tuning-tables.json

Each arm has the same total ε and δ, and is judged by test records that chose nothing. `free` are the shipped settings,
chosen on held-out training records without paying; `default` are the library's own; `suggest` those of
`fedspa suggest`; `tuned` is `fedspa tune` from the defaults, with the search inside ε; `trials`, of tables, the same
without proxy runs; `agents` the same without held-out records, so that agents score. Seeds 1000 to 1004 were used for
nothing else.

Every (data set, arm, seed) is a process of its own with one thread, `--jobs` of them at a time. `--out` is written
after each, and what it has already from the same commit is not measured again.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
import sklearn.datasets

import fedspa
from ending import ends_with_children
from fedspa import configs, durable
from fedspa.data.dataset import Dataset
from fedspa.tuning.suggest import first_settings
from provenance import commit, stamp
from seeds import fresh

Job = tuple[str, str, int]  # data set, arm, seed
Accuracies = dict[str, dict[str, dict[str, float]]]  # data set → arm → seed → percent
FIRST_SEED = 1000
IMAGE_ARMS = ["free", "default", "suggest", "tuned", "agents"]
TABLE_ARMS = ["default", "suggest", "tuned", "trials", "agents"]
SEARCHES = ["tuned", "trials", "agents"]
IMAGES = {"mnist": ("mnist-best", 600, 3930), "cifar10": ("cifar10-best", 500, 12010)}
HOLDOUT = 0.1
TABLES = {
    # Agents and ε, such that something can be learned and not everything.
    "breast-cancer": (5, 1.0),
    "wine": (3, 4.0),
    "rings": (20, 1.0),
}
TABLE_HOLDOUT = 0.2
# What the searched settings are where nobody sets them.
DEFAULTS = ["algorithm.server=none", "algorithm.server_lr=none", "algorithm.ema=none", "privacy.clip_value=none"]
DEFAULTS += ["algorithm.local_lr=none"]


def images(name: str, folder: str, seed: int) -> dict[str, Callable[[Path], float]]:
    source, batch, dimension = IMAGES[name]
    path = configs.find(source)
    fixed = [f"data.dir={json.dumps(folder)}", f"run.seed={seed}", "run.threads=1", "run.checkpoint_every=1000"]
    config = fedspa.load(path)
    federation, p = config.federation, config.algorithm.compression
    start = first_settings(federation.rounds, 1, 1.0, p, "l2", round(p * dimension))
    suggested = [f"{key}={json.dumps(value)}" for key, value in start.items()]
    searched = [f"data.holdout={HOLDOUT}", f"algorithm.batch={round(batch * (1 - HOLDOUT))}"]
    return {
        "free": lambda out: run(fedspa.load(path, [*fixed, *at(out)])),
        "default": lambda out: run(fedspa.load(path, [*fixed, *DEFAULTS, *at(out)])),
        "suggest": lambda out: run(fedspa.load(path, [*fixed, *suggested, *at(out)])),
        "tuned": lambda out: tune(fedspa.load(path, [*fixed, *DEFAULTS, *searched, *at(out)]), "holdout"),
        "agents": lambda out: tune(fedspa.load(path, [*fixed, *DEFAULTS, *at(out)]), "none"),
    }


def tables(name: str, folder: str, seed: int) -> dict[str, Callable[[Path], float]]:
    agents, epsilon = TABLES[name]
    data = table(name, seed)
    records = len(data.train_y)
    held, left = records // agents, (records - round(TABLE_HOLDOUT * records)) // agents
    rounds = 40

    def config(out: Path, batch: int, *more: str) -> fedspa.Config:
        given: dict[str, Any] = {
            "federation": {"agents": agents, "per_round": agents, "rounds": rounds},
            "algorithm": {"local_steps": 1, "batch": batch},
            "privacy": {"epsilon": epsilon, "delta": 1e-3, "noise": "seeded"},
            "run": {"seed": seed, "threads": 1, "checkpoint_every": 1000},
        }
        return fedspa.load(given, [*more, *at(out)])

    start = first_settings(rounds, 1, 0.1, 1.0, "l2", 1)
    suggested = [f"{key}={json.dumps(value)}" for key, value in start.items()]
    searched = f"data.holdout={TABLE_HOLDOUT}"
    return {
        "default": lambda out: run(config(out, held), data),
        "suggest": lambda out: run(config(out, held, *suggested), data),
        "tuned": lambda out: tune(config(out, left, searched), "holdout", data),
        "trials": lambda out: tune(config(out, left, searched), "none", data),
        "agents": lambda out: tune(config(out, held), "none", data),
    }


def table(name: str, seed: int) -> Dataset:
    """Standardised columns, a quarter of the records for testing; the split is the seed's."""
    if name == "rings":
        x, y = _rings(4000, seed)
    else:
        x, y = {"breast-cancer": sklearn.datasets.load_breast_cancer, "wine": sklearn.datasets.load_wine}[name](
            return_X_y=True
        )
        x = (x - x.mean(axis=0)) / x.std(axis=0)
    order = np.random.default_rng(seed).permutation(len(y))
    test, train = order[: len(y) // 4], order[len(y) // 4 :]
    x = x.astype(np.float32)
    return fedspa.from_arrays(x[train], y[train], x[test], y[test], name=name)


def _rings(records: int, seed: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Made up: four classes by distance from the middle of a plane, with the squares and eight columns of noise."""
    rng = np.random.default_rng(seed)
    plane = rng.normal(size=(records, 2))
    squares = plane**2
    distance = squares.sum(axis=1)
    y = np.searchsorted(np.quantile(distance, [0.25, 0.5, 0.75]), distance)
    return np.hstack([squares, plane, rng.normal(size=(records, 8))]), y.astype(np.int64)


def at(out: Path) -> list[str]:
    return [f"run.out={json.dumps(str(out))}"]


def run(config: fedspa.Config, data: Dataset | None = None) -> float:
    return float(fedspa.run(config, data=data).summary["accuracy_last"])


def tune(config: fedspa.Config, public: str, data: Dataset | None = None) -> float:
    summary = fedspa.tune(config, public=public, data=data).summary
    assert config.privacy.epsilon is not None
    assert summary["epsilon"] <= config.privacy.epsilon
    return float(summary["tuning"]["test"]["accuracy"])


def measure(name: str, folder: str, seed: int, arm: str) -> tuple[float, float]:
    """Accuracy in percent, and the seconds that it took."""
    warnings.simplefilter("ignore", fedspa.SeededNoiseWarning)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as out:
        accuracy = 100 * (images if name in IMAGES else tables)(name, folder, seed)[arm](Path(out) / "run")
    return accuracy, time.perf_counter() - start


def jobs(names: list[str], arms: list[str] | None, seeds: range, found: Accuracies) -> list[Job]:
    """What is still to be measured; what takes longest begins first."""
    wanted = [
        (name, arm, seed)
        for name in names
        for arm in (IMAGE_ARMS if name in IMAGES else TABLE_ARMS)
        for seed in seeds
        if (arms is None or arm in arms) and str(seed) not in found.get(name, {}).get(arm, {})
    ]
    return sorted(wanted, key=lambda job: (job[0] not in IMAGES, job[1] not in SEARCHES))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=[*IMAGES, *TABLES])
    parser.add_argument("--data", default="data", help="folder with the files of MNIST and CIFAR-10")
    parser.add_argument("--seeds", type=int, default=5, help="how many")
    parser.add_argument("--first-seed", type=int, default=FIRST_SEED)
    parser.add_argument("--arms", nargs="+", choices=dict.fromkeys(IMAGE_ARMS + TABLE_ARMS))
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    seeds = fresh(options.first_seed, options.seeds)
    found = kept(options.out)
    wanted = jobs(options.names, options.arms, seeds, found)
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # of the processes that are begun here
    failed = 0
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        begun = {pool.submit(measure, name, options.data, seed, arm): (name, arm, seed) for name, arm, seed in wanted}
        for number, future in enumerate(as_completed(begun), 1):
            name, arm, seed = begun[future]
            said = f"{number} of {len(begun)}: {name} {arm} {seed}"
            if (error := future.exception()) is not None:
                failed += 1
                print(f"{said} failed: {error!r}", file=sys.stderr, flush=True)
                continue
            accuracy, seconds = future.result()
            found.setdefault(name, {}).setdefault(arm, {})[str(seed)] = accuracy
            print(f"{said}: {accuracy:.2f} % in {seconds:.0f} s", flush=True)
            if options.out is not None:
                keep(options.out, found)
    for name, arms in found.items():
        for arm, values in arms.items():
            print(f"{name} {arm}: {statistics.mean(values.values()):.2f} ({len(values)} seeds)", flush=True)
    if failed:
        raise SystemExit(f"{failed} of {len(begun)} failed; the same command measures them again")


def kept(path: Path | None) -> Accuracies:
    if path is None or not path.exists():
        return {}
    document = json.loads(path.read_text("utf-8"))
    if document["provenance"]["commit"] != (now := commit()):
        raise SystemExit(f"{path} was measured at {document['provenance']['commit']}, and this is {now}: move it away")
    found: Accuracies = document["accuracies"]
    return found


def keep(path: Path, found: Accuracies) -> None:
    """Seeds, arms and data sets in one order, whichever was done first."""
    ordered = {
        name: {
            arm: dict(sorted(found[name][arm].items()))
            for arm in (IMAGE_ARMS if name in IMAGES else TABLE_ARMS)
            if arm in found[name]
        }
        for name in (*IMAGES, *TABLES)
        if name in found
    }
    durable.replace_text(path, json.dumps({"provenance": stamp(), "accuracies": ordered}, indent=1) + "\n")


if __name__ == "__main__":
    ends_with_children()
    main()
