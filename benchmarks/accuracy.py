"""The tables of docs/accuracy.md and README.md from the kept results; `tables.py` writes them in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedspa.privacy.cap import shown
from intervals import half_interval, shown_spread

RESULTS = Path(__file__).parents[1] / "reproduction" / "results"
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
# Kept result → (what differs from its config, what others print for one place with all records at the same ε and δ).
# Tang, Panda, Sehwag, Mittal 2023 name the 60.6 as the best of before.
CENTRAL = {
    "mnist-best-1e-5": ("MNIST, linear on aligned orientations, local", ""),
    "mnist-secure-100-1e-5": ("the same in sums of all agents", ""),
    "cifar10-patches-1e-5": (
        "CIFAR-10 (JPEG copy), linear on patches, local",
        "72.3 (Tang et al. 2023); 60.6, the best before it",
    ),
    "cifar10-secure-100-1e-5": ("the same in sums of all agents", "the same"),
}
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
        "| | config | members, colluding | ε | floor | participations | d | bytes per upload | accuracy, % | seeds |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, about in SUMS.items():
        kept = kept_result(name)
        run = kept["summaries"][0]
        epsilon, floor = (shown(max(each[key] for each in kept["summaries"])) for key in ("epsilon", "epsilon_floor"))
        lines.append(
            f"| {about} | `{name}` | {run['members']}, {run['colluders']} | {epsilon} | {floor} "
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
    names = [name for name in CENTRAL if "secure" not in name]
    for name, summed in zip(names, (name for name in CENTRAL if "secure" in name), strict=True):
        (about, printed), kept, sums = CENTRAL[name], kept_result(name), kept_result(summed)
        worst = shown(max(each["epsilon_floor"] for each in sums["summaries"]))
        lines.append(
            f"| {about.removesuffix(', local')} | {reached(kept)} | {kept['payload_bytes']:,.0f} | {reached(sums)} "
            f"| {worst} | {printed or '–'} |"
        )
    return "\n".join(lines)


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
        for name in (*ROWS, *SUMS)
    ]
    return "\n".join(lines)


def central() -> str:
    """At the δ of the central literature; a line where it was run."""
    lines = ["| | (ε, δ) | accuracy, % | seeds | printed for the central model, % |", "|---|---|---|---|---|"]
    for name, (about, printed) in CENTRAL.items():
        kept = kept_result(name)
        run = kept["summaries"][0]
        guarantee = f"({shown(kept['epsilon'])}, {run['delta']:g})"
        if run["members"]:
            floor = shown(max(each["epsilon_floor"] for each in kept["summaries"]))
            guarantee += f", floor {floor}; {run['members']} members, {run['colluders']} colluding"
        lines.append(f"| {about} | {guarantee} | {reached(kept)} | {len(kept['summaries'])} | {printed} |")
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
