"""Bodies of a payload: how k values become bytes and come back.

`f32`   the values, little-endian.
`int`   whole numbers at a step, entropy-coded. Subtractive dither: with u uniform on [−½, ½), known to both sides from
        the public seed, the agent sends n = round(x/step − u) and the server takes step·(n + u). The error is uniform
        on ±step/2 and independent of x (Schuchman 1964), so it is unbiased with variance step²/12, always; stochastic
        rounding is unbiased too, with up to step²/4. Integers outside the table follow as 32 plain bits.

A body is decoded in time and memory that depend on k only, whatever it holds. Any values can be encoded: those beyond
a coding's reach become the largest that it has, ±∞ too, and NaN becomes 0.
"""

from __future__ import annotations

import decimal
import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import constriction
import numpy as np
from numpy.typing import NDArray

from fedspa import compiled
from fedspa.errors import PayloadError
from fedspa.randomness.mask import dither_domain, words

Values = NDArray[np.float32]
INTEGER_LIMIT = 2**31
FLOAT32_MAX = float(np.finfo(np.float32).max)
_PIECE = 2**14


def body_limits(coding: str, active: int) -> tuple[int, int]:
    """Return the fewest and most bytes that k values can take in a coding."""
    if coding == "int":
        # At most 22.5 bits for an entry of the table, 32 more for an escape, and what the coder holds back.
        return 0, 7 * active + 8
    return 4 * active, 4 * active


def encode_f32(values: Values) -> bytes:
    """Encode the values as they are."""
    return _within_float32(values).astype("<f4", copy=False).tobytes()


def decode_f32(body: bytes) -> Values:
    """Inverse of `encode_f32`."""
    return np.frombuffer(body, dtype="<f4").astype(np.float32)


def _within_float32(values: Values) -> Values:
    """Clamp each value to the finite float32 numbers; NaN becomes 0."""
    return np.clip(np.nan_to_num(values, nan=0.0), -FLOAT32_MAX, FLOAT32_MAX)


