"""Draws of the discrete Gaussian on the whole numbers around a point of the grid: its law at n is in proportion to
exp(−(n − c)²/2σ²), σ = `SIGMA`, where c is any whole number of `FINE`ths.

A draw inverts the distribution function, as those of `binomial/noise.py` do: 64 random bits are looked up among its
values, 320 more decide where they meet one exactly. There is a table for each fraction that c can have, made in whole
numbers of any length, each value to 2⁻³⁸³. Far out, digits decide: whoever sees a share that a record has moved by
eight standard deviations looks at what the other law has beyond twenty. Out to there each whole number has its chance
but for a factor 1 ± 2⁻⁹⁰. No floating point stands between the bits and the draw.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from decimal import Decimal, localcontext
from functools import cache

import numpy as np
from numpy.typing import NDArray

from fedspa.mechanisms.discrete_gaussian.event import FINE, SIGMA
from fedspa.randomness.streams import Stream

_DIGITS = 448
# Of an end, and the words after its first that they take.
BITS = 384
_MORE = BITS // 64 - 1
# Values on either side of c. Those within 20 standard deviations are what a price looks at (`price`).
REACH = math.ceil(20.5 * SIGMA) + 1
_AT_ONCE = 1 << 16
_CELL_BITS = 10


def discrete_gaussian(centres: NDArray[np.int64], stream: Stream) -> NDArray[np.int64]:
    """One draw around each of the centres, which are whole numbers of steps of the grid."""
    heads, starts = _tables()
    values = np.empty(len(centres), dtype=np.int64)
    for start in range(0, len(centres), _AT_ONCE):
        part = centres[start : start + _AT_ONCE]
        words, fractions = stream.uint64(len(part)), part % FINE
        found = starts[fractions, (words >> np.uint64(64 - _CELL_BITS)).view(np.int64)].astype(np.int64)
        among = np.arange(len(part))
        while among.size:  # one end further, those whose word does not lie below it
            passed = words[among] >= heads[fractions[among], np.minimum(found[among], heads.shape[1] - 1)]
            among = among[passed & (found[among] < heads.shape[1])]
            found[among] += 1
        for i in np.flatnonzero(heads[fractions, np.maximum(found, 1) - 1] == words):
            found[i] = bisect_right(_ends(int(fractions[i])), _joined(words[i], *stream.uint64(_MORE)))
        values[start : start + len(part)] = part // FINE - REACH + found
    return values


def _joined(*words: np.uint64) -> int:
    """Words as one number, the first in front."""
    return int.from_bytes(b"".join(int(word).to_bytes(8, "big") for word in words), "big")


@cache
def _tables() -> tuple[NDArray[np.uint64], NDArray[np.uint8]]:
    """For each fraction, the first 64 bits of its ends, and how many of them are not above a word that starts a cell:
    words lie in cells of equal length."""
    heads = np.array([[end >> 64 * _MORE for end in _ends(fraction)] for fraction in range(FINE)], dtype=np.uint64)
    cells = np.arange(1 << _CELL_BITS, dtype=np.uint64) << np.uint64(64 - _CELL_BITS)
    return heads, np.array([np.searchsorted(row, cells, side="right") for row in heads], dtype=np.uint8)


def _ends(fraction: int) -> list[int]:
    """Upper ends, in units of 2^-BITS, of what share of [0, 1) each of −REACH … REACH + 1 has around c = fraction/FINE;
    the last one's is left out."""
    # (n − c)² = n² − 2nc + c², and the last is the same for all n.
    up, down = (_tilt(fraction, sign) for sign in (1, -1))
    weights = {0: 1 << _DIGITS}
    power = backward = 1 << _DIGITS
    for n, square in enumerate(_squares(), 1):
        power, backward = power * up >> _DIGITS, backward * down >> _DIGITS
        weights[n], weights[-n] = square * power >> _DIGITS, square * backward >> _DIGITS
    running, ends, total = 0, [], sum(weights[n] for n in range(-REACH, REACH + 2))
    for n in range(-REACH, REACH + 1):
        running += weights[n]
        ends.append((running << BITS) // total)
    return ends


def _tilt(fraction: int, sign: int) -> int:
    """exp(±c/σ²), from its powers of two: exponentials take long."""
    value = 1 << _DIGITS
    for bit in range(fraction.bit_length()):
        if fraction >> bit & 1:
            value = value * _exponential(sign << bit, FINE * SIGMA**2) >> _DIGITS
    return value


@cache
def _squares() -> list[int]:
    """exp(−n²/2σ²) for n = 1 … REACH + 1."""
    return [_exponential(-(n**2), 2 * SIGMA**2) for n in range(1, REACH + 2)]


@cache
def _exponential(numerator: int, denominator: int) -> int:
    """exp(numerator/denominator) in units of 2^-_DIGITS."""
    with localcontext(prec=160):
        return int((Decimal(numerator) / denominator).exp() * 2**_DIGITS)
