"""The mask ω from a public 16-byte seed: k of d coordinates, so that no index ever travels.

Specification. Take the seed's Philox stream in domain 0 (`philox.py`). Each word, masked to the b = bit_length(d − 1)
lowest bits, is a draw; a draw of d or more is rejected. The mask is the set of the first k distinct draws; where
k > d/2 it is the complement of the first d − k distinct draws. Given uniform words every k-set is equally likely: the
accepted draws are uniform on [0, d), and relabelling the coordinates does not change their law.

Time and memory are O(k), up to a sort where k is far below d. The set does not depend on how many words are drawn at
once.

A mask by layers takes k_j of the d_j coordinates of layer j: the mask of (d_j, k_j) under that layer's own seed, which
is block j of the seed's stream in domain 2, moved to where the layer begins.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedspa.randomness.philox import LAYER_DOMAIN, MASK_DOMAIN, words

DIMENSION_LIMIT = 2**31
# Up to here one mark per coordinate takes no more memory than the sort's keys, and half the time.
MARKED_PER_ACTIVE = 32


def active_coordinates(seed: bytes, dimension: int, active: int) -> NDArray[np.int64]:
    """The `active` coordinates of [0, dimension) that `seed` picks, ascending."""
    _check(dimension, active)
    if active > dimension // 2:
        outside = _first_distinct(seed, dimension, dimension - active)
        kept = np.ones(dimension, dtype=np.bool_)
        kept[outside] = False
        return np.flatnonzero(kept)
    return _first_distinct(seed, dimension, active)


def layered_coordinates(seed: bytes, layers: Sequence[tuple[int, int]]) -> NDArray[np.int64]:
    """`active_coordinates` of each layer (d_j, k_j), one layer after another; k_j = 0 leaves a layer out."""
    found, start = [], 0
    for number, (dimension, active) in enumerate(layers):
        if active:
            own = words(seed, LAYER_DOMAIN, number, 1).astype("<u4").tobytes()
            found.append(start + active_coordinates(own, dimension, active))
        start += dimension
    return np.concatenate(found)


def _check(dimension: int, active: int) -> None:
    if not 1 <= dimension < DIMENSION_LIMIT:
        raise ValueError(f"d is {dimension}; it must lie between 1 and 2^31 − 1")
    if not 1 <= active <= dimension:
        raise ValueError(f"k is {active}; it must lie between 1 and d = {dimension}")


def _blocks(dimension: int, count: int) -> int:
    """Blocks that give `count` distinct draws nearly always (count ≤ d/2); too few only costs another turn."""
    draws = -dimension * math.log1p(-count / dimension)
    total = draws * (1 << (dimension - 1).bit_length()) / dimension
    return math.ceil((total + 4 * math.sqrt(total) + 4) / 4)


def _draws(seed: bytes, dimension: int, first_block: int, blocks: int) -> NDArray[np.uint32]:
    """The accepted draws of a stretch of the stream, in order."""
    low_bits = np.uint32((1 << (dimension - 1).bit_length()) - 1)
    draws = words(seed, MASK_DOMAIN, first_block, blocks) & low_bits
    accepted: NDArray[np.uint32] = draws[draws < dimension]
    return accepted


def _first_distinct(seed: bytes, dimension: int, count: int) -> NDArray[np.int64]:
    """The set of the first `count` distinct draws, ascending; count ≤ d/2."""
    if count == 0:
        return np.empty(0, dtype=np.int64)
    if dimension <= MARKED_PER_ACTIVE * count:
        return _by_marks(seed, dimension, count)
    return _by_sorting(seed, dimension, count)


def _by_marks(seed: bytes, dimension: int, count: int) -> NDArray[np.int64]:
    """One byte per coordinate. Each turn takes as many draws as coordinates are missing, which cannot overshoot."""
    blocks = _blocks(dimension, count)
    draws = _draws(seed, dimension, 0, blocks)
    drawn = np.zeros(dimension, dtype=np.bool_)
    missing = count
    while missing:
        if len(draws) == 0:
            draws = _draws(seed, dimension, blocks, 1)
            blocks += 1
        drawn[draws[:missing]] = True
        draws = draws[missing:]
        missing = count - int(np.count_nonzero(drawn))
    return np.flatnonzero(drawn)


def _by_sorting(seed: bytes, dimension: int, count: int) -> NDArray[np.int64]:
    """Nothing of length d. Sorting (value, arrival) puts each value's first arrival at the head of its group."""
    blocks = _blocks(dimension, count)
    draws = _draws(seed, dimension, 0, blocks)
    while True:
        keys = draws.astype(np.int64) << 32
        keys |= np.arange(len(draws), dtype=np.int64)
        keys.sort()
        values = keys >> 32
        first = np.empty(len(keys), dtype=np.bool_)
        first[:1] = True
        np.not_equal(values[1:], values[:-1], out=first[1:])
        values, arrivals = values[first], keys[first] & 0xFFFFFFFF
        if len(values) >= count:
            last = np.partition(arrivals, count - 1)[count - 1]
            chosen: NDArray[np.int64] = values[arrivals <= last]
            return chosen
        more = blocks // 8 + 1
        draws = np.concatenate((draws, _draws(seed, dimension, blocks, more)))
        blocks += more