def dither(seed: bytes, round_: int, count: int, first: int = 0) -> NDArray[np.float64]:
    """Return u for `count` values from number `first` on, a multiple of 4: the middles of 2^32 equal cells of [−½, ½),
    so its mean is exactly 0."""
    stream = words(seed, dither_domain(round_), first // 4, -(-count // 4))[:count]
    u = stream.astype(np.float64)
    u += 0.5
    u *= 2.0**-32
    u -= 0.5
    return u


def _pieces(count: int) -> Iterator[slice]:
    """Yield slices of so many values that fit in a core's cache."""
    return (slice(start, min(start + _PIECE, count)) for start in range(0, count, _PIECE))


def encode_int(values: Values, step: float, seed: bytes, round_: int) -> tuple[int, bytes]:
    """Return the scale of the table that fits best, and the coded integers."""
    # What the server makes of it, step·(n + u), must be a float32, too.
    most = min(INTEGER_LIMIT - 1, math.floor(FLOAT32_MAX / step - 0.5))
    integers = np.empty(len(values), dtype=np.int64)
    for piece in _pieces(len(values)):
        scaled = _within_float32(values[piece]).astype(np.float64)
        scaled /= step
        scaled -= dither(seed, round_, len(scaled), piece.start)
        integers[piece] = np.clip(np.rint(scaled, out=scaled), -most, most, out=scaled)
    scale = best_scale(integers)
    return scale, pack(integers, scale)


def decode_int(body: bytes, step: float, scale: int, seed: bytes, round_: int, active: int) -> Values:
    """Inverse of `encode_int` up to its rounding."""
    integers, values = unpack(body, scale, active), np.empty(active, dtype=np.float32)
    for piece in _pieces(active):
        restored = dither(seed, round_, piece.stop - piece.start, piece.start)
        restored += integers[piece]
        restored *= step
        with np.errstate(over="ignore"):
            values[piece] = restored
    return values


def pack(integers: NDArray[np.int64], scale: int) -> bytes:
    """Pack symbols on top of the coder's stack, the escaped integers as pairs of 16-bit halves below them."""
    limit = radius(scale)
    symbols = (integers + limit).astype(np.int32)
    outside = np.abs(integers) > limit
    symbols[outside] = 2 * limit + 1
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
    integers, fault = (_unpack_by_constriction if compiled.library() is None else _unpack_by_library)(
        compressed, scale, active
    )
    if fault == _MORE:
        raise PayloadError("body", f"the body holds more than {active} values")
    if fault == _UNNEEDED_ESCAPE:
        raise PayloadError("body", "an integer that has an entry in the table was sent as an escape")
    return integers


_MORE, _UNNEEDED_ESCAPE = 1, 2


def _unpack_by_library(compressed: NDArray[np.uint32], scale: int, active: int) -> tuple[NDArray[np.int64], int]:
    integers, starts = np.empty(active, dtype=np.int64), _starts(scale)
    given, out = (compiled.address(each) for each in (compressed, integers))
    fault = compiled.library().fedspa_unpack(  # type: ignore[union-attr]
        given, len(compressed), compiled.address(starts), radius(scale), active, out
    )
    return integers, fault


def _unpack_by_constriction(compressed: NDArray[np.uint32], scale: int, active: int) -> tuple[NDArray[np.int64], int]:
    coder, limit = constriction.stream.stack.AnsCoder(compressed), radius(scale)
    symbols = coder.decode(entropy_model(scale), active)
    integers: NDArray[np.int64] = np.subtract(symbols, limit, dtype=np.int64)
    outside = np.flatnonzero(symbols == 2 * limit + 1)
    if len(outside):
        halves = coder.decode(constriction.stream.model.Uniform(1 << 16), 2 * len(outside)).astype(np.int64)
        escaped = (halves[0::2] << 16 | halves[1::2]) - INTEGER_LIMIT
        if np.any(np.abs(escaped) <= limit):
            return integers, _UNNEEDED_ESCAPE
        integers[outside] = escaped
    return integers, 0 if coder.num_words() == 0 else _MORE


# The probability table of coding `int`: a Gaussian on the integers with a little weight everywhere, in whole numbers.
#
# Encoder and decoder must hold the same table to the last unit, on any machine, so nothing here rests on a platform's
# floating point: the one transcendental number is taken from `decimal`, whose exp and sqrt are correctly rounded by
# specification, and all that follows is integer arithmetic.
#
# Scale i (0 … 79) stands for a standard deviation s = 2^(i/8 − 2) in units of the step. Symbols −A … A have their own
# entries, A = 2^(⌈i/8⌉ + 1) ≥ 8s; all other integers share the escape. Frequencies are out of 2^24:
#
#     q   = ⌊2^64 · exp(−1/(2s²))⌋                        q2 = ⌊q²/2^64⌋
#     w_0 = 2^64, g_0 = q; w_{j+1} = ⌊w_j·g_j/2^64⌋, g_{j+1} = ⌊g_j·q2/2^64⌋      (w_j ≈ 2^64·exp(−j²/(2s²)))
#     U   = ⌊2^14/(2A + 2)⌋,  F = 2^24 − (2A + 2)·U,  W = w_0 + 2·(w_1 + … + w_A)
#     f(n) = U + ⌊F·w_|n|/W⌋,  f(escape) = U;  what is left of 2^24 goes to f(0).
#
# The uniform part U is about a thousandth of the weight: it costs 0.0014 bits per value and keeps an outlier under 15
# bits at the usual scales.

SCALES = 80
PRECISION = 24
UNIFORM_BITS = 14


def radius(scale: int) -> int:
    """A: the largest |n| with an entry of its own."""
    return int(1 << (-(-scale // 8) + 1))


@lru_cache(maxsize=SCALES)
def frequencies(scale: int) -> tuple[int, ...]:
    """f(−A), …, f(A), f(escape): positive whole numbers that sum to 2^24."""
    if not 0 <= scale < SCALES:
        raise ValueError(f"scale is {scale}; it must lie between 0 and {SCALES - 1}")
    weights = _gaussian_weights(scale)
    symbols = 2 * radius(scale) + 2
    uniform = (1 << UNIFORM_BITS) // symbols
    free = (1 << PRECISION) - symbols * uniform
    total = weights[0] + 2 * sum(weights[1:])
    half = [uniform + free * weight // total for weight in weights]
    half[0] += (1 << PRECISION) - (half[0] + 2 * sum(half[1:]) + uniform)
    return (*reversed(half[1:]), *half, uniform)


def _gaussian_weights(scale: int) -> list[int]:
    """w_0, …, w_A."""
    with decimal.localcontext(decimal.Context(prec=60, rounding=decimal.ROUND_HALF_EVEN)):
        # 1/(2s²) = 2^(3 − i/4)
        exponent = decimal.Decimal(2).sqrt().sqrt() ** -(scale % 4) * decimal.Decimal(2) ** (3 - scale // 4)
        q = int((-exponent).exp() * (1 << 64))
    weight, factor, square = 1 << 64, q, q * q >> 64
    weights = [weight]
    for _ in range(radius(scale)):
        weight = weight * factor >> 64
        factor = factor * square >> 64
        weights.append(weight)
    return weights


@lru_cache(maxsize=SCALES)
def _starts(scale: int) -> NDArray[np.uint32]:
    """Return the first of 2^24 places of each symbol, and 2^24 behind the last."""
    return np.cumsum([0, *frequencies(scale)]).astype(np.uint32)


@lru_cache(maxsize=SCALES)
def entropy_model(scale: int) -> Any:
    """Return the table as constriction's model, with exactly these frequencies.

    constriction gives each symbol 1/2^24 and deals out the rest in proportion, cumulatively and rounding down. Handed
    f − 1, its factor of proportion is exactly 1 and every sum is a whole number: nothing is rounded.
    """
    table = np.array(frequencies(scale), dtype=np.float64) - 1.0
    return constriction.stream.model.Categorical(table, perfect=False)


@lru_cache(maxsize=SCALES)
def _costs(scale: int) -> NDArray[np.float64]:
    """Bits for |n| = 0, …, A, and for an escape with its 32 plain bits."""
    table = np.array(frequencies(scale)[radius(scale) :], dtype=np.float64)
    bits: NDArray[np.float64] = PRECISION - np.log2(table)
    bits[-1] += 32
    return bits


def best_scale(integers: NDArray[np.int64]) -> int:
    """Return the scale that codes `integers` (at least one) in the fewest bits: downhill from where their variance
    points."""
    limit = radius(SCALES - 1) + 1
    counts = np.bincount(np.minimum(np.abs(integers), limit), minlength=limit + 1)
    variance = float(counts @ np.arange(limit + 1, dtype=np.float64) ** 2) / len(integers)
    start = round(4 * math.log2(max(variance, 1e-9))) + 16
    scale = min(max(start, 0), SCALES - 1)
    cost = _total_cost(counts, scale)
    for direction in (-1, 1):
        while 0 <= scale + direction < SCALES and (other := _total_cost(counts, scale + direction)) < cost:
            scale, cost = scale + direction, other
    return scale


def _total_cost(counts: NDArray[np.int64], scale: int) -> float:
    bits, own = _costs(scale), radius(scale) + 1
    return float(counts[:own] @ bits[:own] + counts[own:].sum() * bits[own])
