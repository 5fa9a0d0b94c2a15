"""The results of docs/paper.md, from the kept JSON under reproduction/results; a test holds the two together.

    python -m reproduction.page keep DIR/table.json table-mnist [--note "what to know of the data"]
    python -m reproduction.page fill        # writes docs/paper.md anew between its markers

`keep` takes over what the commands `table` (table.json) and `tradeoff` (tradeoff.json) left. Of a table that was run
with --rows the other rows and cells stay as they were kept. Nothing is typed in.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from intervals import half_interval, shown_spread
from reproduction import plot, rows, table, tradeoff
from reproduction.rows import TRIAL_KINDS, Row, TrialKind, read

ROOT = Path(__file__).parents[1]
PAGE, RESULTS = ROOT / "docs" / "paper.md", ROOT / "reproduction" / "results"


def filled(page: str) -> str:
    """The page with what its markers name, as in `<!-- table: mnist -->`; also `findings` and `curve`."""
    makers: dict[str, Callable[[str], str]] = {
        "table": _table,
        "findings": _findings,
        "curve": _curve,
        "original": _original,
    }
    pattern = r"(<!-- (\w+): ([\w-]+) -->\n)(?:.*\n)*?(<!-- end -->\n)"
    return re.sub(pattern, lambda match: match[1] + makers[match[2]](match[3]) + match[4], page)


def result(name: str) -> dict[str, Any] | None:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text("utf-8")) if path.exists() else None


def _table(name: str) -> str:
    found = result(f"table-{name}")
    if found is None:
        return "\nNot run yet.\n\n"
    notes = [*table.notes(found), *_origins(found)]
    return f"\n{table.markdown(found)}\n\n" + "".join(f"- {line}\n" for line in notes) + "\n"


def _curve(name: str) -> str:
    found = result(f"tradeoff-{name}")
    if found is None:
        return "\nNot run yet.\n\n"
    picture = f"![Accuracy against ε, {name}](figures/tradeoff-{name}.svg)"
    return f"\n{picture}\n\n{tradeoff.markdown(found)}\n\n{_best(found)}\n\n{_origin(found)}\n\n"


def _original(name: str) -> str:
    """Points of a curve that were run again on the original files, beside what is kept of recompressed ones."""
    again, kept = result(f"original-{name}"), result(f"tradeoff-{name}")
    assert again is not None
    assert kept is not None
    before = {(point["epsilon_target"], point["compression"]): point for point in kept["points"]}
    parts = [
        f"p = {point['compression']:.2g}: {shown_spread(point['accuracy_last'])} "
        f"({shown_spread(before[point['epsilon_target'], round(point['compression'], 3)]['accuracy_last'])})"
        for point in sorted(again["points"], key=lambda point: point["compression"])
    ]
    (epsilon,) = {point["epsilon_target"] for point in again["points"]}
    return (
        f"\nThe runs with the CNN used images that were recompressed with loss. Repeated on the original files with "
        f"the same seeds at ε = {epsilon:g}, they give, in % and in brackets what is kept above, "
        f"{'; '.join(parts)}.\n\n"
        f"{_origin(again)}\n\n"
    )


def _best(found: Mapping[str, Any]) -> str:
    """Which p does best at each ε, and how much it matters: what the paper's figure is about."""
    by_epsilon: dict[float, list[tuple[float, float]]] = {}
    cut_off = {point["epsilon_target"] for point in found["points"] if point["status"] != "done"}
    for point in found["points"]:
        if point["epsilon_target"] not in cut_off:
            by_epsilon.setdefault(point["epsilon_target"], []).append(
                (point["accuracy_last"]["mean"], point["compression"])
            )
    best = [f"{max(points)[1]:.2g} at ε = {epsilon:g}" for epsilon, points in sorted(by_epsilon.items())]
    spreads = [max(points)[0] - min(points)[0] for points in by_epsilon.values()]
    return f"The best p is {', '.join(best)}; between the best and the worst p lie {_from_to(spreads)} points."


def _from_to(values: Sequence[float]) -> str:
    """The smallest and the largest, or one figure where they read the same."""
    return " to ".join(dict.fromkeys(f"{end:.1f}" for end in (min(values), max(values))))


def _origin(found: Mapping[str, Any]) -> str:
    note = f" {found['note']}" if found.get("note") else ""
    commits, machines = " and ".join(found["commits"]), "; ".join(found["hardware"])
    return f"`{found['command']}`, commit {commits}, on {machines}.{note}"


def _origins(found: Mapping[str, Any]) -> list[str]:
    """Where a table's cells come from, those that were run later by name."""
    parts = found.get("parts", [])
    later = [f"{', '.join(_names(found, part))}: {_origin(part)}{_fresh(found, part['cells'])}" for part in parts]
    if later and {*_cells(found)} <= {key for part in parts for key in part["cells"]}:
        return [*later, *([found["note"]] if found.get("note") else [])]
    return [("All other rows: " if later else "") + _origin(found), *later]


