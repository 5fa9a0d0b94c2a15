"""The probability table of coding `int`: a Gaussian on the integers with a little weight everywhere, in whole numbers.

Encoder and decoder must hold the same table to the last unit, on any machine, so nothing here rests on a platform's
floating point: the one transcendental number is taken from `decimal`, whose exp and sqrt are correctly rounded by
specification, and all that follows is integer arithmetic.

Scale i (0 … 79) stands for a standard deviation s = 2^(i/8 − 2) in units of the step. Symbols −A … A have their own
entries, A = 2^(⌈i/8⌉ + 1) ≥ 8s; all other integers share the escape. Frequencies are out of 2^24:

    q   = ⌊2^64 · exp(−1/(2s²))⌋                        q2 = ⌊q²/2^64⌋
    w_0 = 2^64, g_0 = q; w_{j+1} = ⌊w_j·g_j/2^64⌋, g_{j+1} = ⌊g_j·q2/2^64⌋      (w_j ≈ 2^64·exp(−j²/(2s²)))
    U   = ⌊2^14/(2A + 2)⌋,  F = 2^24 − (2A + 2)·U,  W = w_0 + 2·(w_1 + … + w_A)
    f(n) = U + ⌊F·w_|n|/W⌋,  f(escape) = U;  what is left of 2^24 goes to f(0).

The uniform part U is about a thousandth of the weight: it costs 0.0014 bits per value and keeps an outlier under 15
bits at the usual scales.
"""

from __future__ import annotations

import decimal
import math
from functools import lru_cache
from typing import Any

import constriction
import numpy as np
from numpy.typing import NDArray

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
def entropy_model(scale: int) -> Any:
    """The table as constriction's model, with exactly these frequencies.

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
    """The scale that codes `integers` (at least one) in the fewest bits: downhill from where their variance points."""
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
