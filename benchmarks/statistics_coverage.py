"""Private statistics of Adult: how often 95 % intervals hold the truth, and how large the errors are.

    python benchmarks/statistics_coverage.py DIR/adult.csv --out benchmarks/results/statistics-adult.json

Ten sites, all columns, ε = 0.5 at δ = 10⁻⁵, each site's upload seen by the server (local) or sums only. The noise of
seed s is that of `privacy.noise = "seeded"`, so that a reviewer gets the same numbers.
"""

from __future__ import annotations

import argparse
import csv
import json
import tempfile
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

import fedspa
from provenance import stamp

NUMBERS = {
    "age": [17, 90],
    "fnlwgt": [0, 800000],
    "education-num": [1, 16],
    "capital-gain": [0, 20000],
    "capital-loss": [0, 4000],
    "hours-per-week": [0, 99],
}
WORDS = ("workclass", "education", "marital-status", "occupation", "relationship", "race", "sex", "native-country")
TARGET, SITES, FIRST_SEED = "salary", 10, 7000


def prepare(source: Path, folder: Path) -> list[dict[str, str]]:
    """Write the table of the sites, and return its records of the agents. One record stands for the server's own."""
    with source.open(newline="") as file:
        rows = [{key: "" if value == "?" else value for key, value in row.items()} for row in csv.DictReader(file)]
    for number, row in enumerate(rows):
        row |= {"site": f"site {number % SITES}", "part": "train"}
    with (folder / "table.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows([*rows, {**rows[0], "part": "test"}])
    return rows


def config_of(rows: list[dict[str, str]], folder: Path) -> dict[str, Any]:
    columns: dict[str, Any] = {name: {"kind": "number", "range": bounds} for name, bounds in NUMBERS.items()}
    for name in WORDS:
        words = sorted({row[name] for row in rows} - {""})
        columns[name] = {"kind": "category", "categories": words, "missing": "indicator"}
    columns[TARGET] = {"kind": "category", "categories": sorted({row[TARGET] for row in rows}), "target": True}
    table = {"agent": "site", "split": "part", "columns": columns}
    return {
        "federation": {"agents": SITES, "per_round": SITES},
        "data": {"name": "table.csv", "dir": str(folder), "table": table},
        "algorithm": {"local_steps": 1},
        "privacy": {"delta": 1e-5, "noise": "seeded"},
    }


def truths(rows: list[dict[str, str]], bins: int) -> dict[tuple[str, str], float]:
    """Every statistic of the records themselves, computed by NumPy."""
    found: dict[tuple[str, str], float] = {("", "records"): len(rows)}
    for name, (low, high) in NUMBERS.items():
        values = np.clip([float(row[name]) for row in rows], low, high)
        found |= {(name, "mean"): values.mean(), (name, "standard deviation"): values.std()}
        for q in (5, 25, 50, 75, 95):
            found[name, f"quantile {q}%"] = float(np.quantile(values, q / 100))
        parts = np.minimum(((values - low) / (high - low) * bins).astype(int), bins - 1)
        edges = np.linspace(low, high, bins + 1)
        for place, count in enumerate(np.bincount(parts, minlength=bins)):
            end = "]" if place == bins - 1 else ")"
            found[name, f"count in [{edges[place]:.6g}, {edges[place + 1]:.6g}{end}"] = int(count)
    for name in (*WORDS, TARGET):
        of_rows = [row[name] or "missing" for row in rows]
        for word in {*of_rows, *(["missing"] if name != TARGET else [])}:
            times = of_rows.count(word)
            found |= {(name, f"count of {word}"): times, (name, f"share of {word}"): times / len(rows)}
    return found


def kind_of(statistic: str) -> str:
    return statistic.split(" of ")[0].split(" in ")[0].split(" ")[0]


def measure(
    settings: dict[str, Any], truth: dict[tuple[str, str], float], seeds: int, epsilon: float
) -> dict[str, Any]:
    held: dict[str, list[bool]] = defaultdict(list)
    errors: dict[tuple[str, str], list[float]] = defaultdict(list)
    data = fedspa.from_table(Path(settings["data"]["dir"]) / settings["data"]["name"], settings["data"]["table"])
    settings = {key: section for key, section in settings.items() if key != "data"}
    for seed in range(FIRST_SEED, FIRST_SEED + seeds):
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            settings = {**settings, "run": {"seed": seed}}
            found = fedspa.statistics(settings, data=data, epsilon=epsilon, out=Path(folder) / "run")
        for each in found.estimates:
            key = (each.column, each.statistic)
            if not each.site and key in truth:
                held[kind_of(each.statistic)].append(each.low <= truth[key] <= each.high)
                if each.value is not None and truth[key]:
                    errors[key].append(abs(each.value - truth[key]) / abs(truth[key]))
    largest = sorted((key for key in truth if key[1].startswith("count of")), key=lambda key: -truth[key])[:10]
    exact = [each for kind, every in held.items() if kind != "quantile" for each in every]
    return {
        "epsilon": found.summary["epsilon"],
        "epsilon_worst_case": found.summary["epsilon_worst_case"],
        "coverage": {kind: sum(every) / len(every) for kind, every in held.items()},
        "coverage_without_quantiles": sum(exact) / len(exact),
        "relative_error": {
            f"{column} {statistic}".strip(): float(np.mean(errors[column, statistic]))
            for column, statistic in [("", "records"), *((name, "mean") for name in NUMBERS), *largest]
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table", type=Path, help="adult.csv, with a header")
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--epsilon", type=float, default=0.5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        rows = prepare(arguments.table, Path(scratch))
        settings, truth = config_of(rows, Path(scratch)), truths(rows, 20)
        found = {}
        for adversary in ("local", "secure-aggregation"):
            asked = {**settings, "privacy": {**settings["privacy"], "adversary": adversary}}
            found[adversary] = measure(asked, truth, arguments.seeds, arguments.epsilon)
            print(adversary, json.dumps(found[adversary], indent=1))
    if arguments.out is not None:
        known = {"provenance": stamp(), "seeds": arguments.seeds, "records": len(rows), **found}
        arguments.out.write_text(json.dumps(known, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
