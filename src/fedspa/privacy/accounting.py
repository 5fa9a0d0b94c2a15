"""Verified ε: an upper bound on the privacy cost of events to an agent's records.

Privacy loss distributions (`pld`) are composed. An event says itself under which relation it has one. Events of
different plans, mechanisms and samplings compose where all were fixed beforehand. What a server chose after it saw
releases is for `budget`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache

from fedspa.errors import PrivacyError
from fedspa.privacy.event import MOST, Event, Neighbours, Step, check_one_unit, check_word


def epsilon(events: Mapping[Event, int], delta: float, *, neighbours: Neighbours) -> float:
    """Return the ε at `delta` of taking part in each event its number of times: an upper bound, infinite where none is
    known.

    It bounds the loss of one record, or of one person where that is the events' unit, under `neighbours`, over
    everything that the agent released in these participations.
    """
    if not 0 < delta < 1:
        raise PrivacyError(f"delta is {delta}; it must lie between 0 and 1")
    check_word("neighbours", neighbours, Neighbours)
    check_one_unit(events)
    for event, count in events.items():
        if not 0 <= count <= MOST:
            raise PrivacyError(f"participations is {count}; it must lie between 0 and {MOST:g}")
        event.accountant(neighbours)
    counted = frozenset((event, count) for event, count in events.items() if count)
    return _certified(counted, delta, neighbours) if counted else 0.0


def _certified(events: frozenset[tuple[Event, int]], delta: float, neighbours: Neighbours) -> float:
    """Return ∞, and raise no exception, where numbers leave the range of float64: nothing is certified there."""
    import numpy as np

    try:
        with np.errstate(all="ignore"):
            cost = _epsilon(events, delta, neighbours)
    except (ArithmeticError, ValueError):  # `math` raises the latter at a logarithm of 0
        return math.inf
    return math.inf if math.isnan(cost) else cost


@lru_cache(maxsize=4096)
def _epsilon(events: frozenset[tuple[Event, int]], delta: float, neighbours: Neighbours) -> float:
    # Events that differ in their number of steps only are one mechanism; in a fixed order, so that sums are repeatable.
    steps: dict[Step, int] = {}
    for event, count in sorted(events, key=lambda item: item[0].to_json()):
        steps[event.step] = steps.get(event.step, 0) + count * event.steps
    delta -= sum(n * step.extra_delta(neighbours) for step, n in steps.items())
    if delta <= 0:
        return math.inf
    return _pld_epsilon(steps, delta, neighbours)


def gaussian_epsilon(shift: float, delta: float) -> float:
    """Return the exact ε of N(μ, 1) against N(0, 1), from above (Balle, Wang 2018, Theorem 8); `shift` is μ."""
    from scipy import special

    def delta_at(eps: float) -> float:
        near, far = special.log_ndtr(shift / 2 - eps / shift), special.log_ndtr(-shift / 2 - eps / shift)
        return float(math.exp(near) * -math.expm1(min(eps + far - near, 0.0)))

    enough = delta * (1 - 1e-9)  # δ is computed to ten digits or more
    low, high = 0.0, shift * shift / 2 + shift * math.sqrt(-2 * math.log(delta)) + 1e-12
    if high == math.inf:
        return high
    if delta_at(low) <= enough:
        return 0.0
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        if delta_at(middle) <= enough:
            high = middle
        else:
            low = middle
    return high


def _pld_epsilon(steps: Mapping[Step, int], delta: float, neighbours: Neighbours) -> float:
    from fedspa.privacy.pld import DominatingPair, Removed, composed_epsilon

    # Any number of plain Gaussians is one Gaussian.
    shifts = {step: step.gaussian_shift(neighbours) for step in steps}
    plain = math.sqrt(sum(n * (shift * shift) for step, n in steps.items() if (shift := shifts[step]) is not None))
    others = {step: n for step, n in steps.items() if shifts[step] is None}
    if sum(others.values()) > MOST:
        return math.inf
    if not others:
        return gaussian_epsilon(plain, delta)
    pairs = [(step.pairs(neighbours), n) for step, n in others.items()]

    def direction(side: int) -> list[tuple[DominatingPair, int]]:
        parts = [(both[side % len(both)], n) for both, n in pairs]
        return [*parts, (Removed(1.0, plain), 1)] if plain else parts

    first = composed_epsilon(direction(0), delta)
    if neighbours == "replace-one":
        return first
    return max(first, composed_epsilon(direction(1), delta, at_least=first))


def last_that_fits(fits: Callable[[int], bool], enough: int, over: int) -> int:
    """Return the last number from `enough`, which fits, to `over`, which does not (nor any after it): by bisection.
    `enough` may be above `over`: then the first of those that fit."""
    while abs(over - enough) > 1:
        middle = (enough + over) // 2
        enough, over = (middle, over) if fits(middle) else (enough, middle)
    return enough