def _names(found: Mapping[str, Any], part: Mapping[str, Any]) -> list[str]:
    """The cells of a part, with one name for a row that is in it whole."""
    names = []
    for row in found["rows"]:
        cells = [*map(_row(row).cell, _settings(row))]
        own = [key for key in cells if key in part["cells"]]
        names += [_row(row).key] if own == cells else own
    return names


def _fresh(found: Mapping[str, Any], names: Sequence[str]) -> str:
    """The seeds of these cells, where they are not the first that there are."""
    first = sorted({cell["first_seed"] for key, cell in _cells(found).items() if key in names and "first_seed" in cell})
    return f" Seeds from {' and '.join(map(str, first))} on: no setting was tried on them." if first else ""


def _cells(found: Mapping[str, Any]) -> dict[str, Any]:
    return {_row(row).cell(setting): row[setting] for row in found["rows"] for setting in _settings(row)}


def _row(row: Mapping[str, Any]) -> Row:
    return Row(algorithm=row["algorithm"], compression=row["compression"], adversary=row["adversary"])


def _settings(row: Mapping[str, Any]) -> list[TrialKind]:
    return [setting for setting in TRIAL_KINDS if setting in row]


def merged(kept: Mapping[str, Any], found: Mapping[str, Any], order: Sequence[str]) -> dict[str, Any]:
    """The kept table with the cells that were `found` in place of its own, its rows in this order; each part says its
    origin."""
    rows = {_row(row).key: row for row in kept["rows"]}
    for new in found["rows"]:
        old = rows.get(_row(new).key, {})
        # A tuned cell alone has another model than the paper's, whose cost the row tells.
        rows[_row(new).key] = old | {key: value for key, value in new.items() if value is not None or key not in old}
    whole, again = {**kept, "rows": [rows[key] for key in sorted(rows, key=order.index)]}, [*_cells(found)]
    if {*_cells(whole)} <= {*again}:
        return dict(found)
    parts = [part | {"cells": [key for key in part["cells"] if key not in again]} for part in kept.get("parts", [])]
    origin = {key: found[key] for key in ("command", "commits", "hardware")}
    return {**whole, "parts": [*(part for part in parts if part["cells"]), {"cells": again, **origin}]}


def _findings(name: str) -> str:
    found = result(f"table-{name}")
    if found is None:
        return "\nNot run yet.\n\n"
    if found["quick"]:
        return "\nNothing yet: what is kept above is a quick table.\n\n"
    lines = [*_fedavg(found), *_published(found)]
    lines += [*_sound(found, "verified", "with the paper's model"), *_best_cnn(name, found)]
    lines += _sound(found, "tuned", "with the best settings known here")
    lines += [*_sums(found), *_cpsgd(found)]
    return "\n" + "".join(f"- {line}\n" for line in lines) + "\n"


def _best_cnn(name: str, found: Mapping[str, Any]) -> list[str]:
    """What the paper's model reaches at the same guarantee with settings that no row of the table has."""
    if name != "mnist":
        return []
    sparse, full = (
        f"{run['accuracy']:.2f} ± {run['accuracy_interval']:.2f} %"
        for run in (result("mnist-cnn-best"), result("mnist-cnn-full"))
        if run is not None
    )
    printed = max(row["printed"]["accuracy"] for row in _local(found) if row["algorithm"] in ("fedspa", "dp-fed"))
    return [
        f"**The same model under the same guarantee, with better settings:** {sparse} at p = 0.05 and {full} at p = 1 "
        f"([accuracy](accuracy.md#the-papers-cnn-and-what-p-costs-it)); a private row prints at most {printed:.2f}."
    ]


def _fedavg(found: Mapping[str, Any]) -> list[str]:
    for row in found["rows"]:
        if row["algorithm"] == "fedavg" and "accuracy_best" in row["published"]:
            ours, printed = row["published"]["accuracy_best"]["mean"], row["printed"]["accuracy"]
            word = "reproduced" if ours > printed - 1 else "not reproduced"
            return [f"**FedAvg: {word}.** {ours:.2f} % at best, {printed:.2f} printed."]
    return []


def _published(found: Mapping[str, Any]) -> list[str]:
    private = [row for row in _local(found) if row["algorithm"] in ("fedspa", "dp-fed")]
    ended = [row for row in private if "accuracy_best" in row["published"]]
    if not ended:
        return []
    ours = [row["published"]["accuracy_best"]["mean"] for row in ended]
    printed = [row["printed"]["accuracy"] for row in ended]
    word = "reproduced" if min(a - b for a, b in zip(ours, printed)) > -1 else "not reproduced"
    return [
        f"**The private rows at the published noise: {word}.** {_from_to(ours)} % at best; {_from_to(printed)} printed."
    ]


