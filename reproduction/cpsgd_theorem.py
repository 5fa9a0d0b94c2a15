"""The theorem that was published for cpSGD, with its sensitivities as printed. Its ε can be below the truth.

Agarwal, Suresh, Yu, Kumar, McMahan, "cpSGD", NeurIPS 2018, Theorem 1, at p = 1/2. Sampling B of m records amplifies it
(Balle, Barthe, Gaboardi 2018, Theorem 9), and rounds compose as (ε, δ) mechanisms.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from fedspa.algorithms.cpsgd.plan import BinomialEvent

_LARGEST_STEP_DELTA = 0.1
# How much of δ pays for composition; the rest is shared out among the releases. 0 stands for plain addition.
_SHARES = (0.0, 0.001, 0.01, 0.05, 0.1, 0.2, 0.5, 0.8)
_SLACK = 1 + 1e-9


class Sensitivity(NamedTuple):
    """How far the rounded means of two neighbours are apart, in levels, in the L1, L2 and L∞ norms."""

    l1: float
    l2: float
    largest: float


def published_sensitivity(event: BinomialEvent, delta: float) -> Sensitivity:
    """The same as cpSGD prints it for a vector of L2 norm D: here D = G/B, half of what one record can move."""
    d, levels = event.dimension, 2**event.bits
    r = math.sqrt(d) * (levels - 1) / event.batch
    tail = math.log(2 / delta)
    deviation = math.sqrt(2 * math.sqrt(d) * r * tail)
    l1 = math.sqrt(d) * r + deviation + 4 / 3 * tail
    return Sensitivity(l1, r + math.sqrt(l1 + deviation), levels + 1)


def published_shift_epsilon(event: BinomialEvent, moved: Sensitivity, delta: float) -> float:
    """Theorem 1 of cpSGD; infinite outside its condition."""
    v, once, tenth = event.trials * event.honest / 4, math.log(1.25 / delta), math.log(10 / delta)
    if v < max(23 * math.log(10 * event.dimension / delta), 2 * moved.largest):
        return math.inf
    gaussian = moved.l2 * math.sqrt(2 * once / v)
    skew = (moved.l2 * 1.75 * math.sqrt(2 * tenth) + moved.l1 / 3) / (v * (1 - delta / 10))
    extreme = moved.largest * 2 / 3 * (once + math.log(20 * event.dimension / delta) * tenth) / v
    return gaussian + skew + extreme


def published_epsilon(event: BinomialEvent, participations: int, delta: float) -> float:
    """ε at `delta`, replace-one, of so many participations; infinite outside the theorem's condition."""
    return _composed(frozenset({(event, participations)}), delta) if participations else 0.0


def _sampled(event: BinomialEvent, delta: float) -> float:
    own = min(delta / (2 * event.rate), _LARGEST_STEP_DELTA)
    release = published_shift_epsilon(event, published_sensitivity(event, own), own) * _SLACK
    far = release > 700  # e^ε is near the largest number, and the 1s are nothing beside it
    return release + math.log(event.rate) if far else math.log1p(event.rate * math.expm1(release))


@lru_cache(maxsize=4096)
def _composed(events: frozenset[tuple[BinomialEvent, int]], delta: float) -> float:
    ordered = sorted(events, key=lambda item: item[0].to_json())
    return min(_composed_with(ordered, delta, share) for share in _SHARES)


def _composed_with(events: list[tuple[BinomialEvent, int]], delta: float, share: float) -> float:
    """Each release gets the same part of what composition leaves of δ (Dwork, Rothblum, Vadhan 2010, Theorem III.3)."""
    releases = sum(count * event.steps for event, count in events)
    part = (1 - share) * delta / releases
    each: list[tuple[float, int]] = [(_sampled(event, part), count * event.steps) for event, count in events]
    if any(math.isinf(cost) for cost, _ in each):
        return math.inf
    if share == 0:
        return _SLACK * sum(times * cost for cost, times in each)
    if max(cost for cost, _ in each) > 100:  # e^ε − 1 times anything: addition is far less
        return math.inf
    drift = sum(times * cost * math.expm1(cost) for cost, times in each)
    squares = sum(times * cost**2 for cost, times in each)
    return _SLACK * (drift + math.sqrt(2 * math.log(1 / (share * delta)) * squares))
