"""`python -m reproduction tradeoff`: Figure 1 of the paper, accuracy against ε for several compression ratios p.

Every point is a run of one config at another ε and p. An example's active part shrinks as √p, so under `l2` the clip
does too: the config's own clip belongs to the config's own p.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedspa.errors import ConfigError
from fedspa.runs.config import Config, load
from intervals import shown_spread
from reproduction import cells
from reproduction.rows import FIRST_SEED
from reproduction.sweep import Outcome, Planned

Point = tuple[float, float]  # p, ε

# No ε without what it is relative to, in no file.
_TERMS = ("delta", "neighbours", "sampling", "unit", "adversary", "sound", "noise")
CSV_COLUMNS = (
    "compression",
    "epsilon",
    "accuracy_last",
    "accuracy_last_std",
    "accuracy_best",
    "accuracy_best_std",
    "seeds",
    *_TERMS,
)


def plan(
    config: Path,
    compressions: Sequence[float],
    epsilons: Sequence[float],
    seeds: int,
    out: Path,
    overrides: Sequence[str],
    first_seed: int = FIRST_SEED,
) -> dict[Point, list[Planned]]:
    """(p, ε) → its runs, one per seed; ε changes slowest, so that a sweep that is cut off has whole comparisons."""
    base = load(config, overrides)
    if base.algorithm.name != "fedspa":
        raise ConfigError(f"{config}: algorithm.name is {base.algorithm.name!r}; only fedspa has a compression to vary")
    planned: dict[Point, list[Planned]] = {}
    for epsilon in epsilons:
        for p in compressions:
            for seed in range(first_seed, first_seed + seeds):
                name = f"epsilon-{epsilon:g}-p-{p:g}-seed-{seed}"
                own = [*_at(base, p, epsilon), f"run.seed={seed}", f"run.out={json.dumps(str(out / 'runs' / name))}"]
                run = Planned(name, load(config, [*overrides, *own]))
                planned.setdefault((p, epsilon), []).append(run)
    return planned


def _at(base: Config, p: float, epsilon: float) -> list[str]:
    changes = [f"algorithm.compression={p!r}", f"privacy.epsilon={epsilon!r}", "privacy.noise_multiplier=none"]
    share = base.algorithm.compression
    if base.privacy.clip == "l2" and isinstance(share, float):
        clip = base.privacy.clip_value * math.sqrt(p / share)
        changes.append(f"privacy.clip_value={float(f'{clip:.4g}')!r}")
    return changes


def assemble(
    planned: Mapping[Point, Sequence[Planned]], outcomes: Mapping[str, Outcome], about: Mapping[str, Any]
) -> dict[str, Any]:
    """The curves so far, as JSON: a point for each (p, ε). `epsilon_target` was asked for, `epsilon` is verified."""
    points = []
    for (p, epsilon), runs in planned.items():
        ended = [outcomes[run.name] for run in runs if run.name in outcomes]
        found = cells.cell(runs[0].config, ended, len(runs))
        # p as it was asked for: the cell's own is k/d, which differs by what rounding k did.
        points.append({**found, "compression": p, "epsilon_target": epsilon})
    return {**about, **cells.origin(outcomes.values()), "points": points}


def as_csv(curves: Mapping[str, Any]) -> str:
    """One line per point that has runs."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for point in curves["points"]:
        if "accuracy_last" in point:
            last, best = point["accuracy_last"], point["accuracy_best"]
            spreads = [last["mean"], last["std"], best["mean"], best["std"]]
            told = [point["compression"], point["epsilon_target"], *spreads, point["seeds"]]
            writer.writerow([*told, *(point[term] for term in _TERMS)])
    return text.getvalue()


def lines(curves: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of the curves as a table: one row per ε, one column per p; accuracy after the last round."""
    ratios = list(dict.fromkeys(point["compression"] for point in curves["points"]))
    found = {(point["compression"], point["epsilon_target"]): point for point in curves["points"]}
    rows = []
    for epsilon in dict.fromkeys(point["epsilon_target"] for point in curves["points"]):
        rows.append([f"{epsilon:g}", *(_shown(found[p, epsilon]) for p in ratios)])
    seeded = any(point.get("noise") == "seeded" for point in curves["points"])
    return ["ε (SEEDED NOISE: a simulation)" if seeded else "ε", *(f"p = {p:g}" for p in ratios)], rows


def markdown(curves: Mapping[str, Any]) -> str:
    return cells.markdown(*lines(curves))


def _shown(point: Mapping[str, Any]) -> str:
    if point["status"] in ("diverged", "refused"):
        return str(point["status"])
    return shown_spread(point["accuracy_last"]) if "accuracy_last" in point else cells.NOT_RUN
