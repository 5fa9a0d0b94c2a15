"""Which figures a report has: the task's score, loss, ε and bytes by round, and ε by agent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from fedspa.privacy.cap import AGAINST_ALL
from fedspa.report.figures import Figure, Line, bars, by_round, plain
from fedspa.report.promise import Promise
from fedspa.report.read import RunRecord
from fedspa.runs.metrics import LOWER, SHARES, RoundMetrics, heading, shown_score
from fedspa.runs.statement import is_seeded, observer, protected, shown, shown_bytes
from fedspa.wire.payload import HEADER_BYTES

MOST_BARS = 200  # more than that cannot be told apart, or hit with a pointer
SIMULATED = "THE NOISE WAS SEEDED: a simulation, nothing is private. "


def style(number: int) -> str:
    """The class of the `number`th run's colour and dash."""
    return f"s{number % 8}"


def known(value: float | None) -> str:
    """An ε, or a dash for none."""
    return "–" if value is None else shown(value)


def fedavg_upload(dimension: int) -> int:
    """Bytes of one FedAvg upload of the same model: every coordinate in float32, and the same header."""
    return HEADER_BYTES + 4 * dimension


def scores(runs: Sequence[RunRecord], names: Sequence[str]) -> list[Figure | None]:
    """A figure for each score that a run is judged by; one whose score is its loss has it in the next."""
    found = dict.fromkeys(run.headline for run in runs)
    return [_score(name, runs, names) for name in found if name != "loss"]


def _score(score: str, runs: Sequence[RunRecord], names: Sequence[str]) -> Figure | None:
    share = score in SHARES
    lines = []
    for number, (run, called) in enumerate(zip(runs, names if len(runs) > 1 else [heading(score)])):
        if run.headline == score:
            values = [value if value is None or not share else 100 * value for value in run.scores]
            told = (
                "" if run.best is None else f"best {shown_score(score, run.scores[run.best])} in round {run.best + 1}"
            )
            lines.append(Line(called, values, style(number), run.best, told if len(runs) == 1 else ""))
    best = "minimum" if score in LOWER else "maximum"
    whose = f": {lines[0].name}" if len(lines) == 1 < len(runs) else ""  # a single line has no legend
    return by_round(
        score,
        f"{heading(score)} by round{whose}",
        f"On the server's held-out records, after each round. The dot is the best round: a {best} over rounds on those "
        "same records, so somewhat too good.",
        lines,
        lambda value: shown_score(score, value / 100 if share else value),
        tick=lambda value: f"{value:g}%" if share else plain(value),
    )


def loss(runs: Sequence[RunRecord], names: Sequence[str]) -> Figure | None:
    tasks = {run.config.task.name for run in runs if run.config is not None}
    what = "cross-entropy" if tasks <= {"classification"} else "loss of the task"
    return by_round(
        "loss",
        "Loss by round",
        f"Mean {what} on the server's held-out records."
        + " The runs have different tasks, so their losses are not to be compared." * (len(tasks) > 1),
        _lines(runs, names, "Loss", lambda metrics: metrics.loss),
        lambda value: f"{value:.4f}",
        scale="free" if any(line.loss < 0 for run in runs for line in run.metrics) else "zero",
    )


def uploads(runs: Sequence[RunRecord], names: Sequence[str]) -> Figure | None:
    """Bytes since the start, all agents together; for one run, FedAvg's for the same uploads beside it."""
    lines = _lines(runs, names, "This run", lambda metrics: float(metrics.uplink_bytes))
    only = runs[0] if len(runs) == 1 else None
    if only is not None and only.dimension is not None and (only.config is None or only.config.private):
        whole = fedavg_upload(only.dimension)
        lines.append(Line("FedAvg", [float(whole * one.agents) for one in only.metrics], "reference", dashed=True))
    return by_round(
        "uploads",
        "Bytes uploaded by all agents",
        "Bytes since the start, as they travel, headers included; the axis is logarithmic."
        + (" FedAvg: every coordinate in float32, for the same uploads." if len(lines) > len(runs) else ""),
        [replace(line, values=list(accumulate(value or 0.0 for value in line.values))) for line in lines],
        shown_bytes,
        tick=shown_bytes,
        scale="log",
    )


def largest_epsilon(runs: Sequence[RunRecord], names: Sequence[str]) -> Figure | None:
    """For a comparison: what the agent that spent most had spent after each round."""
    return by_round(
        "epsilon",
        "ε of the agent that spent most",
        SIMULATED
        * any(run.config is not None and run.config.privacy.noise == "seeded" for run in runs)
        + "Verified, each run under its own unit, δ, sampling, neighbouring relation and accountant: see the table "
        "above before comparing.",
        _lines(runs, names, "", lambda metrics: metrics.epsilon),
        shown,
        scale="zero",
    )


