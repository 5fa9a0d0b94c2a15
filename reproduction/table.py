"""`python -m reproduction table`: which runs a table takes, and the table that they give."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedspa.algorithms import ALGORITHMS
from fedspa.privacy.event import shown
from intervals import shown_spread
from reproduction import cells, rows
from reproduction.rows import TRIAL_KINDS, Row, TableSpec, TrialKind
from reproduction.sweep import Outcome, Planned


def plan(
    path: Path,
    spec: TableSpec,
    chosen: Sequence[Row],
    seeds: int,
    out: Path,
    quick: bool,
    overrides: Sequence[str],
    first_seed: int = rows.FIRST_SEED,
) -> dict[str, list[Planned]]:
    """Cell → its runs, one per seed. Rows change slowest, so that a table that is cut off has whole rows."""
    planned: dict[str, list[Planned]] = {}
    for row in chosen:
        for setting, trial in row.trials.items():
            small = [] if not quick else spec.quick if trial.quick is None else trial.quick
            key = row.cell(setting)
            count = seeds if quick else max(seeds, trial.seeds)
            for seed in range(first_seed, first_seed + count):
                name = f"{key}-seed-{seed}"
                own = [f"run.seed={seed}", f"run.out={json.dumps(str(out / 'runs' / name))}"]
                run = Planned(name, rows.trial_config(path, trial, [*small, *overrides, *own]))
                planned.setdefault(key, []).append(run)
    return planned


def assemble(
    spec: TableSpec,
    chosen: Sequence[Row],
    planned: Mapping[str, Sequence[Planned]],
    outcomes: Mapping[str, Outcome],
    about: Mapping[str, Any],
) -> dict[str, Any]:
    """The table so far, as JSON: `about` (command, seeds, …), then a row each with printed and measured figures."""
    body = []
    for row in chosen:
        found: dict[str, Any] = {}
        for setting in row.trials:
            runs = planned[row.cell(setting)]
            ended = [outcomes[run.name] for run in runs if run.name in outcomes]
            found[setting] = cells.cell(runs[0].config, ended, len(runs))
            if setting == "published":  # at a clip value that was read off the data
                found[setting]["sound"] = False
        body.append(
            {
                "algorithm": row.algorithm,
                "compression": row.compression,
                "adversary": row.adversary,
                "printed": row.printed.model_dump(),
                "cost": _cost(row, [cell for setting, cell in found.items() if setting != "tuned"]),
                **found,
            }
        )
    return {"title": spec.title, **about, **cells.origin(outcomes.values()), "note": spec.note, "rows": body}


def _cost(row: Row, found: Sequence[Mapping[str, Any]]) -> float | None:
    """The paper's formula, p·d·32·T·r bits, in MB: what an agent uploads in the whole run of its model on average."""
    for run in found:
        if "dimension" in run:
            shares = row.compression * run["dimension"] * run["rounds"] * run["per_round"] / run["agents"]
            return float(shares * 4 / 1e6)
    return None


ACCURACY_COLUMNS = (
    *("algorithm", "p", "printed %", "published noise: best %", "last %", "sound: best %", "last %"),
    *("tuned: best %", "last %"),
)
EPSILON_COLUMNS = (
    *("algorithm", "p", "printed ε", "published noise: ε as published", "verified ε", "sound: verified ε"),
    "tuned: verified ε",
)
COST_COLUMNS = (
    *("algorithm", "p", "printed MB", "formula MB", "measured MB", "bytes per upload", "× fewer than FedAvg"),
    "tuned: bytes per upload",
)


def accuracy_lines(table: Mapping[str, Any]) -> list[list[str]]:
    """Printed, ours at the published noise, ours under a sound guarantee, ours with the best settings: side by side."""
    lines = []
    for row in table["rows"]:
        ours = [text for setting in TRIAL_KINDS for text in _accuracies(row.get(setting))]
        lines.append([*_name(row), _printed_accuracy(row), *ours])
    return lines


def epsilon_lines(table: Mapping[str, Any]) -> list[list[str]]:
    """ε of the same rows. At the published noise two: what a published theorem says, and what is verified."""
    lines = []
    for row in table["rows"]:
        ours = [_published_epsilon(row.get("published")), *(epsilon(row, setting) for setting in TRIAL_KINDS)]
        lines.append([*_name(row), _number(row["printed"]["epsilon"], "g"), *ours])
    return lines


