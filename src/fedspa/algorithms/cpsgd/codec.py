"""cpSGD's update on the wire: whole numbers, without loss. Payload v1 with coding 3 (docs/wire.md).

A number Y lies in 0 … m + 2^b − 1, both public, and spreads like √m/2 around the middle. Its distance from the middle
is cut into low bits, as many as stay uniform, which travel plainly, and a high part, entropy-coded like coding `int`:
about ½·log2(m) + 1 bits in all instead of log2(m + 2^b). The body is the low bits (coordinate by coordinate, lowest
first, filled up with zeros to whole bytes), then the coded high parts.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from fedspa.algorithms.base import IntegerUpdate
from fedspa.errors import PayloadError
from fedspa.secagg.message import packed, unpacked
from fedspa.secagg.pads import word_type
from fedspa.wire import coding as codings
from fedspa.wire.payload import Expected, Header, opened, sealed
from fedspa.wire.probabilities import best_scale

# Standard deviations up to this many high-part units: the table of coding `int` fits them closely.
_SPREAD_BITS = 6


def encode_integers(update: IntegerUpdate, trials: int, levels: int) -> bytes:
    """Return an update as bytes; `trials` and `levels` are the plan's, and what does not fit them is refused."""
    _check_range(update.values, trials + levels - 1)
    shift, middle = low_bits(trials), (trials + levels - 1) // 2
    away = update.values - middle
    high = away >> shift
    scale = best_scale(high)
    header = Header("whole", scale, update.round, update.dimension, len(away), update.seed, 0.0, 0.0)
    low = (away & ((1 << shift) - 1)).astype(word_type(shift))
    return sealed(header, packed(low, shift) + codings.pack(high, scale))


def decode_integers(data: bytes, expect: Expected, trials: int, levels: int) -> IntegerUpdate:
    """Return the update in `data`, or raise a PayloadError that names what is wrong. Any bytes may be handed in."""
    shift, middle = low_bits(trials), (trials + levels - 1) // 2
    plain = -(-expect.active * shift // 8)

    def limits(_: str, count: int) -> tuple[int, int]:
        fewest, most = codings.body_limits("int", count)
        return fewest + plain, most + plain

    header, body = opened(data, expect, limits)
    if header.clip_value != 0 or header.parameter != 0:
        raise PayloadError("step", "whole numbers have no clip value and no parameter and write 0")
    low = unpacked(body[:plain], header.active, shift)
    if packed(low, shift) != body[:plain]:
        raise PayloadError("body", "the low bits are filled up with something else than zeros")
    numbers = (codings.unpack(body[plain:], header.scale, header.active) << shift) + low.astype(np.int64) + middle
    _check_range(numbers, trials + levels - 1)
    return IntegerUpdate(header.round, header.dimension, header.seed, numbers)


def low_bits(trials: int) -> int:
    """Return how many low bits of a number are as good as uniform beside a noise of √trials/2."""
    return max(0, (math.isqrt(trials) // 2).bit_length() - _SPREAD_BITS)


def _check_range(numbers: NDArray[np.int64], most: int) -> None:
    if int(numbers.min()) < 0 or int(numbers.max()) > most:
        raise PayloadError("bound", f"a number is outside 0 … {most}, where the plan's levels and noise lie")
