"""Accuracy against ε as a picture. Needs the extra `plots`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedspa.errors import FedspaError
from fedspa.privacy.event import shown
from intervals import half_interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Told apart by people who see colours differently, and by their markers in print.
_COLOURS, _MARKERS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"), "osD^vP"


class NoPlots(FedspaError):
    """matplotlib is not installed; everything but the picture works without."""

    def __init__(self) -> None:
        super().__init__("no picture was drawn: matplotlib is not installed; pip install 'fedspa[plots]'")


def fingerprint(curves: Mapping[str, Any]) -> str:
    """Names the data of a picture, and is written into it: a picture can be held to its data."""
    text = json.dumps(curves["points"], sort_keys=True)
    return f"fedspa tradeoff {hashlib.sha256(text.encode()).hexdigest()[:32]}"


def draw(curves: Mapping[str, Any], path: Path) -> None:
    """The picture as a file, SVG or PNG by its name."""
    try:
        import matplotlib
    except ImportError:
        raise NoPlots from None

    # Text stays text and nothing is random: the same data give the same file.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fedspa"}):
        about = {"Description": fingerprint(curves)}
        picture(curves).savefig(path, dpi=150, metadata={**about, "Date": None} if path.suffix == ".svg" else about)


def picture(curves: Mapping[str, Any]) -> Figure:
    """Mean accuracy after the last round, bars of its 95 % confidence interval, one line per p or kind of trust."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.add_subplot()
    points = [point for point in curves["points"] if "accuracy_last" in point]
    for number, line in enumerate(dict.fromkeys(map(_line, points))):
        mine = sorted((point for point in points if _line(point) == line), key=_at)
        means = [point["accuracy_last"]["mean"] for point in mine]
        axes.errorbar(
            # Side by side by 2 %, so that bars of equal ε do not hide each other.
            [_at(point) * 1.02**number for point in mine],
            means,
            yerr=[half_interval(point["accuracy_last"]["values"]) or 0.0 for point in mine],
            color=_COLOURS[number % len(_COLOURS)],
            marker=_MARKERS[number % len(_MARKERS)],
            markersize=5,
            linewidth=1.5,
            capsize=3,
            label=line,
        )
    axes.set_xscale("log")
    if curves.get("against") == "bytes":  # each line has its own
        ticks = [
            10.0**power for power in range(9) if any(0.3 * 10**power <= _at(each) <= 30 * 10**power for each in points)
        ]
    else:
        ticks = sorted({_at(point) for point in points})
    axes.set_xticks(ticks, [f"{tick:,g}" if tick < 1 else f"{tick:,.10g}" for tick in ticks])
    axes.minorticks_off()
    terms = epsilon_label(points).replace(" (", "\n(", 1)  # in one line its terms would be cut off
    if curves.get("against", "epsilon") == "epsilon":
        axes.set_xlabel(terms)
    else:
        epsilon = shown(max(point["epsilon"] for point in points))
        axes.set_xlabel(f"{curves['axis']}; {terms.replace('ε', f'ε = {epsilon}', 1)}")
    axes.set_ylabel("accuracy after the last round, %")
    axes.set_title(curves["title"])
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if points:
        axes.legend(frameon=False)
    return figure


def _at(point: Mapping[str, Any]) -> float:
    return float(point["at"] if "at" in point else point["epsilon_target"])


def _line(point: Mapping[str, Any]) -> str:
    return str(point["line"]) if "line" in point else f"p = {point['compression']:g}"


def epsilon_label(points: Sequence[Mapping[str, Any]]) -> str:
    """No ε without its terms, which points without a run lack."""
    points = [point for point in points if "delta" in point]
    if not points:
        return "ε"
    terms = f"δ = {points[0]['delta']:g}, {points[0]['neighbours']}, {points[0]['sampling']}"
    terms += ", SEEDED NOISE: a simulation" * any(point.get("noise") == "seeded" for point in points)
    unit = points[0].get("unit") or "record"  # what was kept before there was a choice does not say
    return f"ε per {unit} and agent ({terms})" if all(point["sound"] for point in points) else f"ε, NOT SOUND ({terms})"
