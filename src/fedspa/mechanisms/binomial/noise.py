"""Binomial(m, ½) noise: whole numbers from the secure stream, at a cost that does not grow with m.

A draw inverts the distribution function: 64 random bits are looked up among its values, 320 more decide where they meet
one exactly. The table is made once for an m, in whole numbers of any length; it holds the values out to `FAR` standard
deviations, each to 2⁻³⁸⁴. Out to there a number has its chance but for a factor 1 ± 2⁻⁷⁰, at any m here. Digits decide
far out: whoever sees noise that a record has moved by some deviations looks at what is left there of the other law.
What lies further the prices count as seen (`rounded`, `bound`). No floating point and no Gaussian stands between the
bits and the draw. A word's first bits alone mostly decide its place among the values; `_starts` knows it then, and the
others are searched for.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from fedspa.errors import PrivacyError
from fedspa.mechanisms.binomial.event import FAR, MOST_TRIALS
from fedspa.randomness.streams import Stream

_DIGITS = 448
_BITS = 384
_MORE = _BITS // 64 - 1
_AT_ONCE = 1 << 16
_MOST_CELL_BITS = 20


def binomial(n: int, trials: int, stream: Stream) -> NDArray[np.int64]:
    """n draws of Binomial(trials, ½)."""
    if not 1 <= trials <= MOST_TRIALS:
        raise PrivacyError(f"trials is {trials}; it must lie between 1 and {MOST_TRIALS}")
    first, ends, heads = _table(trials)
    starts, shift = _starts(trials)
    values = np.empty(n, dtype=np.int64)
    for start in range(0, n, _AT_ONCE):
        words = stream.uint64(min(_AT_ONCE, n - start))
        cells = (words >> shift).view(np.int64)
        found = starts[cells]
        among = np.flatnonzero(starts[cells + 1] != found)  # an end lies in the word's cell: only here can they meet
        found[among] = np.searchsorted(heads, words[among], side="right")
        tied = among[heads[np.maximum(found[among], 1) - 1] == words[among]]
        for i in tied:
            more = b"".join(int(word).to_bytes(8, "big") for word in (words[i], *stream.uint64(_MORE)))
            found[i] = bisect_right(ends, int.from_bytes(more, "big"))
        values[start : start + len(words)] = first + found
    return values


@lru_cache(maxsize=8)
def _starts(trials: int) -> tuple[NDArray[np.int64], np.uint64]:
    """The words in cells of equal length: how many ends lie below each cell, and the shift that gives a word's cell."""
    heads = _table(trials)[2]
    bits = min(len(heads).bit_length() + 5, _MOST_CELL_BITS)
    shift = np.uint64(64 - bits)
    below = np.searchsorted(heads, np.arange(1 << bits, dtype=np.uint64) << shift)
    return np.append(below, len(heads)), shift


@lru_cache(maxsize=8)
def _table(trials: int) -> tuple[int, list[int], NDArray[np.uint64]]:
    """The least value; the upper ends of all but the last value's share of [0, 1) in units of 2⁻³⁸⁴; their heads."""
    middle = trials // 2
    reach = math.isqrt(FAR**2 * trials // 4) + 2
    first, last = max(0, middle - reach), min(trials, middle + reach)
    upward, weight = [], 1 << _DIGITS
    for value in range(middle, last):
        weight = weight * (trials - value) // (value + 1)
        upward.append(weight)
    downward, weight = [], 1 << _DIGITS
    for value in range(middle, first, -1):
        weight = weight * value // (trials - value + 1)
        downward.append(weight)
    weights = [*reversed(downward), 1 << _DIGITS, *upward]
    total, running, ends = sum(weights), 0, []
    for weight in weights[:-1]:
        running += weight
        ends.append((running << _BITS) // total)
    return first, ends, np.array([end >> 64 * _MORE for end in ends], dtype=np.uint64)