def cost_lines(table: Mapping[str, Any]) -> list[list[str]]:
    """What an agent uploads in the whole run: printed, by the paper's formula, and as payloads that were sent."""
    dense = next((_sent(row) for row in table["rows"] if not ALGORITHMS[row["algorithm"]].private), None)
    lines = []
    for row in table["rows"]:
        sent = _sent(row)
        measured = ["–", "–", "–"]
        if sent is not None:
            fewer = None if dense is None else dense["uplink_bytes"] / sent["uplink_bytes"]
            measured = [_mb(sent["uplink_bytes"] / 1e6), f"{sent['payload_bytes']:,.0f}", _number(fewer, ",.1f")]
        cost = [_number(row["printed"]["cost"], "g"), "–" if row["cost"] is None else _mb(row["cost"])]
        tuned = _number(row.get("tuned", {}).get("payload_bytes"), ",.0f")
        lines.append([*_name(row), *cost, *measured, tuned])
    return lines


NOISE = {"published": "published", "verified": "sound", "tuned": "sound*"}
COST_HEADS = (
    *("", "p", "printed\nMB", "formula\nMB", "measured\nMB", "bytes per\nupload", "× below\nFedAvg"),
    "tuned: bytes\nper upload",
)
RUN_COLUMNS = ("", "p", "noise", "paper\n%", "ours\nbest %", "\nlast %", "published\nε", "our ε,\nfloor")
_PRICED = "priced"
_CELLS = {"published": "at the published noise", "verified": "in sound cells", "tuned": "in tuned ones"}
_INTERVAL = "± is half of the 95 % confidence interval of the mean"


def run_lines(table: Mapping[str, Any]) -> list[list[str]]:
    """One line per cell: what fits on a screen."""
    lines = []
    for row in table["rows"]:
        for setting in TRIAL_KINDS:
            if (cell := row.get(setting)) is None:
                continue
            noise = NOISE[setting] if ALGORITHMS[row["algorithm"]].private else "none"
            name = [*_name(row), noise, _printed_accuracy(row)]
            accuracies = [text.replace(" ", "") for text in _accuracies(cell)]
            lines.append([*name, *accuracies, _published_epsilon(cell), "\n".join(_epsilons(row, setting))])
    return narrow(lines)


def narrow(lines: Sequence[Sequence[str]]) -> list[list[str]]:
    """Names of rows in as many columns as a screen has for them."""
    return [[name.replace(", secure aggregation", "\nin sums"), *others] for name, *others in lines]


def notes(table: Mapping[str, Any]) -> list[str]:
    """What a reader of the figures must know: how many seeds, whose ε counts, why a row has none."""
    lines = (
        ["Quick: tiny runs that show every row works. Nothing follows from their accuracies."] if table["quick"] else []
    )
    lines.append(
        f"best: the best round on the held-out records, as the paper reports it. last: after the last round. "
        f"From {_seeds(table)}. ε is the largest over agents."
    )
    if any(row.get(setting, {}).get("noise") == "seeded" for row in table["rows"] for setting in TRIAL_KINDS):
        lines.append(
            "Every ε here is a simulation's. THE NOISE WAS SEEDED, so that the runs can be repeated to the bit, and "
            "nothing in them is private; each ε would hold with secure noise."
        )
    for row in table["rows"]:
        for setting in TRIAL_KINDS:
            cell = row.get(setting)
            if cell is not None and cell["reason"]:
                name = f"{', p = '.join(_name(row))}, {setting}"
                lines.append(f"{name}: {cell['status']}: {cell['reason']}")
    if any("tuned" in row for row in table["rows"]):
        lines.append(
            "sound*, or tuned: the best settings known here, with another model. The configs say what they are and how "
            "they were chosen. The bandwidth is that of the paper's model."
        )
    lines += _of_sums(table)
    if any("published" in row and row["algorithm"] in ("fedspa", "dp-fed") for row in table["rows"]):
        lines.append(
            "Published noise is not private: the clip value is read off the data, and Theorem 1 does not hold "
            "(docs/paper.md)."
        )
    if any(row["algorithm"] == "cpsgd" for row in table["rows"]):
        lines.append(
            "cpSGD: the printed ε assume secure aggregation. The clip value of all its rows was read off the data, and "
            "ε would hold if it were given. A dash stands where no accountant knows one. The published ε has the "
            "sensitivities as printed."
        )
    return lines


