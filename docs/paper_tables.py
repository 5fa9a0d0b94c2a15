"""The results of docs/paper.md, from the kept JSON under experiments/results; a test holds the two together.

    python docs/paper_tables.py keep DIR/table.json table-mnist [--note "what to know of the data"]
    python docs/paper_tables.py fill        # writes docs/paper.md anew between its markers

`keep` takes over what `fedspa table` (table.json) or `fedspa tradeoff` (tradeoff.json) left. Nothing is typed in.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedspa.paper import plot, table, tradeoff
from fedspa.runs.statement import shown

ROOT = Path(__file__).parents[1]
PAGE, RESULTS = ROOT / "docs" / "paper.md", ROOT / "experiments" / "results"


def filled(page: str) -> str:
    """The page with what its markers name, as in `<!-- table: mnist -->`; also `findings` and `curve`."""
    makers: dict[str, Callable[[str], str]] = {"table": _table, "findings": _findings, "curve": _curve}
    pattern = r"(<!-- (\w+): ([\w-]+) -->\n)(?:.*\n)*?(<!-- end -->\n)"
    return re.sub(pattern, lambda match: match[1] + makers[match[2]](match[3]) + match[4], page)


def result(name: str) -> dict[str, Any] | None:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text("utf-8")) if path.exists() else None


def _table(name: str) -> str:
    found = result(f"table-{name}")
    if found is None:
        return "\nNot run yet.\n\n"
    notes = "".join(f"- {line}\n" for line in table.notes(found))
    return f"\n{table.markdown(found)}\n\n{notes}- {_origin(found)}\n\n"


def _curve(name: str) -> str:
    found = result(f"tradeoff-{name}")
    if found is None:
        return "\nNot run yet.\n\n"
    picture = f"![Accuracy against ε, {name}](figures/tradeoff-{name}.svg)"
    return f"\n{picture}\n\n{tradeoff.markdown(found)}\n\n{_best(found)}\n\n{_origin(found)}\n\n"


def _best(found: Mapping[str, Any]) -> str:
    """Which p does best at each ε, and how much it matters: what the paper's figure is about."""
    by_epsilon: dict[float, list[tuple[float, float]]] = {}
    for point in found["points"]:
        if point["status"] == "done":
            by_epsilon.setdefault(point["epsilon_target"], []).append(
                (point["accuracy_last"]["mean"], point["compression"])
            )
    best = [f"{max(points)[1]:.2g} at ε = {epsilon:g}" for epsilon, points in sorted(by_epsilon.items())]
    spreads = [max(points)[0] - min(points)[0] for points in by_epsilon.values()]
    return (
        f"The best p is {', '.join(best)}; between the best and the worst p lie {min(spreads):.1f} to "
        f"{max(spreads):.1f} points."
    )


def _origin(found: Mapping[str, Any]) -> str:
    note = f" {found['note']}" if found.get("note") else ""
    commits, machines = " and ".join(found["commits"]), "; ".join(found["hardware"])
    return f"`{found['command']}`, commit {commits}, on {machines}.{note}"


def _findings(name: str) -> str:
    found = result(f"table-{name}")
    if found is None:
        return "\nNot run yet.\n\n"
    if found["quick"]:
        return "\nNothing yet: what is kept above is a quick table.\n\n"
    lines = [*_fedavg(found), *_published(found)]
    lines += _sound(found, "verified", "with the paper's model") + _sound(
        found, "tuned", "with the best settings known here"
    )
    lines += _cpsgd(found)
    return "\n" + "".join(f"- {line}\n" for line in lines) + "\n"


def _fedavg(found: Mapping[str, Any]) -> list[str]:
    for row in found["rows"]:
        if row["algorithm"] == "fedavg" and "accuracy_best" in row["published"]:
            ours, printed = row["published"]["accuracy_best"]["mean"], row["printed"]["accuracy"]
            word = "reproduced" if ours > printed - 1 else "not reproduced"
            return [f"**FedAvg: {word}.** {ours:.2f} % at best, {printed:.2f} printed."]
    return []


def _published(found: Mapping[str, Any]) -> list[str]:
    private = [row for row in found["rows"] if row["algorithm"] in ("fedspa", "dp-fed")]
    ended = [row for row in private if "accuracy_best" in row["published"]]
    if not ended:
        return []
    ours = [row["published"]["accuracy_best"]["mean"] for row in ended]
    printed = [row["printed"]["accuracy"] for row in ended]
    word = "reproduced" if min(a - b for a, b in zip(ours, printed)) > -1 else "not reproduced"
    return [
        f"**The private rows at the published noise: {word}.** {min(ours):.1f} to {max(ours):.1f} % at best; "
        f"{min(printed):.1f} to {max(printed):.1f} printed."
    ]


def _sound(found: Mapping[str, Any], setting: str, words: str) -> list[str]:
    cells = {row["compression"]: row.get(setting, {}) for row in found["rows"] if row["algorithm"] == "fedspa"}
    last = {p: cell["accuracy_last"] for p, cell in cells.items() if "accuracy_last" in cell}
    if len(last) < 2:
        return []
    means = [value["mean"] for value in last.values()]
    spreads = [value["std"] for value in last.values() if value["std"] is not None]
    beside = f", beside a standard deviation over seeds of up to {max(spreads):.1f}" if spreads else ", from one seed"
    low, high, most = min(last), max(last), max(last, key=lambda p: float(last[p]["mean"]))
    fewer = cells[high]["payload_bytes"] / cells[low]["payload_bytes"]
    reached = f"{min(means):.1f} to {max(means):.1f} % after the last round over p = {low:g} to {high:g}"
    spread = f"{max(means) - min(means):.1f} points{beside}"
    return [
        f"**Fed-SPA under a sound (1.0, 10⁻³) guarantee, {words}:** {reached}, the most at p = {most:g}. That is "
        f"a spread of {spread}. From p = {high:g} to {low:g} an upload shrinks {fewer:.0f} times."
    ]


def _cpsgd(found: Mapping[str, Any]) -> list[str]:
    rows = [row for row in found["rows"] if row["algorithm"] == "cpsgd" and "accuracy_best" in row["published"]]
    if not rows:
        return []
    parts = []
    for row in rows:
        cell = row["published"]
        cost = "no ε" if cell["epsilon"] is None else f"ε = {shown(cell['epsilon'])} with secure aggregation"
        printed = (
            "printed: diverged"
            if row["printed"]["diverged"]
            else (f"printed: {row['printed']['accuracy']:.2f} % at {row['printed']['epsilon']:g}")
        )
        parts.append(f"p = {row['compression']:g}: {cell['accuracy_best']['mean']:.1f} %, {cost} ({printed})")
    local = [row["verified"] for row in rows if "accuracy_best" in row.get("verified", {})]
    tail = f" Local, at (1.0, 10⁻³): {local[0]['accuracy_best']['mean']:.1f} %." if local else ""
    return [f"**cpSGD:** {'; '.join(parts)}.{tail}"]


def keep(source: Path, name: str, note: str | None) -> None:
    found = json.loads(source.read_text("utf-8"))
    if note is not None:
        found["note"] = note
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
