"""What noisy totals say: counts, shares, means and quantiles, each with the interval that the known noise leaves it.

An interval holds the true number with 95 % probability, over the noise alone: the records are what they are. Points are
made consistent afterwards (no negative count, parts that add up to their whole), which costs no privacy; intervals are
those of the noisy numbers. An interval of a quantile ends at edges of its histogram, so it holds more than 95 %.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedspa.agent.participate import agent_name
from fedspa.data.columns import Category, Flag, Number, Schema, checked
from fedspa.errors import ConfigError
from fedspa.learning.tasks.totals import Block, Layout, Totals, layout_of
from fedspa.privacy.event import Unit
from fedspa.runs.checkpoint import load_latest
from fedspa.runs.config import Config, load
from fedspa.runs.rundir import check_is_run, read_metrics, read_summary
from fedspa.server.coordinator import RELEASED

Numbers = NDArray[np.float64]
NORMAL = 1.959964  # quantile of a standard normal: 95 % lie within ±
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
LEAST = 4  # standard deviations that a count must have, for anything to be divided by it


@dataclass(frozen=True, slots=True)
class Estimate:
    """One number with its 95 % interval. `value` is None where there are too few records to say anything. `site` is
    "" for all sites together, `group` is the class of the records, "" for all, `column` is "" for whole records."""

    site: str
    group: str
    column: str
    statistic: str
    value: float | None
    low: float
    high: float

    @property
    def error(self) -> float:
        """Return half the interval's width."""
        return (self.high - self.low) / 2

    @property
    def shown(self) -> tuple[str, str]:
        """Return value and interval as tables show them."""
        value = "too few records" if self.value is None else shown_number(self.value)
        return value, f"{shown_number(self.low)} to {shown_number(self.high)}"


