"""Optimisers at the agents at equal ε: plain steps, a heavy ball and Adam, each tuned with the same number of trials.

    python benchmarks/local_optimizers.py --adult DIR/adult.csv --sst2 DIR/SST-2 --embeddings DIR/wordllama
        --mnist DIR --out benchmarks/results/local-optimizers.json

Tasks: Adult (salary above 50,000, an MLP on the table's columns), SST-2 (the head of sst2.py), digits (an MLP) and
MNIST (the small CNN); a task whose folder is not named is left out. Ten agents, all in every round, ε = 2 at δ = 10⁻⁵.
For each optimiser, twelve settings (six rates, two clip values) train once; the best on held-out training records is
then trained on fresh seeds and scored on the test records. What `--out` has from this commit is not measured again.
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
import sst2
from fedspa.errors import FedspaError
from intervals import half_interval
from provenance import in_parts, stamp
from statistics_coverage import SITES, config_of, prepare

RATES = {
    "sgd": (0.03, 0.1, 0.3, 1.0, 3.0, 10.0),
    "momentum": (0.003, 0.01, 0.03, 0.1, 0.3, 1.0),
    "adam": (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1),
}
CLIPS = (0.1, 1.0)
TRIAL_SEED, FIRST_SEED, SEEDS = 3, 8000, 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for folder in ("adult", "sst2", "embeddings", "mnist"):
        parser.add_argument(f"--{folder}", type=Path)
    parser.add_argument("--optimizers", nargs="+", choices=RATES, default=list(RATES))
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        tasks: dict[str, dict[str, Any]] = {
            "digits": {"data": {"name": "digits"}, "model": {"name": "mlp"}, "algorithm": {"batch": 30}}
        }
        if arguments.adult:
            tasks["Adult"] = adult(arguments.adult, Path(folder))
        if arguments.sst2:
            data = sst2.means(arguments.sst2, arguments.embeddings)
            tasks["SST-2"] = {
                "algorithm": {"batch": 300},
                "given": lambda: {"data": data, "module": sst2.head(arguments.embeddings)},
            }
        if arguments.mnist:
            tasks["MNIST"] = {
                "data": {"name": "mnist", "dir": str(arguments.mnist)},
                "model": {"name": "small-cnn"},
                "algorithm": {"batch": 300},
            }
        parts = [f"{name} {optimizer}" for name in tasks for optimizer in arguments.optimizers]
        document = in_parts(
            "runs", parts, lambda part: measured(tasks, *part.split()), {"seeds": SEEDS}, arguments.out, stamp
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


def measured(tasks: dict[str, dict[str, Any]], name: str, optimizer: str) -> dict[str, Any]:
    task = tasks[name]
    trials = {
        (rate, clip): score(task, optimizer, rate, clip, TRIAL_SEED, trial=True)
        for rate, clip in itertools.product(RATES[optimizer], CLIPS)
    }
    rate, clip = max(trials, key=lambda setting: trials[setting])
    scores = [score(task, optimizer, rate, clip, FIRST_SEED + seed) for seed in range(SEEDS)]
    return {
        "local_lr": rate,
        "clip_value": clip,
        "trials": [[*setting, found] for setting, found in trials.items()],
        "scores": scores,
        "mean": statistics.mean(scores),
        "half_interval": half_interval(scores),
    }


def score(task: dict[str, Any], optimizer: str, rate: float, clip: float, seed: int, *, trial: bool = False) -> float:
    """The accuracy of one run: on held-out training records in a trial, else on the test records."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "federation": {"agents": 10, "per_round": 10, "rounds": 20},
            "data": {**task.get("data", {}), "holdout": 0.1 if trial else 0.0},
            "model": task.get("model", {}),
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
            found = fedspa.run(settings, progress=False, **task.get("given", dict)()).summary["accuracy_last"]
        except FedspaError as error:
            if "diverged" not in str(error):
                raise
            return 0.0
    return float(found)


if __name__ == "__main__":
    main()
