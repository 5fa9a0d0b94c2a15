"""What a config that leaves its settings out reaches, beside what `fedspa tune` finds at the same ε.

    python benchmarks/defaults.py --data DIR --jobs 2 --out benchmarks/results/defaults.json

Each task names agents, ε and nothing else. `default` is that run; `sums` is the same under secure aggregation; `tuned`
is `fedspa tune` of the first, whose search and held-out records are inside ε; `fedavg` is FedAvg at its defaults,
without privacy. All are judged by the same test records. DIR has MNIST, adult/adult.csv and SST-2/{train,dev}.tsv;
without them their tasks are left out. With `--out`, an arm of a task that was measured at this commit is not measured
again.
"""

from __future__ import annotations

import argparse
import csv
import functools
import multiprocessing
import os
import statistics
import tempfile
import warnings
import zlib
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import sklearn.datasets
import torch

import fedspa
from ending import ends_with_children
from fedspa.data.dataset import Dataset
from fedspa.data.datasets import load as load_data
from provenance import in_parts, stamp
from seeds import fresh

Arrays = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]
EPSILONS = (1.0, 3.0, 8.0)
ARMS = ("default", "sums", "fedavg", "tuned")  # the slowest last
WORDS = 256


def standardised(load: Callable[..., Any]) -> Callable[[Path, int], Arrays]:
    def read(folder: Path, seed: int) -> Arrays:
        x, y = load(return_X_y=True)
        found: np.ndarray[Any, Any] = (x - x.mean(axis=0)) / (x.std(axis=0) + 1e-9)
        return found, y

    return read


def diabetes(folder: Path, seed: int) -> Arrays:
    x, y = standardised(sklearn.datasets.load_diabetes)(folder, seed)
    return x, (y - 185.5) / 160.5  # by the public range from 25 to 346


def friedman(folder: Path, seed: int) -> Arrays:
    x, y = sklearn.datasets.make_friedman1(6000, random_state=seed)
    return 2 * x - 1, (y - 15) / 15


def rings(folder: Path, seed: int) -> Arrays:
    """Four classes by distance from the middle of a plane, with the squares and eight columns of noise."""
    rng = np.random.default_rng(seed)
    plane = rng.normal(size=(4000, 2))
    distance = (plane**2).sum(axis=1)
    y = np.searchsorted(np.quantile(distance, [0.25, 0.5, 0.75]), distance)
    return np.hstack([plane**2, plane, rng.normal(size=(4000, 8))]), y


def corners(folder: Path, seed: int) -> Arrays:
    """The sign of a product, which no linear model finds."""
    x = np.random.default_rng(seed).normal(size=(4000, 5))
    return x, (x[:, 0] * x[:, 1] > 0).astype(np.int64)


def rare(folder: Path, seed: int) -> Arrays:
    """One record in twenty is of the second class."""
    x, y = sklearn.datasets.make_classification(
        8000, 12, n_informative=6, weights=[0.95], class_sep=1.2, random_state=seed
    )
    return x, y


