"""The mask ω from a public 16-byte seed: k of d coordinates, so that no index ever travels.

Specification. Take the seed's Philox stream in domain 0. Each word, masked to the b = bit_length(d − 1)
lowest bits, is a draw; a draw of d or more is rejected. The mask is the set of the first k distinct draws; where
k > d/2 it is the complement of the first d − k distinct draws. Given uniform words every k-set is equally likely: the
accepted draws are uniform on [0, d), and relabelling the coordinates does not change their law.

Time is O(d), and memory d bytes, a quarter of θ. The set does not depend on how many words are drawn at once.

A mask by layers takes k_j of the d_j coordinates of layer j: the mask of (d_j, k_j) under that layer's own seed, which
is block j of the seed's stream in domain 2, moved to where the layer begins.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fedspa import compiled

# Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), compiled or on numpy.
#
# A counter-based generator: block i of the stream depends on the key and on i only, so any part of a stream can be had
# in any order, on any device, with the same bits. It is not a cipher, and nothing here is secret: the streams are keyed
# by an update's public seed and serve its mask and its dither. Noise never comes from here.
#
# The stream of a 16-byte seed in a domain: key = seed[0:8] as two little-endian 32-bit words; the counter of block i is
# (i, domain, seed[8:12], seed[12:16]); a block gives four 32-bit words, used in order.

SEED_BYTES = 16
MASK_DOMAIN = 0
LAYER_DOMAIN = 2
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
WORD = 0xFFFFFFFF
# Blocks worked on at once: the four lanes and their products stay in a core's cache.
CHUNK = 8192


def dither_domain(round_: int) -> int:
    """Return the domain of an update's dither: never the mask's, and another in each round even where a mask is
    kept."""
    if not 0 <= round_ < 2**31:
        raise ValueError(f"round is {round_}; it must lie between 0 and 2^31 − 1")
    return 0x80000000 | round_


def philox4x32(counter: NDArray[np.uint64], key: tuple[int, int]) -> NDArray[np.uint64]:
    """Ten rounds over the columns of `counter` (4 × n, each entry below 2^32); the result has the same shape."""
    low = np.uint64(WORD)
    half = np.uint64(32)
    m0, m1 = (np.uint64(m) for m in MULTIPLIERS)
    c0, c1, c2, c3 = (lane.copy() for lane in counter)
    p0, p1 = np.empty_like(c0), np.empty_like(c0)
    k0, k1 = key
    for _ in range(ROUNDS):
        np.multiply(c0, m0, out=p0)
        np.multiply(c2, m1, out=p1)
        np.right_shift(p1, half, out=c0)
        c0 ^= c1
        c0 ^= np.uint64(k0)
        np.bitwise_and(p1, low, out=c1)
        np.right_shift(p0, half, out=c2)
        c2 ^= c3
        c2 ^= np.uint64(k1)
        np.bitwise_and(p0, low, out=c3)
        k0, k1 = (k0 + WEYL[0]) & WORD, (k1 + WEYL[1]) & WORD
    return np.stack((c0, c1, c2, c3))


def words(seed: bytes, domain: int, first_block: int, blocks: int) -> NDArray[np.uint32]:
    """Return the 4·`blocks` words of a seed's stream that start at block `first_block`, not to be written to."""
    return (_short_stream if blocks <= CHUNK else _stream)(seed, domain, first_block, blocks)


def _stream(seed: bytes, domain: int, first_block: int, blocks: int) -> NDArray[np.uint32]:
    out = compiled_words(seed, domain, first_block, blocks)
    if out is None:
        out = numpy_words(seed, domain, first_block, blocks)
    out.flags.writeable = False
    return out


def stream_words(seed: bytes, domain: int) -> NDArray[np.uint32]:
    """Return what names a stream in the compiled library: two words of key, the domain, two words of counter."""
    k0, k1, s2, s3 = split_seed(seed)
    return np.array([k0, k1, domain, s2, s3], dtype=np.uint32)