def epsilon(run: RunRecord, promise: Promise | None) -> Figure | None:
    """Smallest, median and largest ε over agents after each round, the cap, and what the paper's theorem says."""
    largest = [metrics.epsilon for metrics in run.metrics]
    if promise is None or run.config is None or promise.facts["epsilon"] is None:
        return None
    agents = run.config.federation.agents
    lines = [Line("Largest over agents", largest, "s0")]
    tallies = _tallies(run, agents) if run.participations.entries else []
    lowest = [promise.verified(min(tally)) for tally in tallies]
    middle = [promise.verified(_middle(tally)) for tally in tallies]
    band = None
    if tallies and None not in (*lowest, *middle):
        band = (Line("Smallest over agents", lowest, ""), lines[0])
        lines.append(Line("Median agent", middle, "s1", dashed=True))
    if promise.facts["members"]:
        floors = [metrics.epsilon_floor for metrics in run.metrics]
        lines.append(Line(f"Floor, {AGAINST_ALL}", floors, "s2", dashed=True))
    facts = promise.facts
    limit = promise.epsilon_cap
    known = [value for value in (*largest, limit) if value is not None]
    top = 1.5 * max(known) if known else None
    return by_round(
        "epsilon",
        "Privacy spent: ε by round",
        f"{SIMULATED * is_seeded(facts)}"
        f"For each {protected(facts)}, at δ = {facts['delta']:g}, {facts['neighbours']}, {facts['sampling']} sampling, "
        f"accountant {facts['accountant']}{_against(facts)}. The shaded range holds all {agents} agents. The cap is ε "
        f"after {promise.cap} participations, the most that the plan allows.",
        lines,
        shown,
        scale="zero",
        top=top,
        band=band,
        limits=[(f"cap {shown(limit)}", limit)] if limit is not None else (),
    )


def agents(run: RunRecord, promise: Promise | None, number: int) -> tuple[Figure | None, list[str]]:
    """ε by agent at the end, a bar each; and the names of the bars. Those that spent most, where there are many."""
    if promise is None or run.config is None or not promise.counts or promise.facts["epsilon"] is None:
        return None, []
    total = run.config.federation.agents
    everyone = {f"agent-{i}": 0 for i in range(min(total, MOST_BARS))} if total <= MOST_BARS else {}
    counts = {**everyone, **promise.counts}
    names = list(counts)
    if len(names) > MOST_BARS:
        names = sorted(names, key=lambda name: -counts[name])[:MOST_BARS]
    spent = {name: promise.verified(counts[name]) for name in names}
    if any(value is None for value in spent.values()):
        return None, []
    values = [value for value in spent.values() if value is not None]
    rows = [[name, str(counts[name]), known(spent[name])] for name in names]
    limit = promise.epsilon_cap
    facts = promise.facts
    some = "" if len(counts) <= MOST_BARS and total <= MOST_BARS else f" The {len(names)} that spent most of {total}."
    return (
        bars(
            f"agents-{number}",
            "ε by agent, at the end",
            f"{SIMULATED * is_seeded(facts)}"
            f"Verified, for each {protected(facts)}, at δ = {facts['delta']:g}, {facts['neighbours']}{_against(facts)}."
            f"{some} Choose an agent to see its line in the "
            + ("ledger." if run.participations.source == "ledger" else "server's list of whom it asked."),
            values,
            ["Agent", "Participations", "ε verified"],
            rows,
            limits=[(f"cap {shown(limit)}", limit)] if limit is not None else (),
            run=number,
        ),
        names,
    )


def _against(facts: Mapping[str, Any]) -> str:
    """Said where it is not everyone."""
    return f", against {observer(facts)}" if facts["members"] else ""


def _lines(
    runs: Sequence[RunRecord], names: Sequence[str], alone: str, value: Callable[[RoundMetrics], float | None]
) -> list[Line]:
    """A line for each run, in its colour and by its name; one run's line is called `alone`."""
    called = names if len(runs) > 1 else [alone]
    return [
        Line(name, [value(metrics) for metrics in run.metrics], style(number))
        for number, (run, name) in enumerate(zip(runs, called))
    ]


def _tallies(run: RunRecord, agents: int) -> list[Counter[int]]:
    """After each round that is done: how many of the agents had taken part how often."""
    cohorts: list[list[str]] = [[] for _ in run.metrics]
    for entry in run.participations.entries:
        if entry.round < len(cohorts):
            cohorts[entry.round].append(entry.agent)
    counts: Counter[str] = Counter()
    tally = Counter({0: agents})
    found = []
    for cohort in cohorts:
        for agent in cohort:
            tally[counts[agent]] -= 1
            counts[agent] += 1
            tally[counts[agent]] += 1
        tally = +tally  # drops what nobody is at any more
        found.append(Counter(tally))
    return found


def _middle(tally: Counter[int]) -> int:
    """The median's participations (of an even number of agents, the upper one's)."""
    left = tally.total() // 2
    for count in sorted(tally):
        left -= tally[count]
        if left < 0:
            return count
    return 0
