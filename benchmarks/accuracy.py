"""The tables of docs/accuracy.md and README.md from the kept results; `tables.py` writes them in."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "experiments" / "results"
# Config → what it is.
ROWS = {
    "mnist-best": "MNIST, linear on aligned orientations",
    "mnist-best-replace-one": "the same under replace-one",
    "mnist-cnn-best": "MNIST, the paper's CNN, mask by layer",
    "cifar10-patches": "CIFAR-10 (JPEG copy), linear on patches",
    "cifar10-best": "the same, linear on orientations",
}
# The same under secure aggregation.
SUMS = {
    "mnist-secure": "MNIST, linear on aligned orientations",
    "mnist-secure-100": "the same, all agents",
    "cifar10-secure": "CIFAR-10 (JPEG copy), linear on patches",
    "cifar10-secure-100": "the same, all agents",
}


def line(name: str, about: str, kept: dict[str, Any]) -> str:
    run = kept["summaries"][0]
    epsilon = math.ceil(kept["epsilon"] * 1000) / 1000
    return (
        f"| {about} | `{name}` | {run['compression']:.2g} | {run['dimension']:,} | ({epsilon:.3f}, {run['delta']:g}), "
        f"{run['neighbours']} | {kept['payload_bytes']:,.0f} | {kept['accuracy']:.2f} ± {kept['accuracy_std']:.2f} "
        f"| {len(kept['summaries'])} |"
    )


def markdown() -> str:
    lines = [
        "| | config | p | d | guarantee | bytes per upload | accuracy, % | seeds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        line(name, about, json.loads((RESULTS / f"{name}.json").read_text("utf-8"))) for name, about in ROWS.items()
    ]
    return "\n".join(lines)


def sums() -> str:
    """What sums over agents reach: two ε, against the server with its colluders and against all others together."""
    lines = [
        "| | config | members, colluding | ε | floor | participations | d | bytes per upload | accuracy, % | seeds |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, about in SUMS.items():
        kept = json.loads((RESULTS / f"{name}.json").read_text("utf-8"))
        run = kept["summaries"][0]
        epsilon, floor = (
            math.ceil(max(each[key] for each in kept["summaries"]) * 1000) / 1000
            for key in ("epsilon", "epsilon_floor")
        )
        lines.append(
            f"| {about} | `{name}` | {run['members']}, {run['colluders']} | {epsilon:.3f} | {floor:.3f} "
            f"| {run['participations_max']} | {run['dimension']:,} | {kept['payload_bytes']:,.0f} "
            f"| {kept['accuracy']:.2f} ± {kept['accuracy_std']:.2f} | {len(kept['summaries'])} |"
        )
    return "\n".join(lines)


def front() -> str:
    """The README's table: less of each."""
    lines = ["| | model | guarantee | accuracy, % | bytes per upload |", "|---|---|---|---|---|"]
    for name, about in ROWS.items():
        kept = json.loads((RESULTS / f"{name}.json").read_text("utf-8"))
        run = kept["summaries"][0]
        what, _, model = about.partition(", ")
        lines.append(
            f"| {what} | {model or 'the same'}, p = {run['compression']:.2g} | {run['neighbours']} "
            f"| {kept['accuracy']:.2f} ± {kept['accuracy_std']:.2f} | {kept['payload_bytes']:,.0f} |"
        )
    return "\n".join(lines)


def audits() -> str:
    """What `benchmarks/audits.py` found, a line per config."""
    lines = [
        "| config | checks | nearest to its claim | claimed | shown at least | verdict |",
        "|---|---|---|---|---|---|",
    ]
    kept = json.loads((RESULTS / "audits.json").read_text("utf-8"))["audits"]
    lines += [
        f"| `{name}` | {len(kept[name]['checks'])} | {kept[name]['check']} ({kept[name]['unit']}) "
        f"| {kept[name]['claimed']:.4f} | {kept[name]['lower_bound']:.4f} "
        f"| {'holds' if kept[name]['holds'] else 'does not hold'} |"
        for name in (*ROWS, *SUMS)
    ]
    return "\n".join(lines)