def shown_number(value: float) -> str:
    """Return a number as tables show it."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


@dataclass(frozen=True)
class Release:
    """What a release says: its estimates, the summary of its run, and the run's folder; None where nothing was released
    yet and the numbers are expectations."""

    estimates: Sequence[Estimate]
    summary: Mapping[str, Any]
    folder: Path | None

    @property
    def sites(self) -> list[str]:
        """Return the names of the sites that have numbers of their own."""
        return list(dict.fromkeys(each.site for each in self.estimates if each.site))

    def value(self, statistic: str, column: str = "", site: str = "", group: str = "") -> float | None:
        """Return one number, as in `value("mean", "age")` or `value("auc", site="north")`.

        Args:
            statistic: Its name, as in the table: `records` (`persons`, where these are protected), `mean`,
                `standard deviation`, `quantile 50%`, `count of …`; of a model `accuracy`, `auc`, `log loss`, …
            column: The column, "" for whole records.
            site: The site, "" for all together.
            group: The class, where statistics were taken by class.

        Returns:
            The number; None where too few records are there to say it.

        Raises:
            ConfigError: There is no such number.
        """
        wanted = (site, group, column, statistic)
        for each in self.estimates:
            if (each.site, each.group, each.column, each.statistic) == wanted:
                return each.value
        raise ConfigError(f"there is no statistic {statistic!r} of column {column!r}, site {site!r}, group {group!r}")

    def to_json(self) -> str:
        """Return everything as one JSON object: the guarantee, and the estimates.

        Returns:
            The text.
        """
        guarantee = ("epsilon", "epsilon_worst_case", "delta", "neighbours", "unit", "adversary", "accountant", "noise")
        kept = {key: self.summary[key] for key in guarantee}
        return json.dumps({**kept, "estimates": [asdict(each) for each in self.estimates]}, indent=1, allow_nan=False)


@dataclass(frozen=True, slots=True)
class Count:
    """A number of records, as it was found and with its standard deviation."""

    value: float
    deviation: float

    @property
    def usable(self) -> bool:
        return self.value > LEAST * self.deviation

    def less(self, other: Count) -> Count:
        return Count(self.value - other.value, math.hypot(self.deviation, other.deviation))


def estimates(
    layout: Layout, schema: Schema, totals: Numbers, deviation: float, site: str = "", unit: Unit = "record"
) -> list[Estimate]:
    """Return what the totals of some sites say. `deviation` is the noise in each number of them, `unit` is what they
    count."""
    found = []
    for number, part in enumerate(totals.reshape(layout.classes, -1)):
        group = "" if layout.classes == 1 else (schema.class_names or ())[number]
        found += [replace(each, site=site, group=group) for each in _of_group(layout, schema, part, deviation, unit)]
    return found


def typical(layout: Layout, records: float) -> Numbers:
    """Return the totals of so many records that are spread evenly: for errors to expect before anything is spent."""
    parts = []
    for block in layout.blocks:
        each = np.full(block.size, 1 / block.size)
        if block.kind == "moments":
            each = np.array([0.0, 1 / 3]) / math.sqrt(2)
        parts.append(each * block.weight)
    return np.tile(np.concatenate(parts), layout.classes) * (records / layout.classes)


def _of_group(layout: Layout, schema: Schema, totals: Numbers, deviation: float, unit: Unit) -> Iterator[Estimate]:
    columns = schema.counted
    ends = np.cumsum([block.size for block in layout.blocks])
    parts = [
        (block, totals[end - block.size : end] / block.weight, deviation / block.weight)
        for block, end in zip(layout.blocks, ends)
    ]
    records = records_of_counts([Count(float(part.sum()), noise * math.sqrt(len(part))) for block, part, noise in parts
                        if _whole(block, columns)])  # fmt: skip
    yield count_of("", f"{unit}s", records)
    for block, part, noise in parts:
        column = columns.get(block.column)
        if isinstance(column, Number) and block.kind == "histogram":
            moments = next(each for each in parts if each[0].column == block.column and each[0].kind == "moments")
            yield from _number(column, block, part, noise, moments[1], moments[2], records)
        elif block.kind == "categories" and column is not None:
            yield from _categories(column, block, part, noise, records)


def _whole(block: Block, columns: dict[str, Number | Category | Flag]) -> bool:
    """Return whether each record has exactly one place in the block, so that its parts add up to the records."""
    if block.kind in ("count", "histogram"):
        return True
    return block.kind == "categories" and (isinstance(columns[block.column], Category) or block.size > 2)


def records_of_counts(found: Sequence[Count]) -> Count:
    """Return the number of records, each way of counting them weighted by its precision."""
    weights = np.array([each.deviation**-2 for each in found])
    value = float(np.dot(weights, [each.value for each in found]) / weights.sum())
    return Count(value, float(weights.sum() ** -0.5))


def count_of(column: str, statistic: str, count: Count, point: float | None = None) -> Estimate:
    low, high = (count.value + sign * NORMAL * count.deviation for sign in (-1, 1))
    value = max(0.0, count.value if point is None else point)
    return Estimate("", "", column, statistic, value, max(0.0, low), max(0.0, high))


def _categories(
    column: Number | Category | Flag, block: Block, part: Numbers, noise: float, records: Count
) -> Iterator[Estimate]:
    if isinstance(column, Category):
        names = [*column.categories, *["another"] * column.other]
    else:
        names = ["false", "true"] if block.of_target and block.size == 2 else ["true"]
    names += ["missing"] * (block.size - len(names))
    points = _consistent(part, records.value) if block.size > 1 else part
    for name, value, point in zip(names, part.tolist(), points.tolist()):
        yield count_of(block.column, f"count of {name}", Count(value, noise), point)
    for name, value, point in zip(names, part.tolist(), points.tolist()):
        share = ratio_of(block.column, f"share of {name}", value, noise, records, (0.0, 1.0))
        yield share if share.value is None or block.size == 1 else replace(share, value=point / records.value)


def _number(
    column: Number,
    block: Block,
    part: Numbers,
    noise: float,
    moments: Numbers,
    moment_noise: float,
    records: Count,
) -> Iterator[Estimate]:
    name, (low, high) = block.column, column.range
    half = (high - low) / 2
    bins = block.size - (block.missing >= 0)
    there = records
    if block.missing >= 0:
        missing = Count(float(part[-1]), noise)
        yield count_of(name, "count of missing", missing)
        there = records.less(missing)
    first, second = (moments * math.sqrt(2)).tolist()
    moment_noise *= math.sqrt(2)
    yield ratio_of(name, "mean", first, moment_noise, there, (low, high), half, low + half)
    yield _deviation(name, first, second, moment_noise, there, half)
    yield from _quantiles(column, name, part[:bins], noise, there)
    edges = np.linspace(low, high, bins + 1)
    points = _consistent(part, records.value)
    for place in range(bins):
        statistic = f"count in [{edges[place]:.6g}, {edges[place + 1]:.6g}{']' if place == bins - 1 else ')'}"
        yield count_of(name, statistic, Count(float(part[place]), noise), float(points[place]))


def ratio_of(
    column: str,
    statistic: str,
    total: float,
    noise: float,
    records: Count,
    bounds: tuple[float, float],
    scale: float = 1.0,
    offset: float = 0.0,
) -> Estimate:
    """Return offset + scale · total / records, within its bounds."""
    if not records.usable:
        return Estimate("", "", column, statistic, None, *bounds)
    ratio = total / records.value
    deviation = math.hypot(noise, ratio * records.deviation) / records.value
    value, low, high = (offset + scale * (ratio + by * deviation) for by in (0, -NORMAL, NORMAL))
    value, low, high = (min(max(each, bounds[0]), bounds[1]) for each in (value, low, high))
    return Estimate("", "", column, statistic, value, low, high)


def _deviation(column: str, first: float, second: float, noise: float, records: Count, half: float) -> Estimate:
    """Return the standard deviation, by the first order of its square's dependence on what is noisy."""
    if not records.usable:
        return Estimate("", "", column, "standard deviation", None, 0.0, half)
    count = records.value
    mean, square = first / count, second / count
    variance = square - mean**2
    by_count = (2 * mean**2 - square) / count * records.deviation
    deviation = math.sqrt((noise / count) ** 2 * (1 + 4 * mean**2) + by_count**2)
    value, low, high = (half * math.sqrt(min(max(variance + by * deviation, 0.0), 1.0)) for by in (0, -NORMAL, NORMAL))
    return Estimate("", "", column, "standard deviation", value, low, high)


