"""Bodies of a payload: how k values become bytes and come back.

`f32`   the values, little-endian.
`f16`   values over a power of two (the header's parameter), little-endian half precision, rounded to nearest.
`int`   whole numbers at a step, entropy-coded. Subtractive dither: with u uniform on [−½, ½), known to both sides from
        the public seed, the agent sends n = round(x/step − u) and the server takes step·(n + u). The error is uniform
        on ±step/2 and independent of x (Schuchman 1964), so it is unbiased with variance step²/12, always; stochastic
        rounding is unbiased too, with up to step²/4. Integers outside the table follow as 32 plain bits.

A body is decoded in time and memory that depend on k only, whatever it holds. Any values can be encoded: those beyond
a coding's reach become the largest that it has, ±∞ too, and NaN becomes 0.
"""

from __future__ import annotations

import math

import constriction
import numpy as np
from numpy.typing import NDArray

from fedspa.errors import PayloadError
from fedspa.randomness.philox import dither_domain, words
from fedspa.wire.probabilities import SCALES, best_scale, entropy_model, radius

Values = NDArray[np.float32]
INTEGER_LIMIT = 2**31
FLOAT32_MAX = float(np.finfo(np.float32).max)
# Above it, what a half-precision neighbour stands for may be infinite.
F16_MAX = 2.0**127


def body_limits(coding: str, active: int) -> tuple[int, int]:
    """Fewest and most bytes that k values can take in a coding."""
    if coding == "int":
        # At most 22.5 bits for an entry of the table, 32 more for an escape, and what the coder holds back.
        return 0, 7 * active + 8
    size = {"f32": 4, "f16": 2}[coding] * active
    return size, size


def encode_f32(values: Values) -> bytes:
    """The values as they are."""
    return _within(values, FLOAT32_MAX).astype("<f4", copy=False).tobytes()


def decode_f32(body: bytes) -> Values:
    """Inverse of `encode_f32`."""
    return np.frombuffer(body, dtype="<f4").astype(np.float32)


def encode_f16(values: Values) -> tuple[float, bytes]:
    """A power of two no smaller than the largest value, and the values over it."""
    values = _within(values, F16_MAX)
    largest = float(np.max(np.abs(values)))
    scale = 2.0 ** max(math.ceil(math.log2(largest)), -126) if largest > 0 else 1.0
    return scale, (values.astype(np.float64) / scale).astype("<f2").tobytes()


def decode_f16(body: bytes, scale: float) -> Values:
    """Inverse of `encode_f16` up to its rounding."""
    with np.errstate(over="ignore", invalid="ignore"):
        return (np.frombuffer(body, dtype="<f2").astype(np.float64) * scale).astype(np.float32)


def _within(values: Values, most: float) -> Values:
    """Each value, or the nearest one within ±most."""
    return np.clip(np.nan_to_num(values, nan=0.0), -most, most)


def dither(seed: bytes, round_: int, count: int) -> NDArray[np.float64]:
    """u for `count` values: the middles of 2^32 equal cells of [−½, ½), so its mean is exactly 0."""
    stream = words(seed, dither_domain(round_), 0, -(-count // 4))[:count]
    u = stream.astype(np.float64)
    u += 0.5
    u *= 2.0**-32
    u -= 0.5
    return u


def encode_int(values: Values, step: float, seed: bytes, round_: int) -> tuple[int, bytes]:
    """The scale of the table that fits best, and the coded integers."""
    scaled = _within(values, FLOAT32_MAX).astype(np.float64)
    scaled /= step
    scaled -= dither(seed, round_, len(values))
    np.rint(scaled, out=scaled)
    # What the server makes of it, step·(n + u), must be a float32, too.
    most = min(INTEGER_LIMIT - 1, math.floor(FLOAT32_MAX / step - 0.5))
    np.clip(scaled, -most, most, out=scaled)
    integers = scaled.astype(np.int64)
    scale = best_scale(integers)
    return scale, pack(integers, scale)


def decode_int(body: bytes, step: float, scale: int, seed: bytes, round_: int, active: int) -> Values:
    """Inverse of `encode_int` up to its rounding."""
    values = dither(seed, round_, active)
    values += unpack(body, scale, active)
    values *= step
    with np.errstate(over="ignore"):
        return values.astype(np.float32)


def pack(integers: NDArray[np.int64], scale: int) -> bytes:
    """Symbols on top of the coder's stack, the escaped integers as pairs of 16-bit halves below them."""
    limit = radius(scale)
    outside = np.abs(integers) > limit
    symbols = np.where(outside, 2 * limit + 1, integers + limit).astype(np.int32)
    coder = constriction.stream.stack.AnsCoder()
    if outside.any():
        escaped = integers[outside] + INTEGER_LIMIT
        halves = np.stack((escaped >> 16, escaped & 0xFFFF), axis=1).reshape(-1)
        coder.encode_reverse(halves.astype(np.int32), constriction.stream.model.Uniform(1 << 16))
    coder.encode_reverse(symbols, entropy_model(scale))
    compressed: bytes = coder.get_compressed().astype("<u4").tobytes()
    return compressed.rstrip(b"\0")


def unpack(body: bytes, scale: int, active: int) -> NDArray[np.int64]:
    """Inverse of `pack`. A body that `pack` would not have written is refused: one update, one spelling."""
    if scale >= SCALES:
        raise PayloadError("scale", f"table scale is {scale}; it must lie below {SCALES}")
    if body.endswith(b"\0"):
        raise PayloadError("body", "the body ends in a zero byte; the coder never writes one")
    compressed = np.frombuffer(body + bytes(-len(body) % 4), dtype="<u4").astype(np.uint32)
    coder = constriction.stream.stack.AnsCoder(compressed)
    limit = radius(scale)
    integers: NDArray[np.int64] = coder.decode(entropy_model(scale), active).astype(np.int64)
    integers -= limit
    outside = np.flatnonzero(integers == limit + 1)
    if len(outside):
        halves = coder.decode(constriction.stream.model.Uniform(1 << 16), 2 * len(outside)).astype(np.int64)
        escaped = (halves[0::2] << 16 | halves[1::2]) - INTEGER_LIMIT
        if np.any(np.abs(escaped) <= limit):
            raise PayloadError("body", "an integer that has an entry in the table was sent as an escape")
        integers[outside] = escaped
    if not coder.is_empty():
        raise PayloadError("body", f"the body holds more than {active} values")
    return integers
