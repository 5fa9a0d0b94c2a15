"""The δ that a release costs because its noise ends: no sampler draws a Gaussian of any size, and an ε that assumes one
is too low.

A pair of values of `secure` noise has a radius √(−2·ln u), whose u has 74 random bits: none is drawn beyond
T = √(2·74·ln 2) = 10.13 standard deviations. `exact` noise goes on to 14 for each value. Within, neighbours' losses are
those of the Gaussian. A release that lies within T of its own centre, and beyond T of the neighbour's, has an infinite
loss, and the probability of that is what δ must cover.

**One pair.** Let a record move the centre of a pair by g ≤ T. By the triangle inequality, noise that leads beyond T of
the other centre has a radius between T − g and T. A Gaussian pair has a radius above r with probability e^(−r²/2), so
that this has the probability

    h(g) = e^(−(T − g)²/2) − e^(−T²/2) = 2⁻⁷⁴·(e^(gT − g²/2) − 1).

(About 1/π of it is reached, as only a part of the directions leads beyond.)

**All pairs.** A record moves all pairs together by `shift` at most: Σg² ≤ shift². The union bound adds up h. For pairs
with g ≤ t, e^x − 1 ≤ x·e^x gives h(g) ≤ 2⁻⁷⁴·T·e^(tT)·g, and Σg ≤ √pairs·shift by Cauchy and Schwarz. For the others,
h(g) ≤ g²·max h(g)/g², which is attained at t or at the largest g there can be: h(g)/g² falls and then rises between
them. Steps add up, also where a server chose each of them by the releases before it.

With 2³⁰ pairs this is 2·10⁻¹⁷ for each step and unit of shift, so that noise for ε = 1 at δ = 10⁻¹² is not decided by
it for up to 10¹⁰ steps. A radius of 63 bits would cost 1,900 times as much, and decided it from 10⁵ steps on.
"""

from __future__ import annotations

import math

from fedspa.randomness.mask import DIMENSION_LIMIT

RADIUS_BITS = 74
TAIL = math.sqrt(2 * RADIUS_BITS * math.log(2))
_LAST = 2.0**-RADIUS_BITS
_SMALL = 0.02  # t: any would do
_PAIRS = DIMENSION_LIMIT // 2


def truncation_delta(shift: float) -> float:
    """An upper bound on the probability that one release lies where the neighbour's cannot; `shift` is in standard
    deviations."""
    if shift > TAIL - 1:
        return 1.0
    spread = TAIL * math.exp(_SMALL * TAIL) * math.sqrt(_PAIRS) * shift
    steepest = max(_chance(move) / move**2 for move in (_SMALL, max(shift, _SMALL)))
    return min(1.0, _LAST * (spread + steepest * shift**2) * (1 + 1e-9))


def _chance(move: float) -> float:
    return math.expm1(move * TAIL - move**2 / 2)
