"""Optimisers at the agents at equal ε: plain steps, a heavy ball and Adam, each tuned with the same number of trials.

    python benchmarks/local_optimizers.py --adult DIR/adult.csv --mnist DIR [--out FILE]

Tasks: Adult (salary above 50,000, an MLP on the table's columns), digits (an MLP) and MNIST (the small CNN). Ten
agents, all in every round, ε = 2 at δ = 10⁻⁵. For each optimiser, ten settings (five rates, two clip values) train
once; the best on held-out training records is then trained on fresh seeds and scored on the test records.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import statistics
import tempfile
import warnings
from pathlib import Path
from typing import Any

import fedspa
from fedspa.errors import FedspaError
from intervals import half_interval
from provenance import in_parts, stamp
from statistics_coverage import SITES, config_of, prepare

RATES = {
    "sgd": (0.1, 0.3, 1.0, 3.0, 10.0),
    "momentum": (0.01, 0.03, 0.1, 0.3, 1.0),
    "adam": (0.0003, 0.001, 0.003, 0.01, 0.03),
}
CLIPS = (0.1, 1.0)
TRIAL_SEED, FIRST_SEED, SEEDS = 3, 8000, 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--adult", type=Path, required=True)
    parser.add_argument("--mnist", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        tasks: dict[str, dict[str, dict[str, Any]]] = {
            "Adult": adult(arguments.adult, Path(folder)),
            "digits": {"data": {"name": "digits"}, "model": {"name": "mlp"}, "algorithm": {"batch": 30}},
            "MNIST": {
                "data": {"name": "mnist", "dir": str(arguments.mnist)},
                "model": {"name": "small-cnn"},
                "algorithm": {"batch": 300},
            },
        }
        document = in_parts(
            "tasks", list(tasks), lambda name: measured(tasks[name]), {"seeds": SEEDS}, arguments.out, stamp
        )
    print(json.dumps(document, indent=1))


def adult(source: Path, folder: Path) -> dict[str, Any]:
    """Ten sites; every tenth record is the server's, for the score."""
    rows = prepare(source, folder)
    config = config_of(rows, folder)
    for number, row in enumerate(rows):
        row |= {"site": f"site {number // 10 % SITES}", "part": "test" if number % 10 == 9 else "train"}
    with (folder / "table.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return {"data": config["data"], "model": {"name": "mlp"}, "algorithm": {"batch": 300}}


def measured(task: dict[str, dict[str, Any]]) -> dict[str, Any]:
    found = {}
    for optimizer, rates in RATES.items():
        trials = {
            (rate, clip): score(task, optimizer, rate, clip, TRIAL_SEED, trial=True)
            for rate, clip in itertools.product(rates, CLIPS)
        }
        rate, clip = max(trials, key=lambda setting: trials[setting])
        scores = [score(task, optimizer, rate, clip, FIRST_SEED + seed) for seed in range(SEEDS)]
        found[optimizer] = {
            "local_lr": rate,
            "clip_value": clip,
            "trials": [[*setting, found_score] for setting, found_score in trials.items()],
            "scores": scores,
            "mean": statistics.mean(scores),
            "half_interval": half_interval(scores),
        }
    return found


def score(
    task: dict[str, dict[str, Any]], optimizer: str, rate: float, clip: float, seed: int, *, trial: bool = False
) -> float:
    """The accuracy of one run: on held-out training records in a trial, else on the test records."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "federation": {"agents": 10, "per_round": 10, "rounds": 20},
            "data": {**task["data"], "holdout": 0.1 if trial else 0.0},
            "model": task["model"],
            "algorithm": {
                "local_steps": 10,
                "local_lr": rate,
                "local_optimizer": optimizer,
                "server": "average",
                **task["algorithm"],
            },
            "privacy": {"epsilon": 2.0, "delta": 1e-5, "clip_value": clip, "noise": "seeded"},
            "run": {"seed": seed, "out": f"{folder}/run", "threads": 2},
        }
        try:
            found = fedspa.run(settings, progress=False).summary["accuracy_last"]
        except FedspaError as error:
            if "diverged" not in str(error):
                raise
            return 0.0
    return float(found)


if __name__ == "__main__":
    main()
