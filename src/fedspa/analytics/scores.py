"""What noisy totals say of a model: accuracy, AUC, calibration, log loss and errors, each with its 95 % interval."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from fedspa.analytics.estimates import NORMAL, Count, Estimate, Numbers, count_of, ratio_of, records_of_counts
from fedspa.learning.tasks.totals import Layout
from fedspa.privacy.event import Unit

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
