"""A config over several seeds: accuracy after the last round on its held-out records, mean ± standard deviation.

    python benchmarks/seeds.py mnist-best --seeds 5 --first-seed 3000 --data DIR --json mnist-best.json

The JSON holds the command, the commit, the hardware and every run's summary.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import fedspa
from fedspa.paper import shipped
from fedspa.paper.provenance import hardware
from fedspa.runs.config import load

ROOT = Path(__file__).parents[1]


def over_seeds(config: Path, first: int, seeds: int, overrides: list[str]) -> dict[str, Any]:
    """The summaries of so many seeds from the first on, and what they say together."""
    runs = []
    for seed in range(first, first + seeds):
        with tempfile.TemporaryDirectory() as folder:
            out = [f"run.seed={seed}", f"run.out={json.dumps(folder + '/run')}", "run.checkpoint_every=1000"]
            runs.append(fedspa.run(load(config, [*overrides, *out])).summary)
        print(f"seed {seed}: {100 * runs[-1]['accuracy_last']:.2f} %", flush=True)
    last = [100 * run["accuracy_last"] for run in runs]
    return {
        "accuracy": statistics.mean(last),
        "accuracy_std": statistics.stdev(last) if seeds > 1 else 0.0,
        "epsilon": max(run["epsilon"] or 0.0 for run in runs),
        "epsilon_replace_one": max(run["epsilon_replace_one"] or 0.0 for run in runs),
        "payload_bytes": statistics.mean(run["payload_bytes"] for run in runs),
        "summaries": runs,
    }


def commit() -> str:
    git = ("git", "-C", str(ROOT))
    name = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout
    # Of what a run reads, not of the results that it may be writing.
    read = ("src", "benchmarks")
    changed = subprocess.run([*git, "status", "--short", *read], capture_output=True, text=True, check=True).stdout
    return name.strip() + (", with uncommitted changes in the work tree" if changed.strip() else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="as for fedspa run")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0, help="one that no trial used")
    parser.add_argument("--data", type=Path, help="folder with the files of the data that the config names")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as for fedspa run")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--hardware", default=hardware("cpu"), help="noted in the JSON")
    arguments = parser.parse_args()
    overrides = list(arguments.set)
    if arguments.data is not None:
        overrides.append(f"data.dir={json.dumps(str(arguments.data))}")
    before = commit()
    found = over_seeds(shipped.config(arguments.config), arguments.first_seed, arguments.seeds, overrides)
    print(f"{found['accuracy']:.2f} ± {found['accuracy_std']:.2f} %, ε = {found['epsilon']:.4f}")
    if arguments.json is not None:
        sets = "".join(f" --set {text}" for text in arguments.set)
        first = f" --first-seed {arguments.first_seed}" if arguments.first_seed else ""
        command = f"python benchmarks/seeds.py {arguments.config} --seeds {arguments.seeds}{first} --data DIR{sets}"
        notes = {
            "command": command,
            "commit": before,
            "hardware": arguments.hardware,
            "selection": "settings chosen on a tenth of the training records (data.holdout = 0.1), which was not "
            "private; accuracy here is on the test records",
        }
        arguments.json.write_text(json.dumps({**notes, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