def _of_sums(table: Mapping[str, Any]) -> list[str]:
    """Against whom the ε of secure aggregation hold."""
    of = [
        (row, row[setting])
        for row in table["rows"]
        if row["adversary"] != "local"
        for setting in TRIAL_KINDS
        if setting in row
    ]
    found = {
        f"{cell['members']} members ({cell['colluders']} collude) in {rows.label(row['algorithm'], 'local')}'s": None
        for row, cell in of
        if _aggregated(cell)
    }
    lines = []
    if found:
        lines.append(
            "Secure aggregation was simulated: the server used sums only, and ε is against one that sees no more, and "
            f"those who collude with it. Sums are over {', '.join(found)}. The worst case is against a server "
            "with whom all other members collude."
        )
    if any("epsilon" in cell and not _aggregated(cell) for _, cell in of):
        lines.append(
            "Priced only: run before the protocol was there. The server would have seen each upload, and ε, which "
            "counts all agents' noise, is no guarantee of that run."
        )
    return lines


def _seeds(table: Mapping[str, Any]) -> str:
    """How many each kind of cell has: a table's file may ask for more than --seeds does."""
    found = {
        of: sorted({row[setting]["seeds"] for row in table["rows"] if setting in row} - {0})
        for setting, of in _CELLS.items()
    }
    counts = {of: " or ".join(map(str, numbers)) for of, numbers in found.items() if numbers}
    match sorted({*counts.values()}):
        case []:
            return "no run that is done yet"
        case ["1"]:
            return "one seed"
        case [count]:
            return f"{count} seeds; {_INTERVAL}"
    told = ", ".join(f"{count} {of}" for of, count in counts.items())
    return f"these numbers of seeds: {told}; where there are several, {_INTERVAL}"


def markdown(table: Mapping[str, Any]) -> str:
    """Accuracy, ε and bandwidth, for documents."""
    parts = (
        (ACCURACY_COLUMNS, accuracy_lines(table)),
        (EPSILON_COLUMNS, epsilon_lines(table)),
        (COST_COLUMNS, cost_lines(table)),
    )
    return "\n\n".join(cells.markdown(columns, lines) for columns, lines in parts)


def _name(row: Mapping[str, Any]) -> list[str]:
    return [rows.label(row["algorithm"], row["adversary"]), f"{row['compression']:g}"]


def _printed_accuracy(row: Mapping[str, Any]) -> str:
    return "diverged" if row["printed"]["diverged"] else _number(row["printed"]["accuracy"], ".2f")


def _sent(row: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The bytes of the sound run where there is one: what anyone would deploy."""
    for setting in ("verified", "published"):
        if "payload_bytes" in row.get(setting, {}):
            found: Mapping[str, Any] = row[setting]
            return found
    return None


def _accuracies(cell: Mapping[str, Any] | None) -> list[str]:
    if cell is None:
        return ["–", "–"]
    if cell["status"] in ("diverged", "refused"):
        return [cell["status"], "–"]
    if "accuracy_best" not in cell:
        return [cells.NOT_RUN, cells.NOT_RUN]
    return [shown_spread(cell["accuracy_best"]), shown_spread(cell["accuracy_last"])]


def _published_epsilon(cell: Mapping[str, Any] | None) -> str:
    value = cell.get("epsilon_published") if cell is not None else None
    return "–" if value is None else shown(value)


def epsilon(row: Mapping[str, Any], setting: TrialKind) -> str:
    """In a line. Of sums the worst case stands beside it, or that no sum was made."""
    value, *aside = _epsilons(row, setting)
    if not aside:
        return value
    return f"{value} ({'priced only' if aside == [_PRICED] else f'worst case {aside[0]}'})"


def _epsilons(row: Mapping[str, Any], setting: TrialKind) -> list[str]:
    """ε, and of sums the worst case or a word that there is none."""
    cell = row.get(setting, {})
    if cell.get("epsilon") is None:
        return ["–"]
    if row["adversary"] == "local":
        return [shown(cell["epsilon"])]
    if not _aggregated(cell):
        return [shown(cell["epsilon"]), _PRICED]
    floor = cell["epsilon_worst_case"]
    return [shown(cell["epsilon"]), "∞" if floor is None else shown(floor)]


def _aggregated(cell: Mapping[str, Any]) -> bool:
    """Whether the protocol was run. Editions before it only priced it, and named no members."""
    return cell.get("members") is not None


def _mb(value: float) -> str:
    """Four digits, and never 2.1e-05."""
    return f"{value:.4g}" if value >= 1e-4 else f"{value:.6f}"


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
