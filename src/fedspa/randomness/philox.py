"""Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), on numpy.

A counter-based generator: block i of the stream depends on the key and on i only, so any part of a stream can be had
in any order, on any device, with the same bits. It is not a cipher, and nothing here is secret: the streams are keyed
by an update's public seed and serve its mask, its dither and the signs of its rotation. Noise never comes from here.

The stream of a 16-byte seed in a domain: key = seed[0:8] as two little-endian 32-bit words; the counter of block i is
(i, domain, seed[8:12], seed[12:16]); a block gives four 32-bit words, used in order.
"""

from __future__ import annotations

import struct
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

SEED_BYTES = 16
MASK_DOMAIN = 0
ROTATION_DOMAIN = 1
LAYER_DOMAIN = 2
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
WORD = 0xFFFFFFFF
# Blocks worked on at once: the four lanes and their products stay in a core's cache.
CHUNK = 8192


def dither_domain(round_: int) -> int:
    """The domain of an update's dither: never the mask's, and another in each round even where a mask is kept."""
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
    """The 4·`blocks` words of a seed's stream that start at block `first_block`, not to be written to."""
    return (_short_stream if blocks <= CHUNK else _stream)(seed, domain, first_block, blocks)


def _stream(seed: bytes, domain: int, first_block: int, blocks: int) -> NDArray[np.uint32]:
    k0, k1, s2, s3 = split_seed(seed)
    out = np.empty((blocks, 4), dtype=np.uint32)
    for start in range(0, blocks, CHUNK):
        stop = min(start + CHUNK, blocks)
        counter = np.empty((4, stop - start), dtype=np.uint64)
        counter[0] = np.arange(first_block + start, first_block + stop, dtype=np.uint64)
        counter[1], counter[2], counter[3] = domain, s2, s3
        out[start:stop] = philox4x32(counter, (k0, k1)).T
    out.flags.writeable = False
    return out.reshape(-1)


# In a simulation agents and server read the same dither, and a short stream costs numpy's hundred calls each time.
_short_stream = lru_cache(maxsize=32)(_stream)


def split_seed(seed: bytes) -> tuple[int, int, int, int]:
    """The seed as four little-endian words: two of key, two of counter."""
    if len(seed) != SEED_BYTES:
        raise ValueError(f"a seed has {len(seed)} bytes; it must have {SEED_BYTES}")
    k0, k1, s2, s3 = struct.unpack("<4I", seed)
    return k0, k1, s2, s3
