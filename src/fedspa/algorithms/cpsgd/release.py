"""cpSGD's release: a mean of clipped gradients, rounded at random onto 2^b levels, plus Binomial noise. Integers only.

From an example's clipped gradient on, everything is a whole number: the sum over the batch, the rotation (signs and a
Hadamard matrix without its 1/√d), the rounding, which compares with a uniform integer, and the noise. So the rounding
is unbiased to the last bit, the distances that docs/cpsgd.md bounds are distances of integers, and floating point has
no say in what leaves. An engine that clips and adds up by itself hands its sum to `noised`; the others' gradients pass
through `summed` first. `release` is the two together. No run calls it: the audit attacks it, and whole answers too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedspa.algorithms.cpsgd.event import FAR, MOST_TRIALS
from fedspa.algorithms.cpsgd.plan import BinomialPlan, example_grid, reach
from fedspa.errors import PrivacyError
from fedspa.mechanisms.clipping import clip_rows
from fedspa.mechanisms.gaussian.release import integer_sum
from fedspa.mechanisms.inversion import AT_ONCE, DIGITS, heads, settle, upper_ends
from fedspa.randomness.philox import ROTATION_DOMAIN, words
from fedspa.randomness.streams import Stream

Integers = NDArray[np.int64]
_MOST_CELL_BITS = 20
_Numbers = TypeVar("_Numbers", NDArray[np.int64], NDArray[np.float64])


def release(rows: Iterable[Tensor], plan: BinomialPlan, seed: bytes, rounding: Stream, noise: Stream) -> Integers:
    """The numbers that may leave: levels 0 … 2^b − 1 plus Binomial(m, ½), one for each (rotated) coordinate.

    `rows` are the gradients of the batch's examples in blocks [b, d]; `seed` is public and decides a rotation's signs.
    """
    return noised(summed(rows, plan), plan, seed, rounding, noise)


def summed(rows: Iterable[Tensor], plan: BinomialPlan) -> Integers:
    """The batch's sum of clipped gradients on the grid of `example_grid`."""
    grid = example_grid(plan)
    total = torch.zeros(plan.dimension, dtype=torch.int64)
    for block in rows:
        total += integer_sum(clip_rows(block, plan.clip, plan.clip_value), grid).cpu()
    return total.numpy()


def noised(total: Integers, plan: BinomialPlan, seed: bytes, rounding: Stream, noise: Stream) -> Integers:
    """What may leave, of a sum in which an example stays within the limits of `example_grid`."""
    return quantized(total, plan, seed, rounding) + binomial(plan.coordinates, plan.trials, noise)


def quantized(total: Integers, plan: BinomialPlan, seed: bytes, rounding: Stream) -> Integers:
    """The levels of a batch's sum: rounded up or down at random, so that the mean is the value itself."""
    half, top = reach(plan), plan.levels - 1
    if plan.rotation:
        total = rotate(total, plan.coordinates, seed)
    # A rotated coordinate may lie beyond the levels and is brought back to the last: that moves no two apart.
    inside = np.clip(total, -half, half)
    levels: Integers = ((inside + half) * top + rounding.integers_below(len(inside), 2 * half)) // (2 * half)
    return levels


def dequantized(numbers: Integers | NDArray[np.float64], plan: BinomialPlan, seed: bytes) -> NDArray[np.float64]:
    """The server's unbiased estimate of the mean gradient: −X + s·(Y − m/2), rotated back; Y may be a mean of some."""
    values: NDArray[np.float64] = (numbers.astype(np.float64) - plan.trials / 2) * plan.step - plan.reach
    return unrotate(values, plan.dimension, seed) if plan.rotation else values


def rotate(vector: Integers, size: int, seed: bytes) -> Integers:
    """H·D·x without the 1/√size: signs, zeros up to `size` (a power of two), Walsh–Hadamard transform."""
    padded = np.zeros(size, dtype=np.int64)
    padded[: len(vector)] = vector
    return _hadamard(padded * _signs(size, seed))


def unrotate(vector: NDArray[np.float64], dimension: int, seed: bytes) -> NDArray[np.float64]:
    """D·H·x/√size: the inverse of the orthogonal rotation H·D/√size."""
    size = len(vector)
    back: NDArray[np.float64] = _hadamard(vector) * _signs(size, seed) / math.sqrt(size)
    return back[:dimension]


def _hadamard(vector: _Numbers) -> _Numbers:
    size, width = len(vector), 1
    while width < size:
        pairs = vector.reshape(-1, 2, width)
        vector = np.stack((pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]), axis=1).reshape(-1)
        width *= 2
    return vector


def _signs(size: int, seed: bytes) -> Integers:
    """±1 from the public seed: bit i of its stream's words, lowest first, in the rotation's own domain."""
    bits = np.unpackbits(
        words(seed, ROTATION_DOMAIN, 0, -(-size // 128)).astype("<u4").view(np.uint8), bitorder="little"
    )
    return 1 - 2 * bits[:size].astype(np.int64)


def binomial(n: int, trials: int, stream: Stream) -> NDArray[np.int64]:
    """Return n draws of Binomial(trials, ½), at a cost that does not grow with the trials.

    The table holds values out to `FAR` standard deviations: out to there a number has its chance but for a factor
    1 ± 2⁻⁷⁰, at any number of trials. What lies further the accounting counts as seen. A word's first bits alone mostly
    decide its place among the values; `_starts` knows it then, and the others are searched for.
    """
    if not 1 <= trials <= MOST_TRIALS:
        raise PrivacyError(f"trials is {trials}; it must lie between 1 and {MOST_TRIALS}")
    first, ends, tops = _table(trials)
    starts, shift = _starts(trials)
    values = np.empty(n, dtype=np.int64)
    for start in range(0, n, AT_ONCE):
        drawn = stream.uint64(min(AT_ONCE, n - start))
        cells = (drawn >> shift).view(np.int64)
        found = starts[cells]
        among = np.flatnonzero(starts[cells + 1] != found)  # an end lies in the word's cell: only here can they meet
        found[among] = np.searchsorted(tops, drawn[among], side="right")
        tied = among[tops[np.maximum(found[among], 1) - 1] == drawn[among]]
        for i in tied:
            found[i] = settle(ends, drawn[i], stream)
        values[start : start + len(drawn)] = first + found
    return values


@lru_cache(maxsize=8)
def _starts(trials: int) -> tuple[NDArray[np.int64], np.uint64]:
    """The words in cells of equal length: how many ends lie below each cell, and the shift that gives a word's cell."""
    tops = _table(trials)[2]
    bits = min(len(tops).bit_length() + 5, _MOST_CELL_BITS)
    shift = np.uint64(64 - bits)
    below = np.searchsorted(tops, np.arange(1 << bits, dtype=np.uint64) << shift)
    return np.append(below, len(tops)), shift


@lru_cache(maxsize=8)
def _table(trials: int) -> tuple[int, list[int], NDArray[np.uint64]]:
    """The least value; the upper ends of all but the last value's share of [0, 1) in units of 2⁻³⁸⁴; their heads."""
    middle = trials // 2
    far = math.isqrt(FAR**2 * trials // 4) + 2
    first, last = max(0, middle - far), min(trials, middle + far)
    upward, weight = [], 1 << DIGITS
    for value in range(middle, last):
        weight = weight * (trials - value) // (value + 1)
        upward.append(weight)
    downward, weight = [], 1 << DIGITS
    for value in range(middle, first, -1):
        weight = weight * value // (trials - value + 1)
        downward.append(weight)
    ends = upper_ends([*reversed(downward), 1 << DIGITS, *upward])
    return first, ends, heads(ends)
