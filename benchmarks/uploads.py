"""Bytes an agent uploads, by algorithm, compression and coding, with the accuracy that goes with them.

    python benchmarks/uploads.py --seeds 3 --data DIR --json uploads.json

Every figure comes from a whole run through the real codec. `digits` needs no files; `mnist` and `mnist-best` (accuracy)
and `cifar10` (bytes of one round only) run where --data names a folder with theirs. Rows that the JSON file already has
are kept. `mnist` is the paper's CNN, with one set of settings for all p; `mnist-best` is the config of that name,
with settings chosen for each p on held-out training records, and is held against FedAvg's payload of the paper's CNN.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from pathlib import Path
from typing import Any

import fedspa
from fedspa.paper import shipped
from fedspa.runs.config import Config, load
from seeds import fresh

FIRST_SEED = 7000

ALGORITHMS = [("fedavg", 1.0, "f32"), ("dp-fed", 1.0, "f32")] + [
    ("fedspa", p, coding) for p in (0.05, 0.1, 0.4) for coding in ("f32", "f16", "int")
]
BEST = [("fedspa", p, coding) for coding in ("int", "f32") for p in (0.05, 0.1, 0.4, 1.0)]
# p → clip value and server rate, the best of 18 (3 clips, 3 rates, 2 averages) by three seeds on held-out records.
CHOSEN = {0.05: (0.0224, 270.0), 0.1: (0.0316, 270.0), 0.4: (0.019, 900.0), 1.0: (0.1, 270.0)}
# An example's active part shrinks as √p, so the clip does too: this is it at p = 1.
CLIP_AT_ONE = {"digits": 0.67, "mnist": 3.0, "mnist-best": 0.1, "cifar10": 3.0}


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
    if job == "mnist-best":
        clip, rate = CHOSEN[p]
        overrides += [f"privacy.clip_value={clip}", f"algorithm.server_lr={rate}"]
        return load(shipped.config("mnist-best"), overrides)
    if job == "cifar10":
        overrides += ["data.name=cifar10", "model.name=cifar10-cnn", "algorithm.batch=50", "algorithm.local_steps=5"]
        overrides += ["federation.rounds=1"]
    if algorithm == "fedavg":
        overrides += ["algorithm.local_lr=0.01", "algorithm.lr_decay=none"]
    return load(shipped.config("mnist"), overrides)


def measure(job: str, algorithm: str, p: float, coding: str, seeds: int, data: Path | None) -> dict[str, Any]:
    runs = []
    for seed in fresh(FIRST_SEED, 1 if job == "cifar10" else seeds):
        with tempfile.TemporaryDirectory() as folder:
            runs.append(fedspa.run(config(job, algorithm, p, coding, seed, data, f"{folder}/run")).summary)
    last = [100 * run["accuracy_last"] for run in runs]
    return {
        "job": job,
        "algorithm": algorithm,
        "compression": p,
        "coding": coding,
        "dimension": runs[0]["dimension"],
        "payload_bytes": statistics.mean(run["payload_bytes"] for run in runs),
        "accuracy": None if job == "cifar10" else statistics.mean(last),
        "accuracy_std": None if job == "cifar10" else statistics.stdev(last) if len(last) > 1 else 0.0,
        "epsilon": runs[0]["epsilon"],
        "seeds": len(runs),
        "engine": runs[0]["engine"],
        "seconds": sum(run["seconds"] for run in runs),
    }


def markdown(rows: list[dict[str, Any]]) -> str:
    dense = {row["job"]: row["payload_bytes"] for row in rows if row["algorithm"] == "fedavg"}
    dense["mnist-best"] = dense.get("mnist", math.nan)
    lines = [
        "| job | d | algorithm | p | coding | bytes per upload | times fewer than FedAvg | accuracy, % | ε |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        accuracy = "–" if row["accuracy"] is None else f"{row['accuracy']:.2f} ± {row['accuracy_std']:.2f}"
        epsilon = "–" if row["epsilon"] is None else f"{math.ceil(row['epsilon'] * 1000) / 1000:.3f}"
        lines.append(
            f"| {row['job']} | {row['dimension']:,} | {row['algorithm']} | {row['compression']:g} | {row['coding']} "
            f"| {row['payload_bytes']:,.0f} | {dense[row['job']] / row['payload_bytes']:,.1f} "
            f"| {accuracy} | {epsilon} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--data", type=Path, help="folder with the files of MNIST and CIFAR-10")
    parser.add_argument("--json", type=Path, help="write rows here as they come, and resume from it")
    parser.add_argument("--jobs", nargs="+", choices=list(CLIP_AT_ONE), help="default: all that there is data for")
    arguments = parser.parse_args()
    jobs = arguments.jobs or (["digits"] if arguments.data is None else list(CLIP_AT_ONE))
    kept: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    if arguments.json is not None and arguments.json.exists():
        kept = json.loads(arguments.json.read_text())
        rows = kept["rows"]
    known = {(row["job"], row["algorithm"], row["compression"], row["coding"]) for row in rows}
    for job in jobs:
        for algorithm, p, coding in BEST if job == "mnist-best" else ALGORITHMS:
            if (job, algorithm, p, coding) in known:
                continue
            rows.append(measure(job, algorithm, p, coding, arguments.seeds, arguments.data))
            if arguments.json is not None:
                arguments.json.write_text(json.dumps({**kept, "rows": rows}, indent=1) + "\n")
    print(markdown(rows))


if __name__ == "__main__":
    main()