def _quantiles(column: Number, name: str, part: Numbers, noise: float, records: Count) -> Iterator[Estimate]:
    low, high = column.range
    edges, count = np.linspace(low, high, len(part) + 1), len(part)
    if not records.usable:
        yield from (Estimate("", "", name, f"quantile {q:.0%}", None, low, high) for q in QUANTILES)
        return
    points = _consistent(part, records.value)
    reached = np.concatenate([[0.0], np.cumsum(points)]) / max(points.sum(), 1e-9)
    # Records below each edge: those of the parts to its left, and all less those to its right, by their precision.
    left, right = np.concatenate([[0.0], np.cumsum(part)]), part.sum() - np.concatenate([[0.0], np.cumsum(part)])
    places = np.arange(count + 1)
    of_left = 1 / np.maximum(places * noise**2, 1e-30)
    of_right = 1 / np.maximum((count - places) * noise**2 + records.deviation**2, 1e-30)
    below = (of_left * left + of_right * (records.value - right)) / (of_left + of_right)
    slack = NORMAL * np.sqrt(1 / (of_left + of_right))
    for q in QUANTILES:
        wanted = q * records.value
        sure_below = np.minimum.accumulate(below + slack < wanted)
        sure_above = np.minimum.accumulate((below - slack > wanted)[::-1])[::-1]
        lowest = float(edges[max(int(sure_below.sum()) - 1, 0)])
        highest = float(edges[min(count + 1 - int(sure_above.sum()), count)])
        value = float(np.interp(q, reached, edges))
        yield Estimate("", "", name, f"quantile {q:.0%}", min(max(value, lowest), highest), lowest, highest)


