"""`python -m reproduction trust`: accuracy on MNIST at δ = 10⁻⁵ by trust, against ε, the number of agents or bytes.

Locally, an agent trusts nobody. In sums of 10 or 100 it trusts that at most a fifth of the cohort colludes with the
server. Centrally, one trusted place holds all records. Settings were chosen at ε = 1 with 100 agents. Where the noise
of a mean update is larger than there, the server's rate falls by as much, so that noise moves the model as far.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedspa.runs.config import load
from intervals import shown_spread
from reproduction import cells
from reproduction.rows import FIRST_SEED, find_config
from reproduction.sweep import Outcome, Planned

RECORDS = 60_000
Changes = tuple[list[str], float]  # overrides, and how much the server's rate falls


@dataclass(frozen=True)
class Axis:
    """What accuracy is drawn against. `changes` say what a line's run differs in at a value of it."""

    values: tuple[float, ...]
    label: str
    lines: tuple[str, ...]
    changes: Callable[[str, float], Changes]


# Line → its config and what differs from it. One place is one agent with the records of all.
LINES: dict[str, tuple[str, tuple[str, ...]]] = {
    "central": (
        "mnist-secure-100",
        (
            *("privacy.adversary=local", "privacy.colluders=0", "algorithm.mask=per-agent"),
            *("federation.agents=1", "federation.per_round=1", f"algorithm.batch={RECORDS}"),
        ),
    ),
    "sums of 100, 20 colluding": ("mnist-secure-100", ()),
    "sums of 10, 2 colluding": ("mnist-secure", ("privacy.delta=1e-5",)),
    "local": ("mnist-best", ()),
    "sums of all, a fifth colluding": ("mnist-secure-100", ()),
}


def _at_epsilon(line: str, epsilon: float) -> Changes:
    return [f"privacy.epsilon={epsilon!r}"], min(1.0, epsilon)


def _among_agents(line: str, agents: float) -> Changes:
    """The same records held by so many agents. Locally a tenth of them train in a round, each as often, and the noise
    of their mean grows by the root of their number. A sum over all has the same noise however many they are."""
    n = int(agents)
    changes = [f"federation.agents={n}", f"algorithm.batch={RECORDS // n}"]
    if line == "local":
        return [*changes, f"federation.per_round={n // 10}"], min(1.0, math.sqrt(100 / n))
    return [*changes, f"federation.per_round={n}", f"privacy.colluders={n // 5}"], 1.0


def _at_compression(line: str, p: float) -> Changes:
    """An example's active part shrinks as √p, and so does the clip."""
    return [f"algorithm.compression={p!r}", f"privacy.clip_value={0.1 * math.sqrt(p):.4g}"], 1.0


AXES = {
    "epsilon": Axis((0.1, 0.3, 1.0, 3.0, 8.0), "ε", tuple(LINES)[:4], _at_epsilon),
    "agents": Axis(
        (10.0, 30.0, 100.0, 300.0, 1000.0), "agents", ("local", "sums of all, a fifth colluding"), _among_agents
    ),
    "bytes": Axis(
        (0.01, 0.03, 0.1, 0.3, 1.0), "bytes per upload", ("local", "sums of 100, 20 colluding"), _at_compression
    ),
}
Point = tuple[str, float]  # line, value of the axis


def plan(
    axis: Axis, values: Sequence[float], seeds: int, out: Path, overrides: Sequence[str]
) -> dict[Point, list[Planned]]:
    """Return the runs of each line and value, one per seed; values change slowest."""
    planned: dict[Point, list[Planned]] = {}
    name_of = next(name for name, each in AXES.items() if each is axis)
    for value in values:
        for line in axis.lines:
            name, own = LINES[line]
            changes, fall = axis.changes(line, value)
            rate = load(find_config(name)).algorithm.server_lr * fall
            settings = [*own, *changes, f"algorithm.server_lr={rate:.4g}"]
            for seed in range(FIRST_SEED, FIRST_SEED + seeds):
                run = f"{name_of}-{value:g}-{line.partition(',')[0].replace(' ', '-')}-seed-{seed}"
                folder = json.dumps(str(out / "runs" / run))
                config = load(find_config(name), [*settings, *overrides, f"run.seed={seed}", f"run.out={folder}"])
                planned.setdefault((line, value), []).append(Planned(run, config))
    return planned


def assemble(
    planned: Mapping[Point, Sequence[Planned]], outcomes: Mapping[str, Outcome], about: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the points so far, as JSON. `at` is the value of the axis, and of bytes what was measured."""
    points = []
    for (line, value), runs in planned.items():
        ended = [outcomes[run.name] for run in runs if run.name in outcomes]
        found = cells.cell(runs[0].config, ended, len(runs))
        at = found.get("payload_bytes", value) if about["against"] == "bytes" else value
        points.append({**found, "line": line, "at": at, "value": value})
    return {**about, **cells.origin(outcomes.values()), "points": points}


def markdown(curves: Mapping[str, Any]) -> str:
    """Return the table: a row per value, a column per line."""
    axis = AXES[curves["against"]]
    found = {(point["line"], point["value"]): point for point in curves["points"]}
    values = dict.fromkeys(point["value"] for point in curves["points"])
    lines = [line for line in axis.lines if any((line, value) in found for value in values)]
    if curves["against"] == "bytes":
        header = ["p", *(head for line in lines for head in (f"{line}: bytes", "accuracy"))]
        rows = [
            [f"{value:g}", *(cell for line in lines for cell in _with_bytes(found[line, value]))] for value in values
        ]
    elif curves["against"] == "agents":
        header = ["agents", *lines, "worst-case ε"]
        rows = [
            [f"{value:,.0f}", *(_shown(found[line, value]) for line in lines), _worst_case(found[lines[-1], value])]
            for value in values
        ]
    else:
        header = ["ε", *lines]
        rows = [[f"{value:g}", *(_shown(found[line, value]) for line in lines)] for value in values]
    return cells.markdown(header, rows)


def _shown(point: Mapping[str, Any]) -> str:
    return shown_spread(point["accuracy_last"]) if "accuracy_last" in point else str(point["status"])


def _with_bytes(point: Mapping[str, Any]) -> tuple[str, str]:
    return f"{point['at']:,.0f}", _shown(point)


def _worst_case(point: Mapping[str, Any]) -> str:
    from fedspa.privacy.event import shown_digits

    return shown_digits(point["epsilon_worst_case"]) if point.get("epsilon_worst_case") else "–"
