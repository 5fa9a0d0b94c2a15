"""`python -m reproduction trust`: accuracy against ε on MNIST at δ = 10⁻⁵, a line for each kind of trust.

Locally, an agent trusts nobody. In sums of 10 or 100 it trusts that at most a fifth of the cohort colludes with the
server. Centrally, one trusted place holds all records. Settings were chosen at ε = 1; below that the server's rate
falls with ε, so that the noise moves the model as far as at ε = 1.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedspa.runs.config import load
from intervals import shown_spread
from reproduction import cells
from reproduction.rows import FIRST_SEED, find_config
from reproduction.sweep import Outcome, Planned

# Line → its config and what differs from it. One place is one agent with the records of all.
LINES: dict[str, tuple[str, tuple[str, ...]]] = {
    "central": (
        "mnist-secure-100",
        (
            *("privacy.adversary=local", "privacy.colluders=0", "algorithm.mask=per-agent"),
            *("federation.agents=1", "federation.per_round=1", "algorithm.batch=60000"),
        ),
    ),
    "sums of 100, 20 colluding": ("mnist-secure-100", ()),
    "sums of 10, 2 colluding": ("mnist-secure", ("privacy.delta=1e-5",)),
    "local": ("mnist-best", ()),
}
Point = tuple[str, float]  # line, ε


def plan(epsilons: Sequence[float], seeds: int, out: Path, overrides: Sequence[str]) -> dict[Point, list[Planned]]:
    """Return the runs of each line and ε, one per seed; ε changes slowest."""
    planned: dict[Point, list[Planned]] = {}
    for epsilon in epsilons:
        for line, (name, changes) in LINES.items():
            rate = load(find_config(name)).algorithm.server_lr * min(1.0, epsilon)
            own = [*changes, f"privacy.epsilon={epsilon!r}", f"algorithm.server_lr={rate:.4g}"]
            for seed in range(FIRST_SEED, FIRST_SEED + seeds):
                run = f"epsilon-{epsilon:g}-{line.partition(',')[0].replace(' ', '-')}-seed-{seed}"
                folder = json.dumps(str(out / "runs" / run))
                config = load(find_config(name), [*own, *overrides, f"run.seed={seed}", f"run.out={folder}"])
                planned.setdefault((line, epsilon), []).append(Planned(run, config))
    return planned


def assemble(
    planned: Mapping[Point, Sequence[Planned]], outcomes: Mapping[str, Outcome], about: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the points so far, as JSON."""
    points = []
    for (line, epsilon), runs in planned.items():
        ended = [outcomes[run.name] for run in runs if run.name in outcomes]
        points.append(
            {**cells.cell(runs[0].config, ended, len(runs)), "line": line, "epsilon_target": epsilon},
        )
    return {**about, **cells.origin(outcomes.values()), "points": points}


def markdown(curves: Mapping[str, Any]) -> str:
    """Return the table: a row per ε, a column per line."""
    found = {(point["line"], point["epsilon_target"]): point for point in curves["points"]}
    epsilons = dict.fromkeys(point["epsilon_target"] for point in curves["points"])
    rows = [
        [f"{epsilon:g}", *(_shown(found[line, epsilon]) for line in LINES if (line, epsilon) in found)]
        for epsilon in epsilons
    ]
    return cells.markdown(["ε", *LINES], rows)


def _shown(point: Mapping[str, Any]) -> str:
    return shown_spread(point["accuracy_last"]) if "accuracy_last" in point else str(point["status"])
