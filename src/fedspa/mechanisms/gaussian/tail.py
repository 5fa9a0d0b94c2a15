"""What ends where the noise does: no sampler draws a Gaussian of any size, and a price that assumes so is too low.

A pair of values of `secure` noise has a radius of 63 random bits, and none is drawn beyond T = √(2·63·ln 2) = 9.35
standard deviations; `exact` noise goes on to 14 for each value. Within, neighbours' losses are those of the Gaussian. A
release that lies within T of where it was centred, and beyond T of where the neighbour's would be, tells the two apart
for sure. Where a record moves a pair by g ≤ T, the radius of such noise lies between T − g and T, which has the chance

    h(g) = e^(−(T − g)²/2) − e^(−T²/2) = 2⁻⁶³·(e^(gT − g²/2) − 1).

A record moves all pairs together by `shift` at most, Σg² ≤ shift². Pairs with g ≤ t add up to no more than
2⁻⁶³·T·e^(tT)·Σg, and Σg ≤ √pairs·shift; for the others h(g)/g² is greatest at t or at the largest g there can be,
as it falls and then rises on the way.
"""

from __future__ import annotations

import math

from fedspa.randomness.mask import DIMENSION_LIMIT

TAIL = math.sqrt(2 * 63 * math.log(2))
_LAST = 2.0**-63
_SMALL = 0.02  # t: any would do
_PAIRS = DIMENSION_LIMIT // 2


def told_apart(shift: float) -> float:
    """The chance, from above, that one release lies where the neighbour's cannot; `shift` in standard deviations."""
    if shift > TAIL - 1:
        return 1.0
    spread = TAIL * math.exp(_SMALL * TAIL) * math.sqrt(_PAIRS) * shift
    steepest = max(_chance(move) / move**2 for move in (_SMALL, max(shift, _SMALL)))
    return min(1.0, _LAST * (spread + steepest * shift**2) * (1 + 1e-9))


def _chance(move: float) -> float:
    return math.expm1(move * TAIL - move**2 / 2)
