"""What is not a picture: the examples with tables and text, private beside not private, over fresh seeds.

    python benchmarks/others.py --jobs 4 --json reproduction/results/others.json

The private arm is the example as it is. The other is plain federated averaging of 100 rounds, as there is no budget
that more rounds could spend. A seed decides about noise, samples and who holds what. Where the example holds out
every fifth row of a table, another fifth of it is held out with each seed, so that four of five were not looked at when
the settings were chosen.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import fedspa
from ending import ends_with_children
from fedspa.errors import SeededNoiseWarning
from intervals import half_interval, spread
from provenance import ROOT, stamp
from seeds import fresh

EXAMPLES = ROOT / "examples"
FIRST_SEED = 6000
ARMS = {
    "private": ["privacy.noise=seeded"],
    "not private": ["algorithm.name=fedavg", "algorithm.compression=1.0", "federation.rounds=100"],
}
# Without a clip its steps have no bound, and at the example's rate it diverges.
SLOWER = {("diabetes", "not private"): ["algorithm.local_lr=0.3"]}


def tumours(seed: int, overrides: list[str]) -> fedspa.Result:
    data = fedspa.from_arrays(*_module("tabular/tumours.py").load(seed % 5), name="tumours")
    return fedspa.run(fedspa.load(EXAMPLES / "tabular" / "config.toml", overrides), data=data)


def diabetes(seed: int, overrides: list[str]) -> fedspa.Result:
    _module("diabetes/table.py").main(seed % 5)
    return fedspa.run(fedspa.load(_beside("diabetes"), overrides))


def visits(seed: int, overrides: list[str]) -> fedspa.Result:
    _module("visits/table.py").main()
    return fedspa.run(fedspa.load(_beside("visits"), overrides))


def language(seed: int, overrides: list[str]) -> fedspa.Result:
    import torch

    train = _module("adapters/train.py")
    torch.manual_seed(seed)
    net = train.with_adapters(train.pretrained(400), 4, both=False)
    config = fedspa.load(train.config(10, seed), overrides)
    return fedspa.run(config, data=train.packages(), module=net, task="next-token")


# What it is → how it is run.
KINDS: dict[str, Callable[[int, list[str]], fedspa.Result]] = {
    "tumours": tumours,
    "diabetes": diabetes,
    "visits": visits,
    "language model": language,
}


def one(kind: str, arm: str, seed: int) -> dict[str, Any]:
    """The summary of one run, in a folder of its own."""
    warnings.simplefilter("ignore", SeededNoiseWarning)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        overrides = [*ARMS[arm], *SLOWER.get((kind, arm), ()), f"run.seed={seed}", "run.threads=1"]
        summary = dict(KINDS[kind](seed, overrides).summary)
        os.chdir(ROOT)
    print(f"{kind}, {arm}, seed {seed}: {summary['score']} {summary['score_last']:.4g}", file=sys.stderr, flush=True)
    return summary


def found(kinds: list[str], seeds: range, jobs: int) -> dict[str, Any]:
    """Kind → arm → the score over seeds, beside the baseline's."""
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        asked = {(kind, arm): [pool.submit(one, kind, arm, seed) for seed in seeds] for kind in kinds for arm in ARMS}
        runs = {at: [each.result() for each in of] for at, of in asked.items()}
    return {
        kind: {
            "score": runs[kind, "private"][0]["score"],
            "baseline": spread([run["baseline"] for run in runs[kind, "private"]]),
            "arms": {arm: spread([run["score_last"] for run in runs[kind, arm]]) for arm in ARMS},
            "epsilon": max(run["epsilon"] for run in runs[kind, "private"]),
            **{key: runs[kind, "private"][0][key] for key in ("delta", "unit", "agents", "dimension", "payload_bytes")},
        }
        for kind in kinds
    }


def _module(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, EXAMPLES / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _beside(example: str) -> Path:
    """A copy of its config in this folder, where its table is."""
    path = Path("config.toml")
    path.write_text((EXAMPLES / example / path).read_text("utf-8"), "utf-8")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", choices=[*KINDS, []], help="all where none is named")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    document = found(asked.kinds or list(KINDS), fresh(FIRST_SEED, asked.seeds), asked.jobs)
    for kind, row in document.items():
        arms = ", ".join(f"{arm} {_shown(values)}" for arm, values in row["arms"].items())
        print(f"{kind}, {row['score']}: {arms}, baseline {row['baseline']['mean']:.4g}")
    if asked.json is not None:
        asked.json.write_text(
            json.dumps({"provenance": stamp(), "first_seed": FIRST_SEED, "kinds": document}, indent=1) + "\n"
        )


def _shown(values: dict[str, Any]) -> str:
    half = half_interval(values["values"])
    return f"{values['mean']:.4g}{'' if half is None else f' ± {half:.2g}'}"


if __name__ == "__main__":
    ends_with_children()
    main()
