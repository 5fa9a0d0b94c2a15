"""Figures as geometry: axes hold their values, ticks are round, and rows that matter are never thinned away."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedspa.report.charts import (
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDE,
    WIDTH,
    Axis,
    Figure,
    Line,
    bars,
    by_round,
    nice_step,
    thinned,
)

values = st.lists(st.one_of(st.none(), st.floats(0, 1e6)), min_size=1, max_size=40)


def figure(*lines: Line, **options: Any) -> Figure | None:
    return by_round("key", "Title", "Caption.", lines, str, tick=str, **options)


@given(st.floats(1e-12, 1e12))
def test_a_nice_step_is_just_large_enough(width: float) -> None:
    step = nice_step(width)
    assert width * (1 - 1e-9) <= step <= 2.5 * width * (1 + 1e-9)
    assert float(f"{step:e}".split("e")[0]) in (1, 2, 5)


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6), st.integers(2, 10))
def test_ticks_lie_within_the_axis_and_are_evenly_spaced(low: float, span: float, most: int) -> None:
    axis = Axis(low, low + span, 0, 100)
    ticks = axis.ticks(most)
    assert len(ticks) <= most + 1
    for tick in ticks:
        assert -0.1 <= axis.at(tick) <= 100.1
    gaps = [b - a for a, b in pairwise(ticks)]
    assert all(math.isclose(gap, gaps[0], rel_tol=1e-3) for gap in gaps)


def test_a_logarithmic_axis_has_powers_of_ten() -> None:
    axis = Axis(100, 1e6, 0, 80, log=True)
    assert axis.ticks() == [100, 1e3, 1e4, 1e5, 1e6]
    assert [axis.at(tick) for tick in axis.ticks()] == [0, 20, 40, 60, 80]


@given(values, st.sampled_from(["zero", "free", "log"]))
def test_whatever_the_values_are_the_figure_holds_them(line: list[float | None], scale: str) -> None:
    drawn = figure(Line("a", line, "s0"), scale=scale)
    usable = [value for value in line if value is not None and (scale != "log" or value >= 1)]
    if not usable:
        assert drawn is None
        return
    assert drawn is not None
    (curve,) = drawn.curves
    assert sum(y is not None for y in curve.y) >= len(usable)
    assert all(TOP - 0.01 <= y <= HEIGHT for y in curve.y if y is not None)
    assert all(LEFT <= x <= WIDTH - RIGHT for x in drawn.x)
    assert [row[1] for row in drawn.rows] == ["–" if value is None else str(value) for value in line]


def test_what_is_above_the_top_is_off_the_scale_and_still_in_the_table() -> None:
    drawn = figure(Line("a", [1.0, 2.0], "s0"), Line("b", [50.0, 90.0], "s1"), scale="zero", top=3.0)
    assert drawn is not None
    first, second = drawn.curves
    assert not first.off_scale
    assert second.off_scale
    assert second.path == ""
    assert drawn.rows[-1] == ["2", "2.0", "90.0"]


@given(st.integers(1, 5000), st.integers(2, 50), st.data())
def test_thinning_keeps_first_last_and_marked_rows(count: int, most: int, data: st.DataObject) -> None:
    marked = data.draw(st.integers(0, count - 1))
    rows = thinned(count, [marked, None], most)
    assert {0, count - 1, marked} <= set(rows)
    assert rows == sorted(set(rows))
    assert len(rows) <= most + 2


def test_bars_stand_on_the_axis_and_say_what_they_are() -> None:
    rows = [["agent-0", "0", "0.000"], ["agent-1", "3", "1.500"]]
    drawn = bars("k", "T", "C", [0.0, 1.5], ["Agent", "Participations", "ε"], rows, limits=[("cap", 2.0)])
    assert drawn is not None
    none, some = drawn.bars
    base = drawn.plot[3]
    assert none.y + none.height == pytest.approx(base)
    assert some.y + some.height == pytest.approx(base)
    assert some.label == "Agent agent-1, Participations 3, ε 1.500"
    assert drawn.limits[0][0] < some.y
    assert bars("k", "T", "C", [], [], []) is None


@pytest.mark.parametrize(("count", "width"), [(1, WIDTH), (19, WIDTH), (20, WIDE), (200, WIDE)])
@pytest.mark.parametrize("named", ["agent-{}", "a clinic with a long name {}"])
def test_few_bars_fit_a_telephone_and_no_name_runs_into_the_next(count: int, width: int, named: str) -> None:
    drawn = bars("k", "T", "C", [1.0] * count, ["Agent"], [[named.format(i)] for i in range(count)])
    assert drawn is not None
    assert (drawn.width, drawn.wide) == (width, width == WIDE)
    assert all(bar.x >= LEFT and bar.x + bar.width <= width - RIGHT for bar in drawn.bars)
    assert all(bar.y + bar.height == pytest.approx(drawn.plot[3]) for bar in drawn.bars)
    assert drawn.x_ticks[0][0] == pytest.approx(drawn.bars[0].x + drawn.bars[0].width / 2, abs=0.01)
    longest = max(len(name) for _, name in drawn.x_ticks)
    assert all(after - before >= 9 * longest for (before, _), (after, _) in pairwise(drawn.x_ticks))
