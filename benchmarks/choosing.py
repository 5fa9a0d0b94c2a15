"""The tables of docs/tuning.md: the quickstart with one key moved at a time, everything else as it is.

python benchmarks/choosing.py            # about two minutes of one core
python benchmarks/choosing.py --json > benchmarks/results/choosing.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from typing import Any

import fedspa
from intervals import half_interval
from provenance import stamp
from seeds import fresh
from tables import moved_key

FIRST_SEED = 7000
SWEEPS: dict[str, list[float]] = {
    "algorithm.compression": [0.05, 0.1, 0.2, 0.5, 1.0],
    "algorithm.batch": [9, 18, 36, 72, 143],
    "algorithm.local_steps": [1, 3, 10, 30],
    "privacy.clip_value": [0.03, 0.1, 0.3, 1.0, 3.0],
    "federation.rounds": [5, 10, 20, 40],
    "privacy.epsilon": [0.5, 1.0, 2.0, 4.0, 8.0],
}


def measure(key: str, value: float, seeds: int) -> dict[str, Any]:
    """Mean accuracy at the end over `seeds` runs, the noise that ε takes, and the bytes."""
    summaries = []
    for seed in fresh(FIRST_SEED, seeds):
        with tempfile.TemporaryDirectory() as folder:
            settings = [
                f"{key}={value}",
                f"run.seed={seed}",
                "privacy.noise=seeded",
                f'run.out="{folder}/run"',
                "run.threads=1",
            ]
            summaries.append(fedspa.run(fedspa.load(None, settings)).summary)
    accuracies = [100 * summary["accuracy_last"] for summary in summaries]
    return {
        "key": key,
        "value": value,
        "accuracy": statistics.mean(accuracies),
        "interval": half_interval(accuracies),
        "noise_multiplier": summaries[0]["noise_multiplier"],
        "upload_bytes": statistics.mean(summary["payload_bytes"] for summary in summaries),
        "run_bytes": statistics.mean(summary["uplink_bytes"] for summary in summaries),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = [measure(key, value, options.seeds) for key, values in SWEEPS.items() for value in values]
    result = {"provenance": stamp(), "settings": {"seeds": options.seeds, "first_seed": FIRST_SEED}, "rows": rows}
    if options.json:
        print(json.dumps(result, indent=1))
        return
    for key in SWEEPS:
        print(moved_key(result, key, ("noise_multiplier", "upload_bytes", "run_bytes")))


if __name__ == "__main__":
    main()
