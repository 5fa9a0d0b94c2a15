"""What a sum of discrete Gaussian shares costs: no more than one Gaussian of nearly the same noise (docs/shares.md).

With s² = honest·SIGMA², F(t) = Σ_{j ≥ 0} ρ(t − j) for the density ρ of N(0, s²) is the distribution function of the sum
around its centre, t units above it, and q = Φ⁻¹(F) is what it would be for a Gaussian of standard deviation 1: nearly
t/s. A record that moves the centre by g moves q by no more than κ·g/s, wherever one looks, and so whoever looks at one
coordinate learns no more than from N(κg/s, 1) against N(0, 1). Coordinates and participations add up as Gaussians do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy import special

from fedspa.mechanisms.discrete_gaussian.event import FINE, SIGMA
from fedspa.privacy.event import Neighbours, Step
from fedspa.privacy.pld import DominatingPair
from fedspa.privacy.subsampling import Removed

# κ is found for |q| up to here, so that a shift of up to `_MOST_SHIFT` is priced where |q| ≤ 12. What lies beyond has a
# chance of η a coordinate.
_LAST, _MOST_SHIFT, _ETA = 20.0, 8.0, 5e-32
# The noise of more honest members than these is not counted: κ would take long to find.
_MOST_HONEST = 4096
# Above what rounding can take from κ.
_SLACK = 1 + 1e-8
_COLUMNS = 64


@dataclass(frozen=True, slots=True)
class SharedNoise(Step):
    """`bound` in steps of the grid; `honest` shares; `active` coordinates."""

    bound: int
    honest: int
    active: int

    def gaussian_shift(self, neighbours: Neighbours) -> float:
        honest = min(self.honest, _MOST_HONEST)
        moved = self.bound * (1 if neighbours == "add-remove" else 2) / FINE
        shift = stretch(honest) * moved / (SIGMA * math.sqrt(honest))
        return shift if shift <= _MOST_SHIFT else math.inf

    def pairs(self, neighbours: Neighbours) -> tuple[DominatingPair, ...]:
        return (Removed(1.0, self.gaussian_shift(neighbours)),)

    def beyond(self, neighbours: Neighbours) -> float:
        return self.active * _ETA


@lru_cache(maxsize=64)
def stretch(honest: int) -> float:
    """κ: the greatest step of q from one point of the grid to the next, in units of their distance over s.

    F between two points of the grid is linear, as the point is chosen at random, and q is steepest where the normal
    density at either end is least.
    """
    deviation = SIGMA * math.sqrt(honest)
    last = math.ceil((_LAST + 9) * deviation)
    most = 0.0
    for first in range(0, FINE, _COLUMNS):
        t = np.arange(-last, last + 1)[:, None] + np.arange(first, first + _COLUMNS + 1) / FINE
        log_law = -((t / deviation) ** 2) / 2 - math.log(deviation * math.sqrt(2 * math.pi))
        below = np.logaddexp.accumulate(log_law, axis=0)
        above = np.logaddexp.accumulate(log_law[:0:-1], axis=0)[::-1]  # of all but the first row: what is beyond t
        below = below[:-1]
        q = np.where(below < above, special.ndtri_exp(below), -special.ndtri_exp(above))
        near = np.abs(q) <= _LAST
        near = near[:, 1:] | near[:, :-1]
        density = -(q**2) / 2 - math.log(2 * math.pi) / 2
        least = np.minimum(density[:, 1:], density[:, :-1])
        upwards = np.exp(below[:, 1:] - least) * -np.expm1(below[:, :-1] - below[:, 1:])
        downwards = np.exp(above[:, :-1] - least) * -np.expm1(above[:, 1:] - above[:, :-1])
        steepest = np.where(q[:, 1:] < 0, upwards, downwards)[near]
        most = max(most, float(steepest.max()))
    return most * FINE * deviation * _SLACK
