"""Gaussians from ChaCha20 (RFC 8439), the stream that a GPU can make for itself: the twin of the kernel, in numpy.

AES runs in hardware on CPUs but needs tables or bit slicing on a GPU; ChaCha20 is additions, rotations and xors of
32-bit words, and as unpredictable. The block counter is word 12 and the local step word 13, so any value can be made
without those before it.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

# A lane turns one 64-byte block into 8 values; LANES neighbouring lanes write 8 runs of LANES values.
LANES = 64
GROUP = 8 * LANES

Words = NDArray[np.uint32]


def block_words(key: bytes, counter: Words, nonce: tuple[int, int, int]) -> Words:
    """The key stream's blocks at these counters, [16, len(counter)] words."""
    start = np.empty((16, len(counter)), dtype=np.uint32)
    start[:4] = np.frombuffer(b"expand 32-byte k", dtype="<u4")[:, None]
    start[4:12] = np.frombuffer(key, dtype="<u4")[:, None]
    start[12] = counter
    start[13:] = np.array(nonce, dtype=np.uint32)[:, None]
    x = start.copy()
    for _ in range(10):
        for a, b, c, d in _QUARTERS:
            x[a] += x[b]
            x[d] = _rotate(x[d] ^ x[a], 16)
            x[c] += x[d]
            x[b] = _rotate(x[b] ^ x[c], 12)
            x[a] += x[b]
            x[d] = _rotate(x[d] ^ x[a], 8)
            x[c] += x[d]
            x[b] = _rotate(x[b] ^ x[c], 7)
    x += start
    return x


_QUARTERS = (
    *((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15)),
    *((0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14)),
)


def _rotate(x: Words, bits: int) -> Words:
    return (x << np.uint32(bits)) | (x >> np.uint32(32 - bits))


class ChaChaNoise:
    """What `noisy_mean` draws from, with the numbers that the GPU's kernel makes under the same key."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self.start_step(0)

    def start_step(self, step: int) -> None:
        self._step, self._draw = step, 0

    def gaussian(self, n: int) -> NDArray[np.float64]:
        """n standard normals in float64, by Box–Muller as `Stream.gaussian`, with its bits."""
        groups = max(1, math.ceil(n / GROUP))
        words = block_words(self._key, np.arange(groups * LANES, dtype=np.uint32), (self._step, self._draw, 0))
        self._draw += 1
        wide = words[0::2].astype(np.uint64) | (words[1::2].astype(np.uint64) << np.uint64(32))  # [8, blocks]
        finer = ((wide[1::2] & np.uint64(2047)).view(np.int64) + 0.5) * 2.0**-74
        radius = np.sqrt(-2 * np.log((wide[0::2] >> np.uint64(1)).view(np.int64) * 2.0**-63 + finer))
        angle = wide[1::2].view(np.int64) * (math.pi * 2.0**-63)
        values = np.empty((8, groups * LANES))
        values[0::2], values[1::2] = radius * np.cos(angle), radius * np.sin(angle)
        return values.reshape(8, groups, LANES).transpose(1, 0, 2).reshape(-1)[:n]
