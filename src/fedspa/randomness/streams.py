"""Keys and the cryptographic streams that noise and sampling draw from.

An agent's private randomness of one round is one 32-byte key; its sampling and noise streams are derived from that key
by label, so results depend on nothing but the key: not on threads, processes or the order of agents. Nothing here is
global. In a deployment the key comes from the operating system and never leaves the agent. Mask seeds are public: they
come from their own derivation (`mask_seed`), from which no private key can be computed.

Why AES-256 in counter mode: an observer of released noise must not be able to predict the rest, which rules out the
statistical generators (Philox, PCG, Mersenne Twister); CPUs have AES in hardware, so the bits cost about 1 ns per
8 bytes, a small part of the cost of turning them into a Gaussian; and a counter can be sought.
"""

from __future__ import annotations

import hashlib
import math
import os
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from fedspa.errors import ConfigError, PrivacyError
from fedspa.privacy.event import NoiseMode as NoiseMode
from fedspa.privacy.event import Sampling

KEY_BYTES = 32
# Blocks of this many values stay in the cache nearest to the core, and below the size at which torch starts threads.
_BLOCK = 8192
_ZEROS = bytes(8 * _BLOCK)


def derive_key(root: bytes, *labels: str | int) -> bytes:
    """Return the 32-byte key that `root` (32 bytes) gives under these labels: keyed BLAKE2b, different labels,
    unrelated keys.

    Every label is written with its type and length, so ("ab", "c"), ("a", "bc") and ("1",), (1,) differ.
    """
    return _hash(root, b"fedspa-key-v1", labels, KEY_BYTES)


def mask_seed(root: bytes, round_number: int, agent: int) -> bytes:
    """Return the public 16-byte seed of an agent's mask in a round. Its domain is apart from that of every private
    key."""
    return _hash(root, b"fedspa-mask-v1", (round_number, agent), 16)


def root_key(mode: NoiseMode, seed: int) -> bytes:
    """Return the key a run's private randomness starts from.

    `secure` and `exact`: the operating system's entropy, another key each time; `seed` has no part in it. `seeded`: the
    seed alone decides, so anyone who knows it can subtract the noise. That is for tests and simulations only.
    """
    if mode == "seeded":
        return derive_key(bytes(KEY_BYTES), "seeded", seed)
    if mode in ("secure", "exact"):
        return os.urandom(KEY_BYTES)
    raise ConfigError(f"privacy.noise is {mode!r}; allowed: secure, exact, seeded")


def agent_key(root: bytes, round_number: int, agent: int) -> bytes:
    """Return the key of one agent in one round; derive its streams with `derive_key(key, "noise", step)`."""
    return derive_key(root, "round", round_number, "agent", agent)