def _sound(found: Mapping[str, Any], setting: str, words: str) -> list[str]:
    cells = {row["compression"]: row.get(setting, {}) for row in _local(found) if row["algorithm"] == "fedspa"}
    last = {p: cell["accuracy_last"] for p, cell in cells.items() if "accuracy_last" in cell}
    if len(last) < 2:
        return []
    means = [value["mean"] for value in last.values()]
    halves = [half for value in last.values() if (half := half_interval(value["values"])) is not None]
    beside = f", and the means are known to ± {max(halves):.1f} at worst" if halves else ", from one seed"
    low, high, most = min(last), max(last), max(last, key=lambda p: float(last[p]["mean"]))
    fewer = cells[high]["payload_bytes"] / cells[low]["payload_bytes"]
    reached = f"{_from_to(means)} % after the last round over p = {low:g} to {high:g}"
    spread = f"{max(means) - min(means):.1f} points{beside}"
    return [
        f"**Fed-SPA under a sound (1.0, 10⁻³) guarantee, {words}:** {reached}, the most at p = {most:g}. That is "
        f"a spread of {spread}. From p = {high:g} to {low:g} an upload shrinks {fewer:.0f} times."
    ]


def _local(found: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [row for row in found["rows"] if row["adversary"] == "local"]


def _sums(found: Mapping[str, Any]) -> list[str]:
    """What Fed-SPA reached under secure aggregation, beside the local row of the same p."""
    local = {row["compression"]: row for row in _local(found) if row["algorithm"] == "fedspa"}
    reached = []
    for row in found["rows"]:
        if row["algorithm"] == "fedspa" and row["adversary"] != "local" and "accuracy_last" in row.get("tuned", {}):
            p = row["compression"]
            ours, beside = (cell["tuned"]["accuracy_last"]["mean"] for cell in (row, local[p]))
            cost = f"ε = {table.epsilon(row, 'tuned')}"
            reached.append(f"p = {p:g}: {ours:.1f} % after the last round, {cost}; local: {beside:.1f} %")
    words = "**Fed-SPA under secure aggregation, with the best settings known here:**"
    return [f"{words} {'. '.join(reached)}."] if reached else []


def _cpsgd(found: Mapping[str, Any]) -> list[str]:
    of = [row for row in found["rows"] if row["algorithm"] == "cpsgd"]
    rows = [row for row in of if "accuracy_best" in row.get("published", {})]
    if not rows:
        return []
    parts = []
    for row in rows:
        cell = row["published"]
        cost = "no ε" if cell["epsilon"] is None else f"ε = {table.epsilon(row, 'published')}"
        printed = (
            "printed: diverged"
            if row["printed"]["diverged"]
            else (f"printed: {row['printed']['accuracy']:.2f} % at {row['printed']['epsilon']:g}")
        )
        parts.append(f"p = {row['compression']:g}: {cell['accuracy_best']['mean']:.1f} %, {cost} ({printed})")
    sound = [
        f" At (1.0, 10⁻³) {'local' if row['adversary'] == 'local' else 'with secure aggregation'}: "
        f"{row['verified']['accuracy_best']['mean']:.1f} %."
        for row in of
        if "accuracy_best" in row.get("verified", {})
    ]
    return [f"**cpSGD under secure aggregation:** {'; '.join(parts)}.{''.join(sound)}"]


def keep(source: Path, name: str, note: str | None) -> None:
    found, kept = json.loads(source.read_text("utf-8")), result(name)
    if note is None and kept is not None:
        note = kept.get("note")  # what is to be known of the data does not change with the run
    if note is not None:
        found["note"] = note
    if name.startswith("table-") and kept is not None:
        order = [row.key for row in read(rows.find_table(name.removeprefix("table-"))).row]
        found = merged(kept, found, order)
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", "utf-8")
    if "points" in found:
        pictures = ROOT / "docs" / "figures"
        pictures.mkdir(exist_ok=True)
        plot.draw(found, pictures / f"{name}.svg")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    keeping = commands.add_parser("keep", help="take over a result")
    keeping.add_argument("source", type=Path)
    keeping.add_argument("name", help="table-mnist, table-cifar10, tradeoff-mnist, tradeoff-cifar10")
    keeping.add_argument("--note")
    commands.add_parser("fill", help="write docs/paper.md anew")
    words = parser.parse_args()
    if words.command == "keep":
        keep(words.source, words.name, words.note)
    PAGE.write_text(filled(PAGE.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
