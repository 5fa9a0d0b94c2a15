"""Composition of releases of which only (ε, δ) is known, for any δ. That δ is chosen for the total at hand.

Dwork, Rothblum, Vadhan 2010, Theorem III.3, and plain addition, whichever is less.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, TypeVar

from fedspa.privacy.event import Event

E = TypeVar("E", bound=Event)
# How much of δ pays for composition; the rest is shared out among the releases. 0 stands for plain addition.
_SHARES = (0.0, 0.001, 0.01, 0.05, 0.1, 0.2, 0.5, 0.8)
# Above all rounding of the few operations between the releases' ε and their total.
_SLACK = 1 + 1e-9


def epsilon(events: Mapping[E, int], delta: float, once: Callable[[E, float], float]) -> float:
    """ε at `delta` of taking part in each event its number of times; infinite where none is known.

    `once` gives ε at a δ of one of an event's releases.
    """
    counted = frozenset((event, count) for event, count in events.items() if count)
    return _composed(counted, delta, once) if counted else 0.0


@lru_cache(maxsize=4096)
def _composed(events: frozenset[tuple[Any, int]], delta: float, once: Callable[[Any, float], float]) -> float:
    ordered = sorted(events, key=lambda item: item[0].to_json())
    return min(_composed_with(ordered, delta, share, once) for share in _SHARES)


def _composed_with(
    events: list[tuple[Any, int]], delta: float, share: float, once: Callable[[Any, float], float]
) -> float:
    """Each release gets the same part of what composition leaves of δ."""
    releases = sum(count * event.steps for event, count in events)
    part = (1 - share) * delta / releases
    each: list[tuple[float, int]] = [(once(event, part), count * event.steps) for event, count in events]
    if any(math.isinf(cost) for cost, _ in each):
        return math.inf
    if share == 0:
        return _SLACK * sum(times * cost for cost, times in each)
    if max(cost for cost, _ in each) > 100:  # e^ε − 1 times anything: addition is far less
        return math.inf
    drift = sum(times * cost * math.expm1(cost) for cost, times in each)
    squares = sum(times * cost**2 for cost, times in each)
    return _SLACK * (drift + math.sqrt(2 * math.log(1 / (share * delta)) * squares))
