"""cpSGD's update on the wire: whole numbers, without loss. Payload v1 with coding 3 (docs/wire.md).

A number Y lies in 0 … m + 2^b − 1, both public, and spreads like √m/2 around the middle. Its distance from the middle
is cut into low bits, as many as stay uniform, which travel plainly, and a high part, entropy-coded like coding `int`:
about ½·log2(m) + 1 bits in all instead of log2(m + 2^b). The body is the low bits (coordinate by coordinate, lowest
first, filled up with zeros to whole bytes), then the coded high parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedspa.errors import PayloadError
from fedspa.wire import coding as codings
from fedspa.wire.payload import Expected, Header, opened, sealed
from fedspa.wire.probabilities import best_scale

# Standard deviations up to this many high-part units: the table of coding `int` fits them closely.
_SPREAD_BITS = 6


@dataclass(frozen=True, slots=True, eq=False)
class IntegerUpdate:
    """What an agent of cpSGD releases in a round: one number for each (rotated) coordinate, and the rotation's seed."""

    round: int
    dimension: int
    seed: bytes
    values: NDArray[np.int64]


def encode_integers(update: IntegerUpdate, trials: int, levels: int) -> bytes:
    """An update as bytes; `trials` and `levels` are the plan's, and what does not fit them is refused."""
    _check_range(update.values, trials + levels - 1)
    shift, middle = low_bits(trials), (trials + levels - 1) // 2
    away = update.values - middle
    high = away >> shift
    scale = best_scale(high)
    header = Header("binomial", scale, update.round, update.dimension, len(away), update.seed, 0.0, 0.0)
    return sealed(header, _plain(away, shift) + codings.pack(high, scale))


def decode_integers(data: bytes, expect: Expected, trials: int, levels: int) -> IntegerUpdate:
    """The update in `data`, or a PayloadError that names what is wrong. Any bytes may be handed in."""
    shift, middle = low_bits(trials), (trials + levels - 1) // 2
    plain = -(-expect.active * shift // 8)

    def limits(_: str, count: int) -> tuple[int, int]:
        fewest, most = codings.body_limits("int", count)
        return fewest + plain, most + plain

    header, body = opened(data, expect, limits)
    if header.clip_value != 0 or header.parameter != 0:
        raise PayloadError("step", "coding binomial has no clip value and no parameter and writes 0")
    low = _read_plain(body[:plain], header.active, shift)
    numbers = (codings.unpack(body[plain:], header.scale, header.active) << shift) + low + middle
    _check_range(numbers, trials + levels - 1)
    return IntegerUpdate(header.round, header.dimension, header.seed, numbers)


def low_bits(trials: int) -> int:
    """How many low bits of a number are as good as uniform beside a noise of √trials/2."""
    return max(0, (math.isqrt(trials) // 2).bit_length() - _SPREAD_BITS)


def _check_range(numbers: NDArray[np.int64], most: int) -> None:
    if int(numbers.min()) < 0 or int(numbers.max()) > most:
        raise PayloadError("bound", f"a number is outside 0 … {most}, where the plan's levels and noise lie")


def _plain(away: NDArray[np.int64], shift: int) -> bytes:
    """The low `shift` bits of each number, lowest first: eight numbers fill `shift` bytes."""
    eights = np.zeros((-(-len(away) // 8), 8), dtype=np.uint32)
    eights.reshape(-1)[: len(away)] = away & ((1 << shift) - 1)
    packed = np.zeros((len(eights), shift), dtype=np.uint8)
    for column, byte, right, left in _overlaps(shift):
        packed[:, byte] |= (eights[:, column] >> right << left).astype(np.uint8)  # astype keeps the lowest 8 bits
    return packed.tobytes()[: -(-len(away) * shift // 8)]


def _read_plain(data: bytes, count: int, shift: int) -> NDArray[np.int64]:
    packed = np.zeros((-(-count // 8), shift), dtype=np.uint8)
    packed.reshape(-1)[: len(data)] = np.frombuffer(data, dtype=np.uint8)
    eights = np.zeros((len(packed), 8), dtype=np.int64)
    for column, byte, right, left in _overlaps(shift):
        eights[:, column] |= packed[:, byte].astype(np.int64) >> left << right
    eights &= (1 << shift) - 1
    low = eights.reshape(-1)
    if low[count:].any():
        raise PayloadError("body", "the low bits are filled up with something else than zeros")
    return low[:count]


def _overlaps(shift: int) -> Iterator[tuple[int, int, int, int]]:
    """Where eight numbers of `shift` bits and `shift` bytes share bits: which number, which byte, and how far the
    number goes right and left to lie over the byte."""
    for column in range(8):
        first, last = column * shift, (column + 1) * shift - 1
        for byte in range(first // 8, last // 8 + 1):
            yield column, byte, max(0, 8 * byte - first), max(0, first - 8 * byte)
