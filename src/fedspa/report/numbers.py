"""Private statistics, or the private scores of a model, in a report: cards, a figure per column, tables by site."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from fedspa.analytics.estimates import DETAILS, Estimate, shown_number
from fedspa.report.charts import Figure, bars

_HISTOGRAM, _SHARE, _FREQUENCY = "count in ", "share of ", "frequency at scores "
_AXES = {_HISTOGRAM: "Records", _SHARE: "Share of the records", _FREQUENCY: "Share of class 1, or of right answers"}
_HEADLINES = ("auc", "accuracy", "mean absolute error")  # the first one that there is goes on a card
_NOT_LISTED = (_HISTOGRAM, "count of ", *DETAILS)  # histograms are in figures, and shares say what counts do
_CAPTION = "The line on each bar is the 95 % interval that the noise leaves."


@dataclass(frozen=True, slots=True)
class Numbers:
    """Figures of all sites together, and a table for each site: its name, header and rows."""

    headlines: list[tuple[str, str, str]]  # name, value, interval
    figures: list[Figure]
    tables: list[tuple[str, list[str], list[list[str]]]]


def numbers(estimates: Sequence[Estimate]) -> Numbers:
    """Arrange released numbers for a page."""
    whole = [each for each in estimates if not each.site]
    groups = {each.group for each in whole}
    called = {each.statistic for each in whole}
    score = next((name for name in _HEADLINES if name in called), None)
    figures = [_by_site(score, estimates)] if score is not None else []
    for (group, column), found in groupby(whole, lambda each: (each.group, each.column)):
        figures.append(_of_column(group, column, list(found)))
    header = [*["Class"] * (len(groups) > 1), "", "Statistic", "Value", "95 % interval"]
    tables = []
    for site, found in groupby(estimates, lambda each: each.site):
        rows = [_row(each, len(groups) > 1) for each in found if not each.statistic.startswith(_NOT_LISTED)]
        tables.append((site or "All agents", header, rows))
    headlines = [
        (_named(each.statistic), *each.shown)
        for each in whole
        if (each.column == "" and each.statistic in ("records", "persons") and len(groups) == 1)
        or each.statistic == score
    ]
    return Numbers(headlines, [figure for figure in figures if figure is not None], tables)


def _of_column(group: str, column: str, found: Sequence[Estimate]) -> Figure | None:
    """The histogram of a number, the shares of a category, or how well a model's scores are calibrated."""
    parts = {start: [each for each in found if each.statistic.startswith(start)] for start in _AXES}
    start = next((start for start, part in parts.items() if part), None)
    if start is None:
        return None
    title = "Calibration" if start == _FREQUENCY else column
    found = [each for each in parts[start] if each.value is not None]
    x_label = "Score" if start == _FREQUENCY else column
    full = f"{title}, {group}" if group else title
    return _bars(full, f"{_AXES[start]}, all agents together.", x_label, found, lambda each: _bar_name(each, start))


def _bars(
    title: str, about: str, x_label: str, found: Sequence[Estimate], name: Callable[[Estimate], str]
) -> Figure | None:
    rows = [[name(each), *each.shown] for each in found]
    ends = [(each.low, each.high) for each in found]
    values, header = [each.value or 0.0 for each in found], ["", "Estimate", "95 % interval"]
    return bars(title, f"{about} {_CAPTION}", x_label, values, header, rows, intervals=ends, show=shown_number)


def _bar_name(each: Estimate, start: str) -> str:
    name = each.statistic.removeprefix(start)
    return name.lstrip("[").split(",")[0] if start == _HISTOGRAM else name.split(" to ")[0]


def _by_site(score: str, estimates: Sequence[Estimate]) -> Figure | None:
    found = [each for each in estimates if each.statistic == score and each.site and each.value is not None]
    about = "On records that each agent kept out of training."
    return _bars(f"{_named(score)} by agent", about, "Agent", found, lambda each: each.site)


def _row(each: Estimate, by_class: bool) -> list[str]:
    return [*[each.group] * by_class, each.column, _named(each.statistic), *each.shown]


def _named(score: str) -> str:
    return "AUC" if score == "auc" else score[:1].upper() + score[1:]
