"""Private evaluation of a model at ten sites of Adult: how near its AUC comes, and how often 95 % intervals hold it.

    python benchmarks/evaluation_coverage.py DIR/adult.csv --out benchmarks/results/evaluation-adult.json

One model is trained with a tenth of each site's records held out. Each release draws noise of its own (secure), so a
repetition gives other figures. The truth is the AUC of the same records from their exact scores: what the parts of
the scores' range leave out counts as an error.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import warnings
from pathlib import Path

import numpy as np
from sklearn.metrics import roc_auc_score

import fedspa
from fedspa.runs.setup import holdings_of, names_of, records_of
from provenance import stamp
from statistics_coverage import config_of, prepare


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table", type=Path, help="adult.csv, with a header")
    parser.add_argument("--seeds", type=int, default=100, help="releases")
    parser.add_argument("--epsilon", type=float, default=0.5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as scratch:
        rows = prepare(arguments.table, Path(scratch))
        settings = config_of(rows, Path(scratch))
        settings["data"] |= {"agent_holdout": 0.1, "holdout": 0.05}
        del settings["data"]["table"]["split"], settings["algorithm"]
        settings["data"]["table"]["columns"]["part"] = {"kind": "ignore"}
        settings["privacy"] = {"epsilon": 3.0, "delta": 1e-5}
        settings["run"] = {"out": f"{scratch}/trained"}
        trained = fedspa.run(settings, progress=False)
        found = measure(trained, arguments.seeds, arguments.epsilon, Path(scratch))
    print(json.dumps(found, indent=1))
    if arguments.out is not None:
        known = {"provenance": stamp(), "seeds": arguments.seeds, "epsilon": arguments.epsilon, **found}
        arguments.out.write_text(json.dumps(known, indent=1) + "\n", "utf-8")


def measure(trained: fedspa.RunResult, seeds: int, epsilon: float, scratch: Path) -> dict[str, float]:
    config = fedspa.load(trained.folder / "config.toml")
    data = records_of(config)
    held = holdings_of(config, data, held_out=True)
    names = list(names_of(config, data))
    scores = trained.predict_proba(data.train_x)[:, 1]
    labels = np.asarray(data.train_y)
    truth = {name: float(roc_auc_score(labels[part], scores[part])) for name, part in zip(names, held)}
    every = np.concatenate(held)
    truth[""] = float(roc_auc_score(labels[every], scores[every]))
    errors: dict[str, list[float]] = {name: [] for name in truth}
    inside: dict[str, list[bool]] = {name: [] for name in truth}
    for seed in range(seeds):
        released = fedspa.evaluate(trained.folder, epsilon=epsilon, out=scratch / f"release-{seed}")
        for each in released.estimates:
            if each.statistic == "auc":
                inside[each.site].append(each.low <= truth[each.site] <= each.high)
                if each.value is not None:
                    errors[each.site].append(abs(each.value - truth[each.site]))
    sites = [error for name in names for error in errors[name]]
    return {
        "records_of_a_site": float(np.mean([len(part) for part in held])),
        "auc": truth[""],
        "error_of_all": float(np.mean(errors[""])),
        "coverage_of_all": float(np.mean(inside[""])),
        "error_of_a_site": float(np.mean(sites)),
        "stated_of_a_site": len(sites) / (seeds * len(names)),
        "coverage_of_a_site": float(np.mean([hit for name in names for hit in inside[name]])),
    }


if __name__ == "__main__":
    main()
