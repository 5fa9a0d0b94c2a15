"""Charts of a report as plain geometry: score, loss and ε by round, and bars. The template draws them.

Hand-made SVG and not a plotting library: a page stays a few dozen kilobytes, prints as vectors, follows the reader's
colour scheme by CSS alone, and lets the page forbid every request and every foreign script.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedspa.privacy.budget import AGAINST_ALL
from fedspa.privacy.event import shown
from fedspa.report.record import Promise, RunRecord
from fedspa.runs.guarantee import is_seeded, observer, protected
from fedspa.runs.rundir import LOWER, SHARES, heading, shown_score

# The drawing's own units; CSS scales it to the page.
WIDTH, HEIGHT = 520, 280
WIDE, LOW = 1080, 240  # for so many bars as a telephone's width cannot hold
_MANY_BARS = 20
_LETTER = 9  # the width of one, where the page is narrow and its letters are large
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 14, 40
_LONGEST_NAME = 12  # of a bar, in letters; its table has the whole name
_HEADROOM = 1.08  # over a limit, for its name
_MOST_POINTS = 1000  # of a curve; longer runs are thinned evenly
MOST_BARS = 200  # more than that cannot be distinguished
SIMULATED = "THE NOISE WAS SEEDED: a simulation, nothing is private. "

Place = tuple[float, str]  # along an axis, and what stands there
Show = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Axis:
    """Values from `low` to `high` onto pixels from `start` to `end`, with a tick at each multiple of `step`."""

    low: float
    high: float
    start: float
    end: float
    step: float

    def at(self, value: float) -> float:
        return round(self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start), 2)

    def ticks(self) -> list[float]:
        first = math.ceil(self.low / self.step - 1e-9)
        return [round(i * self.step, 12) for i in range(first, math.floor(self.high / self.step + 1e-9) + 1)]

    @classmethod
    def around(cls, values: Sequence[float], *, zero: bool, height: int, most: float = math.inf) -> Axis:
        """Return an upright axis from one round number to another; the first is 0 with `zero`, the last about `most`
        at most."""
        low, high = 0.0 if zero else min(values), max(values)
        if high - low <= max(1e-9 * abs(high), 1e-100):  # as good as equal
            low, high = (low, low + 1.0) if abs(low) < 1e-100 else (low - abs(low) * 0.1, high + abs(high) * 0.1)
        step = nice_step((high - low) / 6)
        low, high = min(low, math.floor(low / step + 1e-9) * step), max(high, math.ceil(high / step - 1e-9) * step)
        return cls(low, min(high, max(most, low + step)), height - BOTTOM, TOP, step)


def nice_step(width: float) -> float:
    """Return the smallest of 1, 2, 5 times a power of ten that is at least `width`."""
    power = 10.0 ** math.floor(math.log10(width))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= width * (1 - 1e-9))


@dataclass(frozen=True, slots=True)
class Line:
    """One series: a value for each round, None where there is none. `mark` is a round with a label, as the best one."""

    name: str
    values: Sequence[float | None]
    dashed: bool = False
    mark: tuple[int, str] | None = None


@dataclass(frozen=True, slots=True)
class Curve:
    """A line as drawn. `above` is its last value, where that lies above the scale."""

    name: str
    dashed: bool
    path: str
    mark: tuple[float, float, str, str] | None  # x, y, label, anchor
    above: str


@dataclass(frozen=True, slots=True)
class Bar:
    """A rectangle from zero to a value."""

    x: float
    y: float
    width: float
    height: float
    label: str


@dataclass(frozen=True, slots=True)
class Figure:
    """All that the template needs. `header` and `rows` say in a table what bars show."""

    title: str
    caption: str
    x_label: str
    x_ticks: list[Place]
    y_ticks: list[Place]
    limits: list[Place]  # levels across the plot, as a cap
    curves: list[Curve] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    header: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)
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


def by_round(
    title: str,
    caption: str,
    lines: Sequence[Line],
    show: Show = plain,
    *,
    zero: bool = False,
    most: float = math.inf,
    limits: Sequence[tuple[str, float]] = (),
) -> Figure | None:
    """Draw lines over rounds 1, 2, …; return None where there is nothing to draw. Values above `most` are off the
    scale."""
    found = [value for line in lines for value in line.values if value is not None and value <= most]
    if not found:
        return None
    y = Axis.around([*found, *(_HEADROOM * value for _, value in limits)], zero=zero, height=HEIGHT, most=most)
    count = max(len(line.values) for line in lines)
    last = max(count, 2)
    x = Axis(0 if count == 1 else 1, last, LEFT, WIDTH - RIGHT, max(1.0, nice_step(last / 8)))
    return Figure(
        title,
        caption,
        "Round",
        [(x.at(value), plain(value)) for value in x.ticks() if value >= 1],
        [(y.at(value), show(value)) for value in y.ticks()],
        [(y.at(value), name) for name, value in limits],
        curves=[_curve(line, x, y, show) for line in lines],
    )


def _curve(line: Line, x: Axis, y: Axis, show: Show) -> Curve:
    def height(t: int) -> float | None:
        value = line.values[t]
        return None if value is None or not y.low <= value <= y.high else y.at(value)

    count, path, before, mark = len(line.values), "", None, None
    for t in {**dict.fromkeys(range(0, count, -(-count // _MOST_POINTS))), count - 1: None}:
        at = height(t)
        if at is not None:
            path += f"{'M' if before is None else 'L'}{x.at(t + 1)} {at}"
        before = at
    if line.mark is not None and (at := height(line.mark[0])) is not None:
        across = x.at(line.mark[0] + 1)
        mark = (across, at, line.mark[1], "end" if across > (LEFT + WIDTH - RIGHT) / 2 else "start")
    last = next((value for value in reversed(line.values) if value is not None), None)
    return Curve(line.name, line.dashed, path, mark, show(last) if last is not None and last > y.high else "")


def rounds(run: RunRecord, promise: Promise | None) -> list[Figure]:
    """Draw what happened round by round; a release of statistics has no rounds to follow."""
    found = [] if run.released is not None else [_score(run), _loss(run), _epsilon(run, promise)]
    return [figure for figure in found if figure is not None]


def _score(run: RunRecord) -> Figure | None:
    score, best = run.headline, run.best
    if score == "loss":
        return None
    share = score in SHARES
    values = [100 * value if share and value is not None else value for value in run.scores]
    mark = None if best is None else (best, f"best {shown_score(score, run.scores[best])} in round {best + 1}")
    return by_round(
        f"{heading(score)} by round",
        f"On the server's held-out records, after each round. The dot is the best round: a "
        f"{'minimum' if score in LOWER else 'maximum'} over rounds on those same records, so somewhat too good.",
        [Line(heading(score), values, mark=mark)],
        lambda value: f"{value:g}%" if share else plain(value),
    )


def _loss(run: RunRecord) -> Figure | None:
    what = "cross-entropy" if run.config.task.name == "classification" else "loss of the task"
    losses = [metrics.loss for metrics in run.metrics]
    caption = f"Mean {what} on the server's held-out records."
    return by_round("Loss by round", caption, [Line("Loss", losses)], zero=min(losses, default=0.0) >= 0)


def _epsilon(run: RunRecord, promise: Promise | None) -> Figure | None:
    if promise is None:
        return None
    facts, limit = promise.facts, promise.epsilon_cap
    largest = [metrics.epsilon for metrics in run.metrics]
    lines = [Line("Largest over agents", largest)]
    if facts["members"]:
        worst = [metrics.epsilon_worst_case for metrics in run.metrics]
        lines.append(Line(f"Worst case, {AGAINST_ALL}", worst, dashed=True))
    known = [value for value in (*largest, limit) if value is not None]
    return by_round(
        "Privacy spent: ε by round",
        f"{SIMULATED * is_seeded(facts)}"
        f"For each {protected(facts)}, at δ = {facts['delta']:g}, {facts['neighbours']}, {facts['sampling']} sampling, "
        f"accountant {facts['accountant']}{_against(facts)}. The cap is ε after {promise.cap} participations, the most "
        "that the plan allows.",
        lines,
        shown,
        zero=True,
        most=1.5 * max(known, default=math.inf),
        limits=_cap(limit),
    )


def agents(run: RunRecord, promise: Promise | None) -> Figure | None:
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
    rows = [[name, str(counts[name]), shown(value)] for name, value in zip(names, values)]
    header, cap = ["Agent", "Participations", "ε verified"], _cap(promise.epsilon_cap)
    width, height = (WIDTH, HEIGHT) if len(names) < _MANY_BARS else (WIDE, LOW)
    y = Axis.around([*values, *(_HEADROOM * value for _, value in cap)], zero=True, height=height)
    slot = (width - LEFT - RIGHT) / len(names)
    gap, base = min(4.0, slot * 0.18), y.at(0)
    short = [name.removeprefix("agent-") for name in names]
    short = [name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…" for name in short]
    apart = int(max(1.0, nice_step(_LETTER * (max(map(len, short)) + 1) / slot)))  # no name runs into the next
    return Figure(
        "ε by agent, at the end",
        f"{SIMULATED * is_seeded(facts)}"
        f"Verified, for each {protected(facts)}, at δ = {facts['delta']:g}, {facts['neighbours']}{_against(facts)}."
        f"{some}",
        "Agent",
        [(round(LEFT + (i + 0.5) * slot, 2), short[i]) for i in range(0, len(names), apart)],
        [(y.at(value), plain(value)) for value in y.ticks()],
        [(y.at(value), name) for name, value in cap],
        bars=[
            Bar(
                round(LEFT + i * slot + gap / 2, 2),
                min(y.at(value), base - 1),
                round(slot - gap, 2),
                round(max(base - y.at(value), 1), 2),
                ", ".join(f"{name} {cell}" for name, cell in zip(header, rows[i])),
            )
            for i, value in enumerate(values)
        ],
        header=header,
        rows=rows,
        width=width,
        height=height,
    )


def _cap(limit: float | None) -> list[tuple[str, float]]:
    return [] if limit is None else [(f"cap {shown(limit)}", limit)]


def _against(facts: Mapping[str, Any]) -> str:
    """Return the adversary, where it is not the server."""
    return f", against {observer(facts)}" if facts["members"] else ""
