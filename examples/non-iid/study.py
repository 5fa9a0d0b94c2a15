"""How much do agents with unlike data cost? Label skew by Dirichlet(α), with privacy and without, and a plot.

python study.py                # 36 small runs; writes study.json and study.png
python study.py --quick        # a taste
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import matplotlib
from matplotlib import pyplot

import fedspa

matplotlib.use("agg")  # a file is written, no window opened

ALPHAS = [0.03, 0.1, 0.3, 1.0, 3.0, 100.0]
# Averaging is the server's step for all. The last takes as many noisy steps as the second, in shorter rounds.
METHODS = {
    "FedAvg, no privacy": ["algorithm.name=fedavg", "algorithm.compression=1.0"],
    "Fed-SPA, ε = 2, 20 rounds of 10 steps": [],
    "Fed-SPA, ε = 2, 66 rounds of 3 steps": ["federation.rounds=66", "algorithm.local_steps=3"],
}


def accuracy(alpha: float, overrides: list[str], seed: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        settings = [
            *(
                f"data.partition=dirichlet:{alpha}",
                f"run.seed={seed}",
                "privacy.noise=seeded",
                f'run.out="{folder}/run"',
            ),
            *overrides,
        ]
        return 100 * float(fedspa.run(fedspa.load(None, settings)).summary["accuracy_last"])


def plot(rows: list[dict[str, float | str]], path: Path) -> None:
    figure, axes = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
    for method in METHODS:
        mine = [row for row in rows if row["method"] == method]
        columns = {key: [row[key] for row in mine] for key in ("alpha", "accuracy", "deviation")}
        axes.errorbar(columns["alpha"], columns["accuracy"], columns["deviation"], marker="o", capsize=3, label=method)
    axes.set(xscale="log", xlabel="Dirichlet α (left: each agent has few labels)", ylabel="accuracy, %")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=144)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two α, two seeds, three rounds")
    parser.add_argument("--out", type=Path, default=Path())
    options = parser.parse_args()
    alphas, seeds, last = (ALPHAS[::5], 2, ["federation.rounds=3"]) if options.quick else (ALPHAS, 3, [])
    rows: list[dict[str, float | str]] = []
    for method, overrides in METHODS.items():
        for alpha in alphas:
            found = [accuracy(alpha, [*overrides, *last], seed) for seed in range(seeds)]
            mean, deviation = statistics.mean(found), statistics.stdev(found)
            rows.append({"method": method, "alpha": alpha, "accuracy": mean, "deviation": deviation})
            print(f"{method:38}  α = {alpha:<6g}  {mean:.1f} ± {deviation:.1f} %")
    (options.out / "study.json").write_text(json.dumps(rows, indent=1) + "\n", "utf-8")
    plot(rows, options.out / "study.png")


if __name__ == "__main__":
    main()
