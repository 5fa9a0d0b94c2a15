"""A privacy filter: whether events keep an agent's records within (ε, δ) where a server chose each of them after it saw
all earlier releases. docs/accounting.md has the proof.

Let L be the loss of all that was released and K(λ) the sum of the events' moments (`moments`). For each λ > 0
e^(λL − K(λ)) is a supermartingale, no matter who chooses the events and how; so is its mean Σ w_λ·e^(λL − K(λ)) with
weights that were fixed before. Where

    1 − e^(ε − l)  ≤  δ·Σ w_λ·e^(λl − K(λ))     for every l > ε

its expectation bounds that of (1 − e^(ε − L))₊ by δ, which is what (ε, δ) means. The condition reads nothing but the
events, and the agent takes part only while it holds. (Feldman, Zrnic 2021 for one order; the mixture is the method of
mixtures.)

Moments of the privacy loss of one participation: what a filter over adaptively chosen events adds up.

For an event whose outputs under two neighbours are dominated by the pair (P, Q), with L = ln dP/dQ,

    K(λ) = ln E_P[e^(λL); L finite],  λ > 0        and        η = P(L = ∞).

K(λ) is λ times the Rényi divergence of order λ + 1. It is taken from the same dominating pairs as PLD's ε, discretised
from above, so that it holds for every sampling and relation that PLD knows. Losses are resolved up to a reach, and
what lies beyond counts as infinite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import NamedTuple, TypeVar

import numpy as np

from fedspa.privacy.event import Event, Neighbours
from fedspa.privacy.pld import Array, DominatingPair, power_of_two, tail_cutoff

# λ at which moments are known, for every event the same: six to an octave.
ORDERS: Array = 2.0 ** (np.arange(-36, 85) / 6)

# Tightness only: cells to a standard deviation of the loss, the most cells, and for how many steps the reach is chosen.
_FINENESS = 16
_MOST_CELLS = 2**17
_STEPS = 2**40
# Above what floating point may lose in a sum of moments, relative to the sum of its terms' sizes.
_ROUNDING = 1e-12


class Moments(NamedTuple):
    """K at `ORDERS` and η, both from above, of one participation in one direction (from one neighbour to the other)."""

    cumulants: Array
    infinite: float


@lru_cache(maxsize=1024)
def directions(event: Event, left_out: float, neighbours: Neighbours) -> tuple[Moments, ...]:
    """Return both directions under add-remove; under replace-one, where neighbours can be swapped, one for both.

    `left_out` is the share of δ for infinite losses over all participations: it decides how η and K are weighed.
    """
    step = event.step
    shift = step.gaussian_shift(neighbours)
    if shift is not None:
        one = ORDERS * (ORDERS + 1) / 2 * np.float64(shift) ** 2
        return (_times(Moments(one, step.extra_delta(neighbours)), event.steps),)
    both = [_of_pair(pair, tail_cutoff(_STEPS, left_out)) for pair in step.pairs(neighbours)]
    beyond = step.extra_delta(neighbours)
    return tuple(_times(Moments(one.cumulants, one.infinite + beyond), event.steps) for one in both)


def _times(one: Moments, steps: int) -> Moments:
    cumulants = np.nextafter(one.cumulants * float(steps), math.inf)
    return Moments(cumulants, min(1.0, one.infinite * steps))


@lru_cache(maxsize=64)
def _of_pair(pair: DominatingPair, reach: float) -> Moments:
    losses, mass = pair.sketch(reach)
    mean = float(mass @ losses)
    deviation = math.sqrt(float(mass @ (losses - mean) ** 2))
    width = float(losses.max() - losses.min())
    # Losses that are large and nearly alike have cells that floating point can still tell apart.
    finest = float(np.abs(losses).max()) * 2.0**-40
    part = pair.discretise(power_of_two(max(deviation / _FINENESS, width / _MOST_CELLS, finest, 1e-300)), reach)
    losses, mass = part.losses[part.mass > 0], part.mass[part.mass > 0]
    if part.infinite >= 1 or not losses.size:
        return Moments(np.zeros_like(ORDERS), 1.0)
    log_mass, top = np.log(mass), float(losses[-1])
    cumulants = np.empty_like(ORDERS)
    for i, order in enumerate(ORDERS):
        if order * top < 500:
            # The mass of all finite losses is at most 1, so E e^(λL) ≤ 1 + E(e^(λL) − 1), which keeps its digits.
            terms = mass * np.expm1(order * losses)
            excess = float(terms.sum()) + _ROUNDING * float(np.abs(terms).sum())
            cumulants[i] = math.log1p(max(excess, 0.0))
        else:
            exponents = order * losses + log_mass
            largest = float(exponents.max())
            cumulants[i] = max(0.0, largest + math.log(float(np.exp(exponents - largest).sum())) + _ROUNDING * largest)
    return Moments(cumulants, part.infinite)


# Of δ, what pays for infinite losses: fixed before anything is released, as the weights are.
_LEFT_OUT = 1 / 16
# Tightness only: how far around its best order, in octaves, a cap's weights reach, and what is spread over all orders.
_WIDTH = 0.25
_ELSEWHERE = 0.02
# The condition is checked between neighbouring l, and ε is looked for, this finely; ε beyond is called infinite.
_POINTS = 800
_PRECISION = 1e-4
_MOST = 1e9

_Answer = TypeVar("_Answer")


def fits(events: Mapping[Event, int], epsilon: float, delta: float, neighbours: Neighbours) -> bool:
    """Return whether a filter that was set to (ε, δ) admits all these participations, in whatever order they came."""
    if not events:
        return True
    if not delta > 0:
        return False
    # A larger cap is treated as this one.
    return _certified(lambda: _fits(_sums(_counted(events), delta, neighbours), min(epsilon, _MOST), delta), False)


def least_epsilon(events: Mapping[Event, int], delta: float, neighbours: Neighbours) -> float:
    """Return the smallest ε (to four digits, from above) at which a filter at `delta` admits all these; infinite if
    none."""
    return _certified(lambda: _least_epsilon(_counted(events), delta, neighbours), math.inf)


def _certified(asked: Callable[[], _Answer], otherwise: _Answer) -> _Answer:
    """Return `otherwise` where numbers leave the range of float64: nothing is certified, and a NaN fits nowhere."""
    try:
        with np.errstate(all="ignore"):
            return asked()
    except (ArithmeticError, ValueError):  # `math` raises the latter at a logarithm of 0
        return otherwise


def _counted(events: Mapping[Event, int]) -> frozenset[tuple[Event, int]]:
    return frozenset((event, count) for event, count in events.items() if count)


@lru_cache(maxsize=4096)
def _least_epsilon(events: frozenset[tuple[Event, int]], delta: float, neighbours: Neighbours) -> float:
    sums = _sums(events, delta, neighbours)
    if not events:
        return 0.0
    low, high = 1e-6, 1.0
    while not _fits(sums, high, delta):
        low, high = high, 8 * high
        if high > _MOST:
            return math.inf
    while high > low * (1 + _PRECISION):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if _fits(sums, middle, delta) else (middle, high)
    return high


@lru_cache(maxsize=4096)
def _sums(
    events: frozenset[tuple[Event, int]], delta: float, neighbours: Neighbours
) -> tuple[tuple[Array, float], ...]:
    """K and η of all events, for each direction in which a pair of neighbours may be read."""
    left_out = _LEFT_OUT * delta
    sides = 2 if neighbours == "add-remove" else 1
    sums = [(np.zeros_like(ORDERS), 0.0) for _ in range(sides)]
    # In a fixed order, so that sums are repeatable.
    for event, count in sorted(events, key=lambda item: item[0].to_json()):
        found = directions(event, left_out, neighbours)
        for side in range(sides):
            cumulants, infinite = sums[side]
            moments = found[side % len(found)]  # one that is the same in both is counted once
            sums[side] = (
                np.nextafter(cumulants + float(count) * moments.cumulants, math.inf),
                infinite + count * moments.infinite,
            )
    return tuple(sums)


def _fits(sums: tuple[tuple[Array, float], ...], epsilon: float, delta: float) -> bool:
    if any(infinite > _LEFT_OUT * delta for _, infinite in sums):
        return False
    best, log_weights = _weights(epsilon, delta)
    # Distances of l from ε around where 1 − e^(−x) and e^(λx) touch at the best order; the last stands for all beyond.
    x = math.log1p(1 / best) * np.geomspace(1e-3, 1e3, _POINTS)
    needed = np.log(-np.expm1(-np.append(x[1:], math.inf)))  # at the upper end of each cell, as it grows with l
    at = epsilon + x
    at[0] = epsilon
    for cumulants, _ in sums:
        exponents = log_weights + np.outer(at, ORDERS) - cumulants
        found = math.log((1 - _LEFT_OUT) * delta) + np.logaddexp.reduce(exponents, axis=1)  # at the lower end
        if not (needed <= found - 1e-9).all():  # a NaN does not fit
            return False
    return True


def _weights(epsilon: float, delta: float) -> tuple[float, Array]:
    """Return the order at which a Gaussian that costs (ε, δ) has the least cost, and weights around it that sum to
    1."""
    tail = -math.log(delta)
    best = (tail + math.sqrt(tail * (tail + epsilon))) / epsilon
    for _ in range(3):  # the conversion of moments into ε takes off about ln(1 + λ)
        less = max(tail - math.log1p(best), 1.0)
        best = (less + math.sqrt(less * (less + epsilon))) / epsilon
    best = min(max(best, float(ORDERS[0])), float(ORDERS[-1]))
    octaves = np.log2(ORDERS / best)
    weights = np.exp(-((octaves / _WIDTH) ** 2) / 2) + _ELSEWHERE / (1 + octaves**2)
    return best, np.log(weights / weights.sum())
