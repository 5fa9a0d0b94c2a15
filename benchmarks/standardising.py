"""Adult with numbers standardised by released means and deviations, beside the public ranges, at the same ε in all.

    python benchmarks/standardising.py DIR/adult.csv --out benchmarks/results/standardising.json

Ten sites; every tenth record is the server's, for the score. `public ranges` trains at ε; `released statistics` spends
0.5 of it on means and deviations of the numbers, and trains at the rest; `exact statistics` are those of all training
records, which no ε counts, at ε: what is there to gain. δ = 10⁻⁵; all other settings are the defaults.
"""

from __future__ import annotations

import argparse
import copy
import csv
import json
import statistics
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np

import fedspa
from fedspa.toml import read
from intervals import half_interval
from local_optimizers import adult
from provenance import in_parts, stamp
from statistics_coverage import NUMBERS

FIRST_SEED, SEEDS, OF_STATISTICS, DELTA = 9200, 5, 0.5, 1e-5
EPSILONS, MODELS, ARMS = (1.0, 3.0), ("logistic", "mlp"), ("public ranges", "released statistics", "exact statistics")


def score(folder: Path, table: dict[str, Any], model: str, epsilon: float, arm: str, seed: int) -> dict[str, float]:
    """Accuracy and AUC of one run on the server's records."""
    privacy = {"delta": DELTA, "noise": "seeded"}
    settings: dict[str, Any] = {"federation": {"agents": 10}, "run": {"seed": seed, "threads": 2}}
    with tempfile.TemporaryDirectory() as out:
        if arm == "released statistics":
            epsilon -= OF_STATISTICS
            found = fedspa.statistics(
                {**settings, "privacy": privacy},
                data=fedspa.from_table(folder / "table.csv", table),
                epsilon=OF_STATISTICS,
                columns=list(NUMBERS),
                out=f"{out}/statistics",
            )
            found.write_schema(f"{out}/schema.toml")
            table = read(Path(out) / "schema.toml", "the schema")["data"]["table"]
        elif arm == "exact statistics":
            table = exact(folder, table)
        settings |= {
            "model": {"name": model},
            "task": {"metric": "auc"},
            "privacy": {**privacy, "epsilon": epsilon},
            "run": {**settings["run"], "out": f"{out}/run"},
        }
        summary = fedspa.run(settings, data=fedspa.from_table(folder / "table.csv", table), progress=False).summary
    return {"auc": summary["score_last"], "accuracy": summary["accuracy_last"]}


def exact(folder: Path, table: dict[str, Any]) -> dict[str, Any]:
    """The schema with the true means and deviations of the training records."""
    with (folder / "table.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["part"] == "train"]
    table = copy.deepcopy(table)
    for name, (low, high) in NUMBERS.items():
        values = np.clip([float(row[name]) for row in rows], low, high)
        table["columns"][name] |= {"mean": float(values.mean()), "deviation": float(values.std())}
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table", type=Path, help="adult.csv, with a header")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        table = adult(arguments.table, folder)["data"]["table"]

        def measured(part: str) -> dict[str, Any]:
            model, epsilon, arm = part.split(", ")
            seeds = range(FIRST_SEED, FIRST_SEED + SEEDS)
            runs = [score(folder, table, model, float(epsilon.removeprefix("ε = ")), arm, seed) for seed in seeds]
            scores = {name: [run[name] for run in runs] for name in ("auc", "accuracy")}
            return {
                name: {"scores": each, "mean": statistics.mean(each), "half_interval": half_interval(each)}
                for name, each in scores.items()
            }

        parts = [f"{model}, ε = {epsilon:g}, {arm}" for model in MODELS for epsilon in EPSILONS for arm in ARMS]
        document = in_parts("runs", parts, measured, {"seeds": SEEDS}, arguments.out, stamp)
    for part, found in document["runs"].items():
        print(part, json.dumps({name: round(found[name]["mean"], 4) for name in found}, ensure_ascii=False))


if __name__ == "__main__":
    main()
