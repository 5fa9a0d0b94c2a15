"""Charts of a report as plain geometry: scores, loss, ε and bytes by round, and ε by agent. The template draws them.

Hand-made SVG and not a plotting library: a page stays a few dozen kilobytes, prints as vectors, follows the reader's
colour scheme by CSS alone, needs no script to show its lines, and lets the page forbid every request and every foreign
script.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Literal

from fedspa.privacy.budget import AGAINST_ALL
from fedspa.privacy.event import shown
from fedspa.report.record import Promise, RunRecord
from fedspa.runs.guarantee import is_seeded, observer, protected, shown_bytes
from fedspa.runs.rundir import LOWER, SHARES, RoundMetrics, heading, shown_score
from fedspa.wire.payload import HEADER_BYTES

# The drawing's own units; CSS scales it to the page.
WIDTH, HEIGHT = 520, 280
WIDE, LOW = 1080, 240  # for so many bars as a telephone's width cannot hold
_MANY_BARS = 20
_LETTER = 9  # the width of one, where the page is narrow and its letters are large
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 14, 40
_LONGEST_NAME = 12  # of a bar, in letters; its table has the whole name
_HEADROOM = 1.08  # over a limit, for its name
MOST_ROWS = 1000  # of a figure's table; longer runs are thinned evenly

Place = tuple[float, str]  # along an axis, and what stands there
Show = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Axis:
    """Values from `low` to `high` onto pixels from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False
    step: float | None = None  # between ticks, where it is settled

    def at(self, value: float) -> float:
        low, high, value = (math.log(x) if self.log else x for x in (self.low, self.high, value))
        return round(self.start + (value - low) / (high - low) * (self.end - self.start), 2)

    def within(self, value: float | None) -> float | None:
        """Return where `value` lies; None where there is none, or off the scale."""
        return self.at(value) if value is not None and self.low <= value <= self.high else None

    def ticks(self, most: int = 6) -> list[float]:
        """Return round numbers; on a logarithmic axis the powers of ten within it."""
        if self.log:
            powers = range(math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9) + 1)
            return [10.0**power for power in list(powers)[:: max(1, -(-len(powers) // most))]]
        step = self.step or nice_step((self.high - self.low) / most)
        first = math.ceil(self.low / step - 1e-9)
        return [round(i * step, 12) for i in range(first, math.floor(self.high / step + 1e-9) + 1)]


def nice_step(width: float) -> float:
    """Return the smallest of 1, 2, 5 times a power of ten that is at least `width`."""
    power = 10.0 ** math.floor(math.log10(width))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= width * (1 - 1e-9))


@dataclass(frozen=True, slots=True)
class Line:
    """One series: a value for each round, None where there is none. `style` is its class in the page's CSS."""

    name: str
    values: Sequence[float | None]
    style: str
    mark: int | None = None  # a row to mark, as the best one
    mark_label: str = ""
    dashed: bool = False

    def at(self, row: int) -> float | None:
        return self.values[row] if row < len(self.values) else None


@dataclass(frozen=True, slots=True)
class Curve:
    """A line as drawn."""

    name: str
    style: str
    dashed: bool
    path: str
    mark: tuple[float, float, str, str] | None  # x, y, label, anchor
    off_scale: bool


@dataclass(frozen=True, slots=True)
class Bar:
    """A rectangle from zero to a value, with the ends of the value's interval where it has one."""

    x: float
    y: float
    width: float
    height: float
    label: str
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Figure:
    """All that the template needs. `header` and `rows` are the text alternative."""

    key: str
    title: str
    caption: str
    x_label: str
    x_ticks: list[Place]
    y_ticks: list[Place]
    header: list[str]
    rows: list[list[str]]
    limits: list[Place]  # levels across the plot, as a cap
    curves: list[Curve] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    width: int = WIDTH
    height: int = HEIGHT

    @property
    def wide(self) -> bool:
        return self.width == WIDE

    @property
    def plot(self) -> tuple[int, int, int, int]:
        return LEFT, TOP, self.width - RIGHT, self.height - BOTTOM


def plain(value: float) -> str:
    return f"{value:g}"


def thinned(count: int, keep: Sequence[int | None], most: int = MOST_ROWS) -> list[int]:
    """Return which of `count` rows to show: evenly spaced, the first, the last and `keep` always."""
    step = max(1, -(-count // most))
    wanted = {*range(0, count, step), count - 1, *(row for row in keep if row is not None)}
    return sorted(row for row in wanted if 0 <= row < count)


def by_round(
    key: str,
    title: str,
    caption: str,
    lines: Sequence[Line],
    show: Show,
    *,
    tick: Show = plain,
    scale: Literal["zero", "free", "log"] = "free",
    top: float | None = None,
    limits: Sequence[tuple[str, float]] = (),
) -> Figure | None:
    """Draw lines over rounds 1, 2, …; return None where there is nothing to draw.

    A logarithmic scale is of whole things, and begins at 1. `top` ends the axis: what lies above is named as off the
    scale, and still in the table.
    """
    count = max((len(line.values) for line in lines), default=0)
    found = [value for line in lines for value in line.values if value is not None and (scale != "log" or value >= 1)]
    found = [value for value in found if top is None or value <= top] + [_HEADROOM * value for _, value in limits]
    if not found or count == 0:
        return None
    y = _fitted(found, scale, top)
    x = Axis(0 if count == 1 else 1, max(count, 2), LEFT, WIDTH - RIGHT)
    rows = thinned(count, [line.mark for line in lines])
    return Figure(
        key=key,
        title=title,
        caption=caption,
        x_label="Round",
        x_ticks=[(x.at(value), plain(value)) for value in x.ticks(8) if value >= 1 and value == int(value)],
        y_ticks=[(y.at(value), tick(value)) for value in y.ticks()],
        header=["Round", *(line.name for line in lines)],
        rows=[[str(row + 1), *(_cell(line.at(row), show) for line in lines)] for row in rows],
        limits=[(y.at(value), name) for name, value in limits],
        curves=[_curve(line, rows, x, y) for line in lines],
    )


def bars(
    key: str,
    title: str,
    caption: str,
    x_label: str,
    values: Sequence[float],
    header: list[str],
    rows: list[list[str]],
    *,
    intervals: Sequence[tuple[float, float]] = (),
    show: Show = plain,
    limits: Sequence[tuple[str, float]] = (),
) -> Figure | None:
    """Draw a bar for each of `values`, labelled by the cells of its row; `intervals` has the ends of each one's
    interval. Return None without values."""
    if not values:
        return None
    width, height = (WIDTH, HEIGHT) if len(values) < _MANY_BARS else (WIDE, LOW)
    highest = [*values, *(high for _, high in intervals), *(_HEADROOM * value for _, value in limits)]
    y = _fitted(highest, "zero", None, height)
    slot = (width - LEFT - RIGHT) / len(values)
    gap = min(4.0, slot * 0.18)
    base = y.at(0)
    names = [row[0].removeprefix("agent-") for row in rows]
    names = [name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…" for name in names]
    apart = max(1.0, nice_step(_LETTER * (max(map(len, names)) + 1) / slot))  # so that no name runs into the next
    ends = [(y.at(low), y.at(high)) for low, high in intervals]
    return Figure(
        key=key,
        title=title,
        caption=caption,
        x_label=x_label,
        x_ticks=[(round(LEFT + (i + 0.5) * slot, 2), names[i]) for i in range(0, len(values), int(apart))],
        y_ticks=[(y.at(value), show(value)) for value in y.ticks(4)],
        header=header,
        rows=rows,
        limits=[(y.at(value), name) for name, value in limits],
        bars=[
            Bar(
                round(LEFT + i * slot + gap / 2, 2),
                min(y.at(value), base - 1),
                round(slot - gap, 2),
                round(max(base - y.at(value), 1), 2),
                ", ".join(f"{name} {cell}".strip() for name, cell in zip(header, rows[i])),
                *(ends[i] if ends else ()),
            )
            for i, value in enumerate(values)
        ],
        width=width,
        height=height,
    )


def _fitted(values: Sequence[float], scale: str, top: float | None, height: int = HEIGHT) -> Axis:
    """Return an axis around `values`, to round numbers."""
    low, high = min(values), max(values)
    pixels = (height - BOTTOM, TOP)
    if scale == "log":
        low = min(low, 10.0 ** math.floor(math.log10(low)))
        high = max(high, 10.0 ** math.ceil(math.log10(high) + 1e-9))
        return Axis(low, high if high > low else low * 10, *pixels, log=True)
    if scale == "zero":
        low = 0.0
    if high - low <= max(1e-9 * abs(high), 1e-100):  # as good as equal
        low, high = (low, low + 1.0) if abs(low) < 1e-100 else (low - abs(low) * 0.1, high + abs(high) * 0.1)
    step = nice_step((high - low) / 6)
    low, high = min(low, math.floor(low / step + 1e-9) * step), max(high, math.ceil(high / step - 1e-9) * step)
    return Axis(low, high if top is None else min(high, max(top, low + step)), *pixels, step=step)


def _cell(value: float | None, show: Show) -> str:
    return "–" if value is None else show(value)


def _curve(line: Line, rows: Sequence[int], x: Axis, y: Axis) -> Curve:
    points = [y.within(line.at(row)) for row in rows]
    before = [None, *points]
    path = [f"{'ML'[b is not None]}{x.at(row + 1)} {at}" for row, b, at in zip(rows, before, points) if at is not None]
    mark = None
    if line.mark is not None and (best := y.within(line.values[line.mark])) is not None:
        across = x.at(line.mark + 1)
        mark = (across, best, line.mark_label, "end" if across > (LEFT + WIDTH - RIGHT) / 2 else "start")
    last = next((value for value in reversed(line.values) if value is not None), None)
    return Curve(line.name, line.style, line.dashed, "".join(path), mark, last is not None and last > y.high)


MOST_BARS = 200  # more than that cannot be distinguished
SIMULATED = "THE NOISE WAS SEEDED: a simulation, nothing is private. "


def style(number: int) -> str:
    """Return the class of the `number`th run's colour and dash."""
    return f"s{number % 8}"


def known(value: float | None) -> str:
    """Return an ε, or a dash for none."""
    return "–" if value is None else shown(value)


def fedavg_upload(dimension: int) -> int:
    """Return the bytes of one FedAvg upload of the same model: every coordinate in float32, and the same header."""
    return HEADER_BYTES + 4 * dimension


def scores(runs: Sequence[RunRecord], names: Sequence[str]) -> list[Figure | None]:
    """Draw a figure for each score that a run is judged by; one whose score is its loss has it in the next."""
    found = dict.fromkeys(run.headline for run in runs)
    return [_score(name, runs, names) for name in found if name != "loss"]


def _score(score: str, runs: Sequence[RunRecord], names: Sequence[str]) -> Figure | None:
    share = score in SHARES
    lines = []
    for number, (run, called) in enumerate(zip(runs, names if len(runs) > 1 else [heading(score)])):
        if run.headline == score:
            values = [value if value is None or not share else 100 * value for value in run.scores]
            best_label = (
                "" if run.best is None else f"best {shown_score(score, run.scores[run.best])} in round {run.best + 1}"
            )
            lines.append(Line(called, values, style(number), run.best, best_label if len(runs) == 1 else ""))
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
    tasks = {run.config.task.name for run in runs}
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
    """Draw the bytes since the start, all agents together; for one run, FedAvg's for the same uploads beside it."""
    lines = _lines(runs, names, "This run", lambda metrics: float(metrics.uplink_bytes))
    only = runs[0] if len(runs) == 1 else None
    if only is not None and only.dimension is not None and only.config.private:
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
    """Compare runs: what the agent that spent most had spent after each round."""
    return by_round(
        "epsilon",
        "ε of the agent that spent most",
        SIMULATED
        * any(run.config.privacy.noise == "seeded" for run in runs)
        + "Verified, each run under its own unit, δ, sampling, neighbouring relation and accountant: see the table "
        "above before comparing.",
        _lines(runs, names, "", lambda metrics: metrics.epsilon),
        shown,
        scale="zero",
    )


def epsilon(run: RunRecord, promise: Promise | None) -> Figure | None:
    """Draw the largest ε over agents after each round, the worst case under secure aggregation, and the cap."""
    if promise is None or promise.facts["epsilon"] is None:
        return None
    facts, limit = promise.facts, promise.epsilon_cap
    largest = [metrics.epsilon for metrics in run.metrics]
    lines = [Line("Largest over agents", largest, "s0")]
    if facts["members"]:
        worst = [metrics.epsilon_worst_case for metrics in run.metrics]
        lines.append(Line(f"Worst case, {AGAINST_ALL}", worst, "s2", dashed=True))
    known = [value for value in (*largest, limit) if value is not None]
    return by_round(
        "epsilon",
        "Privacy spent: ε by round",
        f"{SIMULATED * is_seeded(facts)}"
        f"For each {protected(facts)}, at δ = {facts['delta']:g}, {facts['neighbours']}, {facts['sampling']} sampling, "
        f"accountant {facts['accountant']}{_against(facts)}. The cap is ε after {promise.cap} participations, the most "
        "that the plan allows.",
        lines,
        shown,
        scale="zero",
        top=1.5 * max(known) if known else None,
        limits=_cap(limit),
    )


def agents(run: RunRecord, promise: Promise | None, number: int) -> Figure | None:
    """Draw ε by agent at the end, a bar each; of many agents, those that spent most."""
    if promise is None or not promise.counts or promise.facts["epsilon"] is None:
        return None
    total, facts = run.config.federation.agents, promise.facts
    everyone = run.agents if total <= MOST_BARS and set(promise.counts) <= {*run.agents} else ()
    counts = {**dict.fromkeys(everyone, 0), **promise.counts}
    names = list(counts)
    if len(names) > MOST_BARS:
        names = sorted(names, key=lambda name: -counts[name])[:MOST_BARS]
    values = [promise.verified(counts[name]) for name in names]
    some = "" if len(counts) <= MOST_BARS and total <= MOST_BARS else f" The {len(names)} that spent most of {total}."
    return bars(
        f"agents-{number}",
        "ε by agent, at the end",
        f"{SIMULATED * is_seeded(facts)}"
        f"Verified, for each {protected(facts)}, at δ = {facts['delta']:g}, {facts['neighbours']}{_against(facts)}."
        f"{some}",
        "Agent",
        values,
        ["Agent", "Participations", "ε verified"],
        [[name, str(counts[name]), shown(value)] for name, value in zip(names, values)],
        limits=_cap(promise.epsilon_cap),
    )


def _cap(limit: float | None) -> list[tuple[str, float]]:
    return [] if limit is None else [(f"cap {shown(limit)}", limit)]


def _against(facts: Mapping[str, Any]) -> str:
    """Return the adversary, where it is not the server."""
    return f", against {observer(facts)}" if facts["members"] else ""


def _lines(
    runs: Sequence[RunRecord], names: Sequence[str], alone: str, value: Callable[[RoundMetrics], float | None]
) -> list[Line]:
    """Return a line for each run, in its colour and by its name; one run's line is called `alone`."""
    called = names if len(runs) > 1 else [alone]
    return [
        Line(name, [value(metrics) for metrics in run.metrics], style(number))
        for number, (run, name) in enumerate(zip(runs, called))
    ]
