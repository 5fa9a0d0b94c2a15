"""The tables of docs/accuracy.md and README.md from the kept results; `tables.py` writes them in."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from fedspa.privacy.event import shown
from intervals import half_interval, shown_spread

sys.path.append(str(Path(__file__).parents[1]))  # of a script in this folder, the repository's root is no path
from reproduction import trust as by_trust

RESULTS = Path(__file__).parents[1] / "reproduction" / "results"
# What it is → the shipped configs at δ = 10⁻⁵, local and in sums of 100, and what others print for one place that sees
# all records, at the same ε and δ and without public data.
SHIPPED = {
    "MNIST, linear on aligned orientations": ("mnist-best", "mnist-secure-100", "97.8"),
    "Fashion-MNIST (CSV edition's split), linear on patches": (
        "fashion-mnist-patches",
        "fashion-mnist-secure-100",
        "85.5 to 86.3",
    ),
    "CIFAR-10, linear on patches": (
        "cifar10-patches",
        "cifar10-secure-100",
        "72.3 (Tang et al. 2023, pretrained on random images; repeated: 72.5 ± 0.2); 60.9 to 63.2 with fixed features",
    ),
}
# Kept results of a config with one key changed: what changed.
VARIANTS = {"cifar10-secure-100-members-80": ("cifar10-secure-100", "20 members may fall silent")}
# At the paper's δ: config → what it is.
ROWS = {
    "mnist-tuned": "MNIST, linear on aligned orientations",
    "mnist-best-replace-one": "the same under replace-one",
    "mnist-cnn-best": "MNIST, the paper's CNN, mask by layer",
    "cifar10-patches-1e-3": "CIFAR-10, linear on patches",
    "cifar10-best": "the same, linear on orientations",
}
# The same under secure aggregation.
SUMS = {
    "mnist-secure": "MNIST, linear on aligned orientations",
    "mnist-secure-100-1e-3": "the same, all agents",
    "cifar10-secure": "CIFAR-10, linear on patches",
    "cifar10-secure-100-1e-3": "the same, all agents",
}
CONFIGS = (*(name for local, sums, _ in SHIPPED.values() for name in (local, sums)), *ROWS, *SUMS)
# The paper's own CNNs: what p = 0.05 costs.
CNNS = {"mnist-cnn-best": "by layer, p = 0.05", "mnist-cnn-full": "every coordinate trained, p = 1"}
OTHERS = {
    "tumours": "breast cancer: benign or not, logistic regression",
    "diabetes": "diabetes within a year, linear regression",
    "visits": "ill or not, per patient with up to 4 visits, logistic regression",
    "language model": "next character of Python, adapters on a frozen transformer",
}


def kept_result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text("utf-8"))
    return found


def reached(kept: dict[str, Any]) -> str:
    """The mean over seeds, and half of its 95 % confidence interval."""
    values = [100 * run["accuracy_last"] for run in kept["summaries"]]
    half = half_interval(values)
    return f"{sum(values) / len(values):.2f}{'' if half is None else f' ± {half:.2f}'}"


def line(name: str, about: str, kept: dict[str, Any]) -> str:
    run = kept["summaries"][0]
    return (
        f"| {about} | `{name}` | {run['compression']:.2g} | {run['dimension']:,} "
        f"| ({shown(kept['epsilon'])}, {run['delta']:g}), {run['neighbours']} | {kept['payload_bytes']:,.0f} "
        f"| {reached(kept)} | {len(kept['summaries'])} |"
    )


def markdown() -> str:
    lines = [
        "| | config | p | d | guarantee | bytes per upload | accuracy, % | seeds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [line(name, about, kept_result(name)) for name, about in ROWS.items()]
    return "\n".join(lines)


def sums() -> str:
    """What sums over agents reach: two ε, against the server with its colluders and against all others together."""
    lines = [
        "| | config | members, colluding | ε | worst-case ε | participations | d | bytes per upload | accuracy, % "
        "| seeds |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, about in SUMS.items():
        kept = kept_result(name)
        run = kept["summaries"][0]
        keys = "epsilon", "epsilon_worst_case"
        epsilon, worst = (shown(max(each[key] for each in kept["summaries"])) for key in keys)
        lines.append(
            f"| {about} | `{name}` | {run['members']}, {run['colluders']} | {epsilon} | {worst} "
            f"| {run['participations_max']} | {run['dimension']:,} | {kept['payload_bytes']:,.0f} "
            f"| {reached(kept)} | {len(kept['summaries'])} |"
        )
    return "\n".join(lines)


def front() -> str:
    """Return the README's table: at δ = 10⁻⁵, locally and in sums, beside the central literature."""
    header = (
        "| | local, % | bytes per upload | in sums of 100, 20 colluding, % | worst-case ε | central, published, % |"
    )
    lines = [header, "|---|---|---|---|---|---|"]
    for about, (local, summed, printed) in SHIPPED.items():
        kept, sums = kept_result(local), kept_result(summed)
        lines.append(
            f"| {about} | {reached(kept)} | {kept['payload_bytes']:,.0f} | {reached(sums)} "
            f"| {worst_case(sums)} | {printed} |"
        )
    return "\n".join(lines)


