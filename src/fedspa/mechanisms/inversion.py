"""Exact draws from a law on whole numbers, by inverting its distribution function.

64 random bits are looked up among its values, and 320 more decide where they meet one exactly. The values are made in
whole numbers of any length, each to 2⁻³⁸⁴. Digits decide far out: an adversary who sees noise that a record has moved
by some deviations looks at what is left there of the other law. No floating point stands between the bits and the draw.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedspa.randomness.streams import Stream

# Of the weights that a law is given by; of an end, and the words after its first that they take.
DIGITS = 448
BITS = 384
_MORE = BITS // 64 - 1
# Draws that are made together.
AT_ONCE = 1 << 16


def upper_ends(weights: Sequence[int]) -> list[int]:
    """Return the upper ends of the values' shares of [0, 1), in units of 2^-BITS; the last one's is left out."""
    total, running, ends = sum(weights), 0, []
    for weight in weights[:-1]:
        running += weight
        ends.append((running << BITS) // total)
    return ends


def heads(ends: Sequence[int]) -> NDArray[np.uint64]:
    """Return the first 64 bits of each end: all that a draw needs unless it meets one of them exactly."""
    return np.array([end >> 64 * _MORE for end in ends], dtype=np.uint64)


def settle(ends: Sequence[int], word: np.uint64, stream: Stream) -> int:
    """Return the place of a draw whose first word equals a head, by more words of the stream."""
    more = b"".join(int(each).to_bytes(8, "big") for each in (word, *stream.uint64(_MORE)))
    return bisect_right(ends, int.from_bytes(more, "big"))
