"""Moments of the privacy loss of one participation: what a filter over adaptively chosen events adds up.

For an event whose outputs under two neighbours are dominated by the pair (P, Q), with L = ln dP/dQ,

    K(λ) = ln E_P[e^(λL); L finite],  λ > 0        and        η = P(L = ∞).

K(λ) is λ times the Rényi divergence of order λ + 1. It is taken from the same dominating pairs as PLD's ε, discretised
from above, so that it holds for every sampling and relation that PLD knows. Losses are told apart up to a reach, and
what lies beyond counts as infinite.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from fedspa.privacy.event import Event, Neighbours
from fedspa.privacy.pld import Array, DominatingPair, power_of_two, reach_for

# λ at which moments are known, for every event the same: six to an octave.
ORDERS: Array = 2.0 ** (np.arange(-36, 85) / 6)

# Tightness only: cells to a standard deviation of the loss, the most cells, and for how many steps the reach is chosen.
_FINENESS = 16
_MOST_CELLS = 2**17
_STEPS = 2**40
# Above what floating point may lose in a sum of moments, relative to the sum of its terms' sizes.
_ROUNDING = 1e-12
# Where only the (ε, δ) of an event is known, for any δ: for how many participations the filter's share of δ is.
_PARTICIPATIONS = 1024


class Moments(NamedTuple):
    """K at `ORDERS` and η, both from above, of one participation in one direction (from one neighbour to the other)."""

    cumulants: Array
    infinite: float


@lru_cache(maxsize=1024)
def directions(event: Event, left_out: float, neighbours: Neighbours) -> tuple[Moments, ...]:
    """Both directions under add-remove; under replace-one, where neighbours can be swapped, one stands for both.

    `left_out` is the share of δ for infinite losses over all participations: it decides how η and K are weighed.
    """
    step = event.step
    if step is None:
        return (_of_epsilon(event, left_out / _PARTICIPATIONS),)
    shift = step.gaussian_shift(neighbours)
    if shift is not None:
        one = ORDERS * (ORDERS + 1) / 2 * np.float64(shift) ** 2
        return (_times(Moments(one, step.beyond(neighbours)), event.steps),)
    both = [_of_pair(pair, reach_for(_STEPS, left_out)) for pair in step.pairs(neighbours)]
    beyond = step.beyond(neighbours)
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


def _of_epsilon(event: Event, infinite: float) -> Moments:
    """(ε, δ) is dominated by randomised response at ε, and by an infinite loss of chance δ."""
    epsilon = event.step_epsilon(infinite / event.steps)
    if math.isinf(epsilon):
        return Moments(np.zeros_like(ORDERS), 1.0)
    one = np.logaddexp(epsilon * (ORDERS + 1), -epsilon * ORDERS) - np.logaddexp(0.0, epsilon)
    slack = _ROUNDING * epsilon * (ORDERS + 1) + 1e-15
    return Moments(_times(Moments(one + slack, 0.0), event.steps).cumulants, infinite)
