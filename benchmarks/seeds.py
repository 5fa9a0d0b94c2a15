"""A config over several seeds: accuracy after the last round on its held-out records, and how sure the mean is.

    python benchmarks/seeds.py mnist-best --seeds 10 --first-seed 5000 --data DIR --json mnist-best.json

± is half of the 95 % confidence interval of the mean. Seeds that trials used are refused: settings that did best with a
seed did so with its masks, partition and noise. reproduction/log.md names them in one line. Each seed is a process of
its own, `--jobs` of them at a time. The JSON holds the command, the commit, the hardware and every run's summary.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import statistics
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import fedspa
from ending import ends_with_children
from fedspa import configs
from fedspa.privacy.event import shown_digits
from fedspa.runs.config import load
from intervals import half_interval, largest
from provenance import commit, hardware

ROOT = Path(__file__).parents[1]
LOG = ROOT / "reproduction" / "log.md"


def _config(name: str) -> Path:
    """Return a config of the reproduction, a shipped one, or the path of a TOML file."""
    own = ROOT / "reproduction" / "configs" / f"{name}.toml"
    return own if own.exists() else configs.find(name)


def of_trials(log: str) -> set[int]:
    """The seeds that the log's line «Seeds of trials» names."""
    lines = re.findall(r"^\*\*Seeds of trials\*\*: (.+)$", log, re.MULTILINE)
    if len(lines) != 1:
        raise SystemExit(f"{LOG.name} has {len(lines)} lines «**Seeds of trials**: …»; it must have one")
    found: set[int] = set()
    number = "(0|[1-9][0-9]*)"
    for part in lines[0].split(","):
        # Strictly: of a range in other words than «a to b» only the ends would count as used.
        match = re.fullmatch(rf" *{number}(?: to {number})? *", part)
        first, last = (0, -1) if match is None else (int(match[1]), int(match[2] or match[1]))
        if last < first:
            raise SystemExit(f"{LOG.name}: «Seeds of trials» has {part.strip()!r}; it must read as «0 to 99, 914»")
        found.update(range(first, last + 1))
    return found


def fresh(first: int, seeds: int) -> range:
    """So many seeds from the first on; SystemExit where a trial used one of them."""
    chosen = range(first, first + seeds)
    if used := sorted(of_trials(LOG.read_text("utf-8")) & set(chosen)):
        raise SystemExit(
            f"trials used the seeds {', '.join(map(str, used))} ({LOG.relative_to(ROOT)}): a result would flatter "
            "settings that were chosen with them; take --first-seed 5000 or another that is not named there"
        )
    return chosen


def one(config: Path, seed: int, overrides: Sequence[str]) -> dict[str, Any]:
    """A run's summary."""
    with tempfile.TemporaryDirectory() as folder:
        out = [f"run.seed={seed}", f"run.out={json.dumps(folder + '/run')}", "run.checkpoint_every=1000"]
        summary = dict(fedspa.run(load(config, [*overrides, *out])).summary)
    print(f"seed {seed}: {100 * summary['accuracy_last']:.2f} %", flush=True)
    return summary


def over_seeds(config: Path, seeds: Sequence[int], overrides: Sequence[str], jobs: int) -> dict[str, Any]:
    """The summaries of these seeds, and what they say together."""
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        asked = [pool.submit(one, config, seed, overrides) for seed in seeds]
        runs = [each.result() for each in asked]
    last = [100 * run["accuracy_last"] for run in runs]
    return {
        "accuracy": statistics.mean(last),
        "accuracy_interval": half_interval(last),
        "epsilon": largest([run["epsilon"] for run in runs]),
        "epsilon_replace_one": largest([run["epsilon_replace_one"] for run in runs]),
        "payload_bytes": statistics.mean(run["payload_bytes"] for run in runs),
        "summaries": runs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="as for fedspa run")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, required=True, help="one that no trial used")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--data", type=Path, help="folder with the files of the data that the config names")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as for fedspa run")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--hardware", default=hardware("cpu"), help="noted in the JSON")
    arguments = parser.parse_args()
    seeds = fresh(arguments.first_seed, arguments.seeds)
    overrides = list(arguments.set)
    if arguments.data is not None:
        overrides.append(f"data.dir={json.dumps(str(arguments.data))}")
    if arguments.jobs > 1:
        overrides.append("run.threads=1")
    before = commit()
    found = over_seeds(_config(arguments.config), seeds, overrides, arguments.jobs)
    half = found["accuracy_interval"]
    epsilon = "no ε" if found["epsilon"] is None else f"ε = {shown_digits(found['epsilon'])}"
    print(f"{found['accuracy']:.2f}{'' if half is None else f' ± {half:.2f}'} %, {epsilon}")
    if arguments.json is not None:
        sets = "".join(f" --set {text}" for text in arguments.set)
        asked = f"{arguments.config} --seeds {arguments.seeds} --first-seed {arguments.first_seed}"
        notes = {
            "command": f"python benchmarks/seeds.py {asked} --data DIR{sets}",
            "commit": before,
            "hardware": arguments.hardware,
            "selection": "the config says how its settings were chosen; accuracy here is on the test records",
        }
        arguments.json.write_text(json.dumps({**notes, **found}, indent=1) + "\n")


if __name__ == "__main__":
    ends_with_children()
    main()
