"""Bytes an agent uploads, by algorithm, compression and coding, with the accuracy that goes with them.

    python benchmarks/uploads.py --seeds 3 --data DIR --json reproduction/results/uploads.json

Every figure comes from whole runs through the real codec. `digits` needs no files; `mnist` and `mnist-tuned` (accuracy)
and `cifar10` (bytes of one round only) run where --data names a folder with theirs. Rows that the JSON file has from
the same code and seeds are kept. `mnist` is the paper's CNN, with one set of settings for all p; `mnist-tuned` is the
config of that name, with settings chosen for each p on held-out training records, and is held against FedAvg's payload
of the paper's CNN.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fedspa
from fedspa.runs.config import Config, load
from intervals import half_interval
from provenance import ROOT, in_parts, stamp
from seeds import fresh

FIRST_SEED = 7000

ALGORITHMS = [("fedavg", 1.0, "f32"), ("dp-fed", 1.0, "f32")] + [
    ("fedspa", p, coding) for p in (0.05, 0.1, 0.4) for coding in ("f32", "int")
]
BEST = [("fedspa", p, coding) for coding in ("int", "f32") for p in (0.05, 0.1, 0.4, 1.0)]
# p → clip value and server rate, the best of 18 (3 clips, 3 rates, 2 averages) by three seeds on held-out records.
CHOSEN = {0.05: (0.0224, 270.0), 0.1: (0.0316, 270.0), 0.4: (0.019, 900.0), 1.0: (0.1, 270.0)}
# An example's active part shrinks as √p, so the clip does too: this is it at p = 1.
CLIP_AT_ONE = {"digits": 0.67, "mnist": 3.0, "mnist-tuned": 0.1, "cifar10": 3.0}


def config(job: str, algorithm: str, p: float, coding: str, seed: int, data: Path | None, out: str) -> Config:
    overrides = [
        f"algorithm.name={algorithm}",
        f"algorithm.compression={p}",
        f"algorithm.coding={coding}",
        f"privacy.clip_value={CLIP_AT_ONE[job] * math.sqrt(p)}",
        f"run.seed={seed}",
        "privacy.noise=seeded",
        f"run.out={json.dumps(out)}",
    ]
    if job == "digits":
        return load(None, overrides)
    overrides.append(f"data.dir={json.dumps(str(data))}")
    if job == "mnist-tuned":
        clip, rate = CHOSEN[p]
        overrides += [f"privacy.clip_value={clip}", f"algorithm.server_lr={rate}"]
        return load(ROOT / "reproduction" / "configs" / "mnist-tuned.toml", overrides)
    if job == "cifar10":
        overrides += ["data.name=cifar10", "model.name=cifar10-cnn", "algorithm.batch=50", "algorithm.local_steps=5"]
        overrides += ["federation.rounds=1"]
    if algorithm == "fedavg":
        overrides += ["algorithm.local_lr=0.01", "algorithm.schedule=constant"]
    return load(ROOT / "reproduction" / "configs" / "mnist.toml", overrides)


def measure(row: str, seeds: int, data: Path | None) -> dict[str, Any]:
    job, algorithm, p, coding = row.split()
    runs = []
    for seed in fresh(FIRST_SEED, 1 if job == "cifar10" else seeds):
        with tempfile.TemporaryDirectory() as folder:
            runs.append(fedspa.run(config(job, algorithm, float(p), coding, seed, data, f"{folder}/run")).summary)
    return {
        "dimension": runs[0]["dimension"],
        "payload_bytes": statistics.mean(run["payload_bytes"] for run in runs),
        "accuracies": None if job == "cifar10" else [100 * run["accuracy_last"] for run in runs],
        "epsilon": runs[0]["epsilon"],
        "engine": runs[0]["engine"],
    }


def rows(jobs: Sequence[str]) -> list[str]:
    """Job, algorithm, p and coding, in a word each."""
    return [
        f"{job} {algorithm} {p:g} {coding}"
        for job in jobs
        for algorithm, p, coding in (BEST if job == "mnist-tuned" else ALGORITHMS)
    ]


def markdown(result: dict[str, Any]) -> str:
    """The table: accuracy as mean over seeds ± half of its 95 % confidence interval."""
    parts: dict[tuple[str, ...], dict[str, Any]] = {tuple(name.split()): row for name, row in result["rows"].items()}
    dense = {job: row["payload_bytes"] for (job, algorithm, *_), row in parts.items() if algorithm == "fedavg"}
    dense["mnist-tuned"] = dense["mnist"]
    lines = [
        "| job | d | algorithm | p | coding | bytes per upload | times fewer than FedAvg | accuracy, % | ε |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (job, *settings), row in parts.items():
        accuracy, epsilon = "–", "–"
        if row["accuracies"] is not None:
            accuracy = f"{statistics.mean(row['accuracies']):.2f} ± {half_interval(row['accuracies']):.2f}"
        if row["epsilon"] is not None:
            epsilon = f"{math.ceil(row['epsilon'] * 1000) / 1000:.3f}"
        lines.append(
            f"| {job} | {row['dimension']:,} | {' | '.join(settings)} | {row['payload_bytes']:,.0f} "
            f"| {dense[job] / row['payload_bytes']:,.1f} | {accuracy} | {epsilon} |"
        )
    return "\n".join(lines)


def cost_of_coding(result: dict[str, Any]) -> str:
    """By how much `int` and `f32` differ at most, job by job."""
    found = []
    for job in ("mnist-tuned", "mnist", "digits"):
        means = {
            tuple(name.split()[2:]): statistics.mean(row["accuracies"])
            for name, row in result["rows"].items()
            if name.startswith(f"{job} fedspa ")
        }
        found.append(f"{max(abs(means[p, 'int'] - means[p, 'f32']) for p, _ in means):.2f} points on `{job}`")
    return ", ".join(found)


def cost_of_sparsity(result: dict[str, Any]) -> str:
    """p = 0.05 beside p = 1, with settings chosen for each p and with one set for all."""
    rows = result["rows"]
    mean = {name: statistics.mean(row["accuracies"]) for name, row in rows.items() if row["accuracies"] is not None}
    sparse, dense = rows["mnist-tuned fedspa 0.05 int"], rows["mnist fedavg 1 f32"]["payload_bytes"]
    best = mean["mnist-tuned fedspa 0.05 int"] - mean["mnist-tuned fedspa 1 int"]
    one = mean["mnist fedspa 0.05 int"] - mean["mnist dp-fed 1 f32"]
    own = rows["mnist-tuned fedspa 1 f32"]["payload_bytes"]  # FedAvg on the same model sends as much
    return (
        f"With settings chosen for each p (`mnist-tuned`), p = 0.05 differs from p = 1 by {best:+.2f} points, at "
        f"{dense / sparse['payload_bytes']:.0f} times fewer bytes than FedAvg with the paper's CNN and "
        f"{own / sparse['payload_bytes']:.0f} times fewer than FedAvg would send for the same linear model. "
        f"With one set of settings for all p (`mnist`) it differs by {one:+.1f} points."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--data", type=Path, help="folder with the files of MNIST and CIFAR-10")
    parser.add_argument("--json", type=Path, help="write rows here as they come, and go on from it")
    arguments = parser.parse_args()
    result = in_parts(
        "rows",
        rows(["digits"] if arguments.data is None else list(CLIP_AT_ONE)),
        lambda row: measure(row, arguments.seeds, arguments.data),
        {"seeds": arguments.seeds, "first_seed": FIRST_SEED},
        arguments.json,
        stamp,
    )
    print(json.dumps(result["rows"], indent=1))


if __name__ == "__main__":
    main()