def worst_case(kept: dict[str, Any]) -> str:
    return shown(max(each["epsilon_worst_case"] for each in kept["summaries"]))


def trust(against: str) -> str:
    """Return what kinds of trust reach at each ε, number of agents or p."""
    return by_trust.markdown(kept_result(f"accuracy-by-{against}"))


def audits() -> str:
    """What `benchmarks/audits.py` found, a line per config."""
    lines = [
        "| config | checks | nearest to its claim | claimed | shown at least | verdict |",
        "|---|---|---|---|---|---|",
    ]
    kept = kept_result("audits")["audits"]
    lines += [
        f"| `{name}` | {len(kept[name]['checks'])} | {kept[name]['check']} ({kept[name]['unit']}) "
        f"| {kept[name]['claimed']:.4f} | {kept[name]['lower_bound']:.4f} "
        f"| {'holds' if kept[name]['holds'] else 'does not hold'} |"
        for name in CONFIGS
        if name in kept
    ]
    return "\n".join(lines)


def central() -> str:
    """Return the shipped configs at δ = 10⁻⁵, a line each, beside the central literature."""
    lines = [
        "| | config | guarantee | worst-case ε | d | uploads per agent | bytes per upload | accuracy, % | seeds "
        "| central, published, % |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for about, (local, summed, printed) in SHIPPED.items():
        rows = [(local, about, local), (summed, "the same in sums of 100, 20 colluding", summed)]
        rows += [(name, f"the same; {change}", of) for name, (of, change) in VARIANTS.items() if of == summed]
        for name, what, config in rows:
            kept = kept_result(name)
            run = kept["summaries"][0]
            worst = worst_case(kept) if run["members"] else "–"
            lines.append(
                f"| {what} | `{config}` | ({shown(kept['epsilon'])}, {run['delta']:g}) | {worst} "
                f"| {run['dimension']:,} | {run['participations_max']} | {kept['payload_bytes']:,.0f} "
                f"| {reached(kept)} | {len(kept['summaries'])} | {printed if name == local else ''} |"
            )
    return "\n".join(lines)


def cnns() -> str:
    lines = ["| the paper's CNN on MNIST | accuracy, % | seeds | bytes per upload |", "|---|---|---|---|"]
    for name, about in CNNS.items():
        kept = kept_result(name)
        lines.append(f"| {about} | {reached(kept)} | {len(kept['summaries'])} | {kept['payload_bytes']:,.0f} |")
    return "\n".join(lines)


def others() -> str:
    """What is not a picture, private beside not private."""
    lines = ["| | score | private | (ε, δ) | not private | baseline | seeds |", "|---|---|---|---|---|---|---|"]
    kept = kept_result("others")["kinds"]
    for name, about in OTHERS.items():
        row = kept[name]
        scale = 100 if row["score"] == "accuracy" else 1
        scores = {
            arm: {"mean": scale * each["mean"], "values": [scale * value for value in each["values"]]}
            for arm, each in row["arms"].items()
        }
        score = "accuracy, %" if row["score"] == "accuracy" else row["score"]
        guarantee = f"({shown(row['epsilon'])}, {row['delta']:g})"
        guarantee += "" if row["unit"] == "record" else f", each {row['unit']}"
        lines.append(
            f"| {about} | {score} | {shown_spread(scores['private'])} | {guarantee} "
            f"| {shown_spread(scores['not private'])} | {scale * row['baseline']['mean']:.1f} "
            f"| {len(row['arms']['private']['values'])} |"
        )
    return "\n".join(lines)