def _consistent(parts: Numbers, whole: float) -> Numbers:
    """Return the nearest numbers that are not negative and add up to the whole (a projection on a simplex)."""
    whole = max(whole, 0.0)
    ordered = np.sort(parts)[::-1]
    excess = (np.cumsum(ordered) - whole) / np.arange(1, len(parts) + 1)
    kept = int(np.nonzero(ordered > excess)[0][-1]) if whole > 0 else 0
    consistent: Numbers = np.maximum(parts - excess[kept], 0.0)
    return consistent


# What noisy totals say of a model: accuracy, AUC, calibration, log loss and errors, each with its 95 % interval.

MOST_LOG_ODDS = 6.0  # scores below 0.25 % or above 99.75 % are in the first and the last part
LEAST_OF_CLASS = 2  # standard deviations that the records of each class must have, for an AUC
CONFUSION, SCORES, LOSS, ERROR = "confusion", "scores", "loss", "error"  # blocks of the layout
DETAILS = ("predicted", "frequency")  # how the names of scores begin that a short table leaves out


def scores(layout: Layout, totals: Numbers, deviation: float, unit: Unit = "record") -> Iterator[Estimate]:
    """Return what the totals of some agents say of a model; `unit` is what they count."""
    ends = np.cumsum([block.size for block in layout.blocks])
    parts = {
        block.column: (totals[end - block.size : end] / block.weight, deviation / block.weight, block)
        for block, end in zip(layout.blocks, ends)
    }
    whole = [parts[name] for name in ("", CONFUSION, SCORES) if name in parts]
    records = records_of_counts([Count(float(p.sum()), noise * math.sqrt(len(p))) for p, noise, _ in whole])
    yield count_of("", f"{unit}s", records)
    if CONFUSION in parts:
        yield from _confusion(*parts[CONFUSION][:2], records)
    if SCORES in parts:
        yield from _of_scores(*parts[SCORES][:2], records, binary=CONFUSION not in parts)
    for name, label in ((LOSS, "log loss"), (ERROR, "mean absolute error")):
        if name in parts:
            moments, noise, block = parts[name]
            (first, second), most = moments.tolist(), 1 / block.factor
            root = math.sqrt(2)
            yield ratio_of("", label, first * root, noise * root, records, (0.0, most), most)
            if name == ERROR:
                square = ratio_of("", "", second * root, noise * root, records, (0.0, 1.0))
                ends_of = (square.low, square.high)
                value = None if square.value is None else most * math.sqrt(square.value)
                yield Estimate("", "", "", "root mean squared error", value, *(most * math.sqrt(e) for e in ends_of))


def _confusion(part: Numbers, noise: float, records: Count) -> Iterator[Estimate]:
    classes = math.isqrt(len(part))
    cells = part.reshape(classes, classes)
    yield ratio_of("", "accuracy", float(np.trace(cells)), noise * math.sqrt(classes), records, (0.0, 1.0))
    for label in range(classes):
        for predicted in range(classes):
            name = f"predicted {predicted} of class {label}"
            yield count_of("", name, Count(float(cells[label, predicted]), noise))


def _of_scores(part: Numbers, noise: float, records: Count, *, binary: bool) -> Iterator[Estimate]:
    """Yield the AUC of two classes, and how often scores in each part of [0, 1] were of class 1, or right."""
    bad, good = part.reshape(2, -1)
    bins = len(good)
    if binary:
        halves = part.reshape(4, -1)  # class 0 below and above one half, then class 1
        yield from _confusion(halves.sum(axis=1), noise * math.sqrt(halves.shape[1]), records)
        yield _auc(bad, good, noise)
    edges = np.arange(bins + 1) / bins
    if binary:
        edges = np.round(1 / (1 + np.exp(-MOST_LOG_ODDS * (2 * edges - 1))), 4)
        edges[[0, -1]] = 0, 1
    for place in range(bins):
        both = Count(float(bad[place] + good[place]), noise * math.sqrt(2))
        name = f"frequency at scores {edges[place]:.3g} to {edges[place + 1]:.3g}"
        yield ratio_of("", name, float(good[place]), noise, both, (0.0, 1.0))


