"""An agent's share of a sum: its clipped gradients, added up, at a point of the grid, and noise around that point.

From an example's clipped gradient on, everything is a whole number: the sum, the point of the grid, chosen at random
between the two nearest so that the mean is the value itself, and the draw around it. Floating point has no say in what
leaves, and the distances of docs/secagg.md are distances of integers.

Draws of the discrete Gaussian on the whole numbers around a point of the grid: its law at n is in proportion to
exp(−(n − c)²/2σ²), σ = `SIGMA`, where c is any whole number of `FINE`ths.

Draws are by inversion (`randomness/streams.py`), with a table for each fraction that c can have. A share that a
record has moved by eight standard deviations is recognised by what the other law has beyond twenty: out to there each
whole number has its chance but for a factor 1 ± 2⁻⁹⁰.
"""

from __future__ import annotations

import math
from decimal import Decimal, localcontext
from functools import cache

import numpy as np
from numpy.typing import NDArray

from fedspa.mechanisms.base import CLIP_UNITS
from fedspa.mechanisms.discrete_gaussian.plan import FINE, SIGMA, DiscreteGaussianPlan
from fedspa.randomness.streams import AT_ONCE, DIGITS, Stream, heads, settle, upper_ends

Integers = NDArray[np.int64]


def share(total: Integers, plan: DiscreteGaussianPlan, rounding: Stream, noise: Stream) -> Integers:
    """Return what may leave, masked, of a sum in which each example measures up to `CLIP_UNITS`."""
    return discrete_gaussian(placed(total, plan, rounding), noise)


def placed(total: Integers, plan: DiscreteGaussianPlan, rounding: Stream) -> Integers:
    """Return the sum on the grid: within the plan's reach, which moves no two apart, and rounded up or down at
    random."""
    inside = np.clip(total, -plan.reach, plan.reach)
    points: Integers = (inside * plan.bound + rounding.integers_below(len(inside), CLIP_UNITS)) // CLIP_UNITS
    return points


def mean_gradient(total: Integers, members: int, plan: DiscreteGaussianPlan) -> NDArray[np.float64]:
    """Return the server's unbiased estimate of the mean gradient over a cohort's records, from the sum of its
    shares."""
    return total.astype(np.float64) * (plan.clip_value / plan.bound * FINE / (members * plan.batch))


# Values on either side of c. Those within 20 standard deviations are what the accounting looks at (`accounting`).
REACH = math.ceil(20.5 * SIGMA) + 1
_CELL_BITS = 10


def discrete_gaussian(centres: NDArray[np.int64], stream: Stream) -> NDArray[np.int64]:
    """One draw around each of the centres, which are whole numbers of steps of the grid."""
    tops, starts = _tables()
    values = np.empty(len(centres), dtype=np.int64)
    for start in range(0, len(centres), AT_ONCE):
        part = centres[start : start + AT_ONCE]
        words, fractions = stream.uint64(len(part)), part % FINE
        found = starts[fractions, (words >> np.uint64(64 - _CELL_BITS)).view(np.int64)].astype(np.int64)
        among = np.arange(len(part))
        while among.size:  # one end further, those whose word does not lie below it
            passed = words[among] >= tops[fractions[among], np.minimum(found[among], tops.shape[1] - 1)]
            among = among[passed & (found[among] < tops.shape[1])]
            found[among] += 1
        for i in np.flatnonzero(tops[fractions, np.maximum(found, 1) - 1] == words):
            found[i] = settle(_ends(int(fractions[i])), words[i], stream)
        values[start : start + len(part)] = part // FINE - REACH + found
    return values


@cache
def _tables() -> tuple[NDArray[np.uint64], NDArray[np.uint8]]:
    """For each fraction, the first 64 bits of its ends, and how many of them are not above a word that starts a cell:
    words lie in cells of equal length."""
    tops = np.stack([heads(_ends(fraction)) for fraction in range(FINE)])
    cells = np.arange(1 << _CELL_BITS, dtype=np.uint64) << np.uint64(64 - _CELL_BITS)
    return tops, np.array([np.searchsorted(row, cells, side="right") for row in tops], dtype=np.uint8)


def _ends(fraction: int) -> list[int]:
    """Upper ends, in units of 2^-BITS, of what share of [0, 1) each of −REACH … REACH + 1 has around c = fraction/FINE;
    the last one's is left out."""
    # (n − c)² = n² − 2nc + c², and the last is the same for all n.
    up, down = (_tilt(fraction, sign) for sign in (1, -1))
    weights = {0: 1 << DIGITS}
    power = backward = 1 << DIGITS
    for n, square in enumerate(_squares(), 1):
        power, backward = power * up >> DIGITS, backward * down >> DIGITS
        weights[n], weights[-n] = square * power >> DIGITS, square * backward >> DIGITS
    return upper_ends([weights[n] for n in range(-REACH, REACH + 2)])


def _tilt(fraction: int, sign: int) -> int:
    """exp(±c/σ²), from its powers of two: exponentials take long."""
    value = 1 << DIGITS
    for bit in range(fraction.bit_length()):
        if fraction >> bit & 1:
            value = value * _exponential(sign << bit, FINE * SIGMA**2) >> DIGITS
    return value


@cache
def _squares() -> list[int]:
    """exp(−n²/2σ²) for n = 1 … REACH + 1."""
    return [_exponential(-(n**2), 2 * SIGMA**2) for n in range(1, REACH + 2)]


@cache
def _exponential(numerator: int, denominator: int) -> int:
    """exp(numerator/denominator) in units of 2^-DIGITS."""
    with localcontext(prec=160):
        return int((Decimal(numerator) / denominator).exp() * 2**DIGITS)