def adult(folder: Path, seed: int) -> Arrays:
    ranges = {"age": 90, "education-num": 16, "capital-gain": 20000, "capital-loss": 4000, "hours-per-week": 99}
    with (folder / "adult/adult.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    parts = [np.array([[min(float(row[name]) / high, 1.0)] for row in rows]) for name, high in ranges.items()]
    for name in ("workclass", "marital-status", "occupation", "relationship", "race", "sex"):
        words = sorted({row[name] for row in rows})
        parts.append(np.array([[row[name] == word for word in words] for row in rows], dtype=float))
    return np.hstack(parts), np.array([">" in row["salary"] for row in rows], dtype=np.int64)


def sst2(folder: Path, seed: int) -> Arrays:
    """Each word is a random vector of its own, a phrase is their mean: features that no data was needed for."""
    with (folder / "SST-2/train.tsv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))[:20000]
    vectors: dict[str, np.ndarray[Any, Any]] = {}
    x = np.empty((len(rows), WORDS))
    for number, row in enumerate(rows):
        words = row["sentence"].split()
        for word in words:
            if word not in vectors:
                vectors[word] = np.random.default_rng(zlib.crc32(word.encode())).normal(size=WORDS)
        x[number] = sum(vectors[word] for word in words) / np.sqrt(len(words) * WORDS)
    return x, np.array([int(row["label"]) for row in rows])


def mnist(folder: Path, seed: int) -> Arrays:
    data = load_data("mnist", folder)
    return np.asarray(data.train_x)[:20000], np.asarray(data.train_y)[:20000]


def small_mnist(folder: Path, seed: int) -> Arrays:
    x, y = mnist(folder, seed)
    return x[:8000], y[:8000]


# Its records, how many agents, the model, the score, and whether it is a regression.
TASKS: dict[str, tuple[Callable[[Path, int], Arrays], int, str, str]] = {
    "digits": (standardised(sklearn.datasets.load_digits), 10, "logistic", "accuracy"),
    "breast-cancer": (standardised(sklearn.datasets.load_breast_cancer), 5, "logistic", "auc"),
    "wine": (standardised(sklearn.datasets.load_wine), 3, "logistic", "accuracy"),
    "diabetes": (diabetes, 5, "logistic", "r2"),
    "friedman": (friedman, 20, "mlp", "r2"),
    "rings": (rings, 20, "logistic", "accuracy"),
    "corners": (corners, 8, "mlp", "accuracy"),
    "rare": (rare, 10, "logistic", "auc"),
    "adult-10": (adult, 10, "logistic", "auc"),
    "adult-100": (adult, 100, "mlp", "auc"),
    "sst2": (sst2, 20, "logistic", "accuracy"),
    "mnist-20": (mnist, 20, "logistic", "accuracy"),
    "mnist-100": (mnist, 100, "mlp", "accuracy"),
    "mnist-cnn": (small_mnist, 20, "small-cnn", "accuracy"),
}
NEEDS = {
    "adult-10": "adult",
    "adult-100": "adult",
    "sst2": "SST-2",
    "mnist-20": "MNIST",
    "mnist-100": "MNIST",
    "mnist-cnn": "MNIST",
}


def data_of(name: str, folder: Path, seed: int) -> Dataset:
    """A quarter of the records are for testing; the split is the seed's."""
    x, y = TASKS[name][0](folder, seed)
    order = np.random.default_rng(seed).permutation(len(y))
    test, train = order[: len(y) // 4], order[len(y) // 4 :]
    x, y = x.astype(np.float32), y.astype(np.float32 if TASKS[name][3] == "r2" else np.int64)
    return fedspa.from_arrays(x[train], y[train], x[test], y[test], name=name)


def measure(name: str, epsilon: float, arm: str, folder: Path, seed: int) -> float:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    _, agents, model, metric = TASKS[name]
    with tempfile.TemporaryDirectory() as out:
        config: dict[str, dict[str, Any]] = {
            "federation": {"agents": agents},
            "model": {"name": model},
            "task": {"metric": metric, **({"name": "regression"} if metric == "r2" else {})},
            "privacy": {"epsilon": epsilon, "delta": 1e-5, "noise": "seeded"},
            "run": {"seed": seed, "threads": 1, "out": f"{out}/run", "checkpoint_every": 1000},
        }
        data = data_of(name, folder, seed)
        if arm == "sums":
            config["algorithm"], config["privacy"]["adversary"] = {"mask": "shared"}, "secure-aggregation"
        if arm == "tuned":
            config["data"] = {"holdout": 0.2}
            return float(fedspa.tune(config, data=data, progress=False).summary["tuning"]["test"][metric])
        if arm == "fedavg":
            config["algorithm"], config["privacy"] = {"name": "fedavg"}, {}
        return float(fedspa.run(config, data=data, progress=False).summary["score_last"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(TASKS)}")
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--first-seed", type=int, default=2000)
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    names = [name for name in options.names or TASKS if (options.data / NEEDS.get(name, "")).exists()]
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # of the processes that are begun here
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:

        def measured(part: str) -> dict[str, Any]:
            name, arm = part.split()
            found = {}
            for epsilon in EPSILONS if arm != "fedavg" else EPSILONS[:1]:
                seeds = fresh(options.first_seed, options.seeds)
                scores = list(pool.map(functools.partial(measure, name, epsilon, arm, options.data), seeds))
                found[f"{epsilon:g}"] = scores
                print(f"{name:14} {arm:8} ε = {epsilon:g}: {statistics.mean(scores):.4f}", flush=True)
            return found

        tasks = {name: f"{agents} agents, {model}, {metric}" for name, (_, agents, model, metric) in TASKS.items()}
        settings = {"seeds": options.seeds, "first_seed": options.first_seed, "tasks": tasks}
        parts = [f"{name} {arm}" for arm in options.arms for name in names]
        in_parts("scores", parts, measured, settings, options.out, stamp)


if __name__ == "__main__":
    ends_with_children()
    main()