def compiled_words(seed: bytes, domain: int, first_block: int, blocks: int) -> NDArray[np.uint32] | None:
    """Return the words by the compiled library; None where there is none."""
    library = compiled.library()
    if library is None:
        return None
    stream, out = stream_words(seed, domain), np.empty(4 * blocks, dtype=np.uint32)
    library.fedspa_words(compiled.address(stream), first_block, len(out), compiled.address(out))
    return out


def numpy_words(seed: bytes, domain: int, first_block: int, blocks: int) -> NDArray[np.uint32]:
    """Return the words by numpy: the same bits, ten times as slowly."""
    k0, k1, s2, s3 = split_seed(seed)
    out = np.empty((blocks, 4), dtype=np.uint32)
    for start in range(0, blocks, CHUNK):
        stop = min(start + CHUNK, blocks)
        counter = np.empty((4, stop - start), dtype=np.uint64)
        counter[0] = np.arange(first_block + start, first_block + stop, dtype=np.uint64)
        counter[1], counter[2], counter[3] = domain, s2, s3
        out[start:stop] = philox4x32(counter, (k0, k1)).T
    return out.reshape(-1)


# In a simulation agents and server read the same dither, and a short stream costs numpy's hundred calls each time.
_short_stream = lru_cache(maxsize=32)(_stream)


def split_seed(seed: bytes) -> tuple[int, int, int, int]:
    """Return the seed as four little-endian words: two of key, two of counter."""
    if len(seed) != SEED_BYTES:
        raise ValueError(f"a seed has {len(seed)} bytes; it must have {SEED_BYTES}")
    k0, k1, s2, s3 = struct.unpack("<4I", seed)
    return k0, k1, s2, s3


MaskMode = Literal["per-agent", "shared", "fixed"]
DIMENSION_LIMIT = 2**31


def active_coordinates(seed: bytes, dimension: int, active: int) -> NDArray[np.int64]:
    """Return the `active` coordinates of [0, dimension) that `seed` picks, ascending."""
    _check(dimension, active)
    found = compiled_coordinates(seed, dimension, active)
    return numpy_coordinates(seed, dimension, active) if found is None else found


def compiled_coordinates(seed: bytes, dimension: int, active: int) -> NDArray[np.int64] | None:
    """Return the mask by the compiled library, which takes one bit per coordinate; None where there is none."""
    library = compiled.library()
    if library is None:
        return None
    stream, out = stream_words(seed, MASK_DOMAIN), np.empty(active, dtype=np.int64)
    if library.fedspa_mask(compiled.address(stream), dimension, active, compiled.address(out)):
        raise MemoryError(f"no memory for a mask of {active:,} of {dimension:,} coordinates")
    return out


def numpy_coordinates(seed: bytes, dimension: int, active: int) -> NDArray[np.int64]:
    """Return the mask by numpy: the same set, some seven times as slowly."""
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
    """Return the accepted draws of a stretch of the stream, in order."""
    low_bits = np.uint32((1 << (dimension - 1).bit_length()) - 1)
    draws = words(seed, MASK_DOMAIN, first_block, blocks) & low_bits
    accepted: NDArray[np.uint32] = draws[draws < dimension]
    return accepted


def _first_distinct(seed: bytes, dimension: int, count: int) -> NDArray[np.int64]:
    """Return the set of the first `count` distinct draws, ascending; count ≤ d/2.

    One byte marks each coordinate. A turn takes as many draws as coordinates are missing, so that it cannot overshoot.
    """
    blocks = _blocks(dimension, count) if count else 0
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


def scale(mode: MaskMode, dimension: int, active: int) -> float:
    """Return what the rand_k sparsifier S (Definition 2, Lemma 4 of the paper) multiplies the kept coordinates by.

    `per-agent` masks average to the identity over agents and rounds, so d/k makes S unbiased. `shared` (one mask per
    round) and `fixed` (one for the run) do block-coordinate descent: all agents move the same coordinates, and each of
    those moves as far as it would without a mask.
    """
    return dimension / active if mode == "per-agent" else 1.0
