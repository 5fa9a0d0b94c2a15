"""Figures as plain geometry: scales, ticks, paths and the table that says the same in text. The template draws them.

Hand-made SVG and not a plotting library: a page stays a few dozen kilobytes, prints as vectors, follows the reader's
colour scheme by CSS alone, can be read by keyboard, needs no script to show its lines, and lets the page forbid every
request and every foreign script.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

# The drawing's own units; CSS scales it to the page.
WIDTH, HEIGHT = 520, 280
WIDE, LOW = 1080, 240  # for so many bars as a telephone's width cannot hold
_MANY_BARS = 20
_LETTER = 9  # the width of one, where the page is narrow and its letters are large
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 14, 40
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
        """Where `value` lies; None where there is none, or off the scale."""
        return self.at(value) if value is not None and self.low <= value <= self.high else None

    def ticks(self, most: int = 6) -> list[float]:
        """Round numbers; on a logarithmic axis the powers of ten within it."""
        if self.log:
            powers = range(math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9) + 1)
            return [10.0**power for power in list(powers)[:: max(1, -(-len(powers) // most))]]
        step = self.step or nice_step((self.high - self.low) / most)
        first = math.ceil(self.low / step - 1e-9)
        return [round(i * step, 12) for i in range(first, math.floor(self.high / step + 1e-9) + 1)]


def nice_step(width: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is at least `width`."""
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
    """A line as drawn: its path, and where each row's point lies (None: nowhere, or off the scale)."""

    name: str
    style: str
    dashed: bool
    path: str
    y: list[float | None]
    mark: tuple[float, float, str, str] | None  # x, y, label, anchor
    off_scale: bool


@dataclass(frozen=True, slots=True)
class Bar:
    """One agent: its rectangle, and what it is called."""

    x: float
    y: float
    width: float
    height: float
    label: str


@dataclass(frozen=True, slots=True)
class Figure:
    """All that the template needs. `header` and `rows` are the text alternative, and what a pointer reads."""

    key: str
    title: str
    caption: str
    x_label: str
    x_ticks: list[Place]
    y_ticks: list[Place]
    header: list[str]
    rows: list[list[str]]
    limits: list[Place]  # levels across the plot, as a cap
    x: list[float] = field(default_factory=list)
    curves: list[Curve] = field(default_factory=list)
    band: str = ""
    bars: list[Bar] = field(default_factory=list)
    run: int = 0
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
    """Which of `count` rows to show: evenly spaced, the first, the last and `keep` always."""
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
    band: tuple[Line, Line] | None = None,
    limits: Sequence[tuple[str, float]] = (),
) -> Figure | None:
    """Lines over rounds 1, 2, …; None where there is nothing to draw.

    A logarithmic scale is of whole things, and begins at 1. `top` ends the axis: what lies above is named as off the
    scale, and still in the table. `band` fills what lies between two lines, of which the lower one is in the table too.
    """
    count = max((len(line.values) for line in lines), default=0)
    found = [value for line in lines for value in line.values if value is not None and (scale != "log" or value >= 1)]
    found = [value for value in found if top is None or value <= top] + [_HEADROOM * value for _, value in limits]
    if not found or count == 0:
        return None
    y = _fitted(found, scale, top)
    x = Axis(0 if count == 1 else 1, max(count, 2), LEFT, WIDTH - RIGHT)
    rows = thinned(count, [line.mark for line in lines])
    told = [*lines, *(band[:1] if band is not None else ())]
    return Figure(
        key=key,
        title=title,
        caption=caption,
        x_label="Round",
        x_ticks=[(x.at(value), plain(value)) for value in x.ticks(8) if value >= 1 and value == int(value)],
        y_ticks=[(y.at(value), tick(value)) for value in y.ticks()],
        header=["Round", *(line.name for line in told)],
        rows=[[str(row + 1), *(_cell(line.at(row), show) for line in told)] for row in rows],
        limits=[(y.at(value), name) for name, value in limits],
        x=[x.at(row + 1) for row in rows],
        curves=[_curve(line, rows, x, y) for line in lines],
        band="" if band is None else _area(*band, rows, x, y),
    )


def bars(
    key: str,
    title: str,
    caption: str,
    values: Sequence[float],
    header: list[str],
    rows: list[list[str]],
    *,
    limits: Sequence[tuple[str, float]] = (),
    run: int = 0,
) -> Figure | None:
    """A bar for each of `values`, labelled by the cells of its row."""
    if not values:
        return None
    width, height = (WIDTH, HEIGHT) if len(values) < _MANY_BARS else (WIDE, LOW)
    y = _fitted([*values, *(_HEADROOM * value for _, value in limits)], "zero", None, height)
    slot = (width - LEFT - RIGHT) / len(values)
    gap = min(4.0, slot * 0.18)
    base = y.at(0)
    names = [row[0].removeprefix("agent-")[:10] for row in rows]
    apart = max(1.0, nice_step(_LETTER * (max(map(len, names)) + 1) / slot))  # so that no name runs into the next
    return Figure(
        key=key,
        title=title,
        caption=caption,
        x_label="Agent",
        x_ticks=[(round(LEFT + (i + 0.5) * slot, 2), names[i]) for i in range(0, len(values), int(apart))],
        y_ticks=[(y.at(value), plain(value)) for value in y.ticks(4)],
        header=header,
        rows=rows,
        limits=[(y.at(value), name) for name, value in limits],
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
        run=run,
        width=width,
        height=height,
    )


def _fitted(values: Sequence[float], scale: str, top: float | None, height: int = HEIGHT) -> Axis:
    """An axis around `values`, to round numbers."""
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
    return Curve(line.name, line.style, line.dashed, "".join(path), points, mark, last is not None and last > y.high)


def _area(low: Line, high: Line, rows: Sequence[int], x: Axis, y: Axis) -> str:
    """Closed over the rows; what is missing counts as nothing."""
    edge = [(row, high) for row in rows] + [(row, low) for row in reversed(rows)]
    return "M" + "L".join(f"{x.at(row + 1)} {y.at(line.values[row] or 0.0)}" for row, line in edge) + "Z"