def _auc(negative: Numbers, positive: Numbers, noise: float) -> Estimate:
    """Return the chance that a record of class 1 has the higher score, ties counting a half, by noisy histograms.

    Its deviation is that of the ratio's first order in the noise, and of the product of two noises.
    """
    negatives, positives, slack = negative.sum(), positive.sum(), noise * math.sqrt(len(negative))
    if min(negatives, positives) <= LEAST_OF_CLASS * slack:
        return Estimate("", "", "", "auc", None, 0.0, 1.0)
    below = np.cumsum(negative) - negative / 2  # negatives below each part, half of those in it
    above = positives - np.cumsum(positive) + positive / 2
    pairs = positives * negatives
    value = float((positive * below).sum() / pairs)
    first = ((below - value * negatives) ** 2).sum() + ((above - value * positives) ** 2).sum()
    second = noise**2 * len(negative) ** 2 * ((1 - value) ** 2 + value**2) / 2  # over pairs of parts
    deviation = noise * math.sqrt(first + second) / pairs
    value, low, high = (float(min(max(value + by * deviation, 0.0), 1.0)) for by in (0, -NORMAL, NORMAL))
    return Estimate("", "", "", "auc", value, low, high)


# What a run of private statistics or of a private evaluation released, read from its folder.


@dataclass(frozen=True)
class Released:
    """What a finished run released. `sites` has name, totals and the noise in each of them: first, under the name "",
    of all sites together; then of each whose upload the server saw. `schema` is None for the scores of a model."""

    config: Config
    summary: Mapping[str, Any]
    layout: Layout
    schema: Schema | None
    sites: Sequence[tuple[str, Numbers, float]]
    folder: Path

    @property
    def estimates(self) -> list[Estimate]:
        """Return every number with its 95 % interval, in the order of `sites`."""
        if self.schema is not None:
            return [
                each
                for site, totals, noise in self.sites
                for each in estimates(self.layout, self.schema, totals, noise, site, self.summary["unit"])
            ]
        return [
            replace(each, site=site)
            for site, totals, noise in self.sites
            for each in scores(self.layout, totals, noise, self.summary["unit"])
        ]


def released(folder: Path) -> Released:
    """Read what the run in `folder` released."""
    check_is_run(folder)
    config, summary = load(folder / "config.toml", own_code=False), read_summary(folder)
    if config.task.name != Totals.name:
        raise ConfigError(f"the run in {folder} trained a model; it released no statistics")
    found = load_latest(folder / "checkpoint")
    if summary is None or found is None:
        raise ConfigError(f"the run in {folder} is not finished; `fedspa run --resume {folder}` resumes it")
    uploads = sum(metrics.agents for metrics in read_metrics(folder / "metrics.jsonl"))
    if not uploads:
        raise ConfigError(f"the run in {folder} released nothing: no agent answered")
    schema = None if config.task.options.get("layout") is not None else checked(summary["schema"])
    layout = layout_of(config.task.options, schema)
    bound, noise = config.algorithm.batch, float(summary["noise_multiplier"])
    totals = {name: tensor.double().numpy() * bound for name, tensor in found.state.tensors.items()}
    sites = [("", totals["theta"] * uploads, noise * math.sqrt(uploads))]
    names = summary["agent_names"]
    for number, name in sorted((int(name.removeprefix(RELEASED)), name) for name in totals if name != "theta"):
        sites.append((agent_name(number) if names is None else names[number], totals[name], noise))
    return Released(config, summary, layout, schema, sites, folder)