class Stream:
    """Random numbers from one key: AES-256-CTR over zeros, read as 64-bit words from `position` on.

    The same key, position and sequence of calls give the same numbers on one machine; the last bit of a Gaussian may
    differ between CPU types, as their vectorised logarithms do. Not safe to share between threads. One key serves one
    purpose: two streams over one key repeat each other.
    """

    __slots__ = ("_encryptor", "_key", "_position")

    def __init__(self, key: bytes, position: int = 0) -> None:
        if len(key) != KEY_BYTES:
            raise PrivacyError(
                f"a stream's key has {len(key)} bytes; it must have {KEY_BYTES}: take it from derive_key"
            )
        self._key = key
        self.seek(position)

    @property
    def position(self) -> int:
        """The number of 64-bit words consumed so far."""
        return self._position

    def seek(self, position: int) -> None:
        """Go to word number `position`; the next draw starts there."""
        counter = (position // 2).to_bytes(16, "big")
        self._encryptor = Cipher(algorithms.AES(self._key), modes.CTR(counter)).encryptor()
        self._encryptor.update(_ZEROS[: 8 * (position % 2)])
        self._position = position

    def uint64(self, n: int) -> NDArray[np.uint64]:
        """n uniform 64-bit words."""
        # Two spare words: some versions of `update_into` ask for space for a block more than they write.
        words = np.empty(n + 2, dtype=np.uint64)
        buffer = words.data.cast("B")
        for start in range(0, 8 * n, len(_ZEROS)):
            self._encryptor.update_into(_ZEROS[: 8 * n - start], buffer[start:])
        self._position += n
        return words[:n]

    def uniform(self, n: int) -> NDArray[np.float64]:
        """n values in [0, 1), multiples of 2⁻⁵³."""
        words = self.uint64(n)
        words >>= np.uint64(11)
        # Viewed as signed: that conversion to float64 is several times faster, and the top bit is 0.
        values = words.view(np.int64).astype(np.float64)
        values *= 2.0**-53
        return values

    def gaussian(self, n: int) -> NDArray[np.float64]:
        """n standard normals in float64, out to 10.1σ, by Box–Muller with both values of each pair used.

        A radius has 74 random bits: the upper 63 of its own word and the lowest 11 of the angle's, of which an angle in
        float64 keeps 53. Float64 rounds a radius relative to its size, so the far tail keeps its resolution. Always
        2·⌈n/2⌉ words of the stream, no rejection: the time taken says nothing about the values.
        """
        # torch's float64 sine and cosine are vectorised; numpy's are not, and make the whole twice as slow.
        import torch

        values = np.empty(n + n % 2)
        for start in range(0, n, _BLOCK):
            out = values[start : start + _BLOCK]
            half = len(out) // 2
            words = self.uint64(len(out))
            radius = (words[:half] >> np.uint64(1)).view(np.int64) * 2.0**-63
            finer = (words[half:] & np.uint64(2047)).view(np.int64) + 0.5  # centre of the cell: never 0
            finer *= 2.0**-74
            radius += finer
            np.log(radius, out=radius)
            radius *= -2.0
            np.sqrt(radius, out=radius)
            angle = torch.from_numpy(words[half:].view(np.int64) * (math.pi * 2.0**-63))
            np.multiply(radius, angle.cos().numpy(), out=out[:half])
            np.multiply(radius, angle.sin().numpy(), out=out[half:])
        return values[:n]

    def integers_below(self, n: int, bound: int) -> NDArray[np.int64]:
        """n integers, exactly uniform on 0 … bound − 1 (the words that would tip the scale are rejected)."""
        if not 1 <= bound <= 2**63:
            raise PrivacyError(f"bound is {bound}; it must lie between 1 and 2^63")
        largest = np.uint64(2**64 - 2**64 % bound - 1)
        words = self.uint64(n)
        while (over := np.flatnonzero(words > largest)).size:
            words[over] = self.uint64(over.size)
        return (words % np.uint64(bound)).view(np.int64)

    def choice_without_replacement(self, population: int, size: int) -> NDArray[np.int64]:
        """Return a uniform subset of 0 … population − 1 of this size, sorted: the first `size` distinct of uniform
        draws."""
        if not 0 <= size <= population:
            raise PrivacyError(f"{size} of {population} cannot be drawn without replacement; lower the batch")
        if 2 * size > population:
            left_out = self.choice_without_replacement(population, population - size)
            return np.delete(np.arange(population), left_out)
        drawn = np.empty(0, dtype=np.int64)
        while drawn.size < size:
            drawn = np.concatenate([drawn, self.integers_below(size + 8, population)])
            drawn = drawn[np.sort(np.unique(drawn, return_index=True)[1])]
        return np.sort(drawn[:size])


def _hash(root: bytes, domain: bytes, labels: tuple[str | int, ...], size: int) -> bytes:
    if len(root) != KEY_BYTES:
        raise PrivacyError(f"a root key has {len(root)} bytes; it must have {KEY_BYTES}: take it from root_key")
    state = hashlib.blake2b(key=root, person=domain, digest_size=size)
    for label in labels:
        kind, text = (b"s", label) if isinstance(label, str) else (b"i", str(int(label)))
        encoded = text.encode()
        state.update(kind + len(encoded).to_bytes(8, "big") + encoded)
    return state.digest()


# Samplers: mini-batches as the accountants assume them, and exact draws from a law on whole numbers.
#
# Batches are Poisson samples, or of a fixed size, uniform and without replacement; each step draws its own. Shuffled
# epochs are neither: no accountant here computes their privacy, so there is no such sampler. The draws come from the
# agent's private stream, because amplification by sampling holds only against someone who cannot tell which records
# were drawn.
#
# A law on whole numbers is drawn from by inverting its distribution function. 64 random bits are looked up among its
# values, and 320 more decide where they meet one exactly. The values are computed in whole numbers of any length, each
# to 2⁻³⁸⁴. Digits decide far out: an adversary who sees noise that a record has moved by some deviations looks at what
# is left there of the other law. No floating point stands between the bits and the draw.

Indices = NDArray[np.int64]
# Of the weights that a law is given by, and of an end.
DIGITS = 448
BITS = 384
# Draws that are made together.
AT_ONCE = 1 << 16


def draw_batch(sampling: Sampling, batch: int, rate: float, records: int, stream: Stream) -> Indices:
    """One step's records, as sorted indices below `records`.

    `poisson`: each record with chance `rate`, independently: any size from 0 to `records` is normal.
    `fixed`: exactly `batch` records, every subset equally likely.
    """
    if sampling == "poisson":
        return np.flatnonzero(stream.uniform(records) < rate).astype(np.int64)
    return stream.choice_without_replacement(records, batch)


def upper_ends(weights: Sequence[int]) -> list[int]:
    """Return the upper ends of the values' shares of [0, 1), in units of 2^-BITS; the last one's is left out."""
    total, running, ends = sum(weights), 0, []
    for weight in weights[:-1]:
        running += weight
        ends.append((running << BITS) // total)
    return ends


def heads(ends: Sequence[int], bits: int = BITS) -> NDArray[np.uint64]:
    """Return the first 64 bits of each end: all that a draw needs unless it meets one of them exactly."""
    return np.array([end >> (bits - 64) for end in ends], dtype=np.uint64)


def settle(ends: Sequence[int], word: np.uint64, stream: Stream, bits: int = BITS) -> int:
    """Return the place of a draw whose first word equals a head, by more words of the stream."""
    more = b"".join(int(each).to_bytes(8, "big") for each in (word, *stream.uint64(bits // 64 - 1)))
    return bisect_right(ends, int.from_bytes(more, "big"))
