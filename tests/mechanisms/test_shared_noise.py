"""The discrete Gaussian around a point of the grid: its law, its tables, and that it is whole numbers of the stream."""

from __future__ import annotations

import math
from bisect import bisect_right
from decimal import Decimal, localcontext

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from fedspa.mechanisms.discrete_gaussian import noise as module
from fedspa.mechanisms.discrete_gaussian.event import FINE, SIGMA
from fedspa.mechanisms.discrete_gaussian.noise import REACH, discrete_gaussian
from fedspa.randomness.streams import Stream, derive_key


def stream(*labels: str | int) -> Stream:
    return Stream(derive_key(bytes(32), "test", *labels))


class Scripted(Stream):
    """Words as they are given."""

    def __init__(self, *words: int) -> None:
        self.words = list(words)

    def uint64(self, n: int) -> NDArray[np.uint64]:
        taken, self.words = self.words[:n], self.words[n:]
        return np.array(taken, dtype=np.uint64)


@pytest.mark.parametrize("fraction", [0, 1, 300, 512, 1023])
def test_the_table_is_the_law_to_2_to_the_120(fraction: int) -> None:
    """Against 120 decimal digits, far beyond the table: what it leaves out is in the difference, too."""
    with localcontext(prec=120):
        centre = Decimal(fraction) / FINE
        far = range(-3 * REACH, 3 * REACH)
        law = {n: (-((n - centre) ** 2) / (2 * SIGMA**2)).exp() for n in far}
        total = sum(law.values())
        running = sum(law[n] for n in far if n < -REACH)
        for n, end in zip(range(-REACH, REACH + 1), module._ends(fraction)):
            running += law[n]
            assert abs(running / total - Decimal(end) / 2**128) < Decimal(2) ** -127


def test_the_quick_tables_lead_to_the_same_place() -> None:
    """Words at the ends of cells and of values, and at random: the value whose share of [0, 1) the word lies in."""
    generator = np.random.default_rng(1)
    for fraction in (0, 5, 777, 1023):
        ends = module._ends(fraction)
        heads = [end >> 64 for end in ends]
        near = [head + shift for head in heads for shift in (-1, 1) if 0 < head + shift < 2**64]
        words = [*generator.integers(0, 2**64, 500, dtype=np.uint64).tolist(), *near, *(i << 54 for i in range(1024))]
        words = [word for word in words if word not in heads]
        drawn = discrete_gaussian(np.full(len(words), fraction), Scripted(*words))
        assert drawn.tolist() == [bisect_right(heads, word) - REACH for word in words]


def test_a_word_that_meets_an_end_is_decided_by_another() -> None:
    ends = module._ends(700)
    at = len(ends) // 2
    head, rest = ends[at] >> 64, ends[at] & (2**64 - 1)
    drawn = [int(discrete_gaussian(np.array([700]), Scripted(head, more))[0]) for more in (rest - 1, rest)]
    assert drawn == [at - REACH, at - REACH + 1]
    for word in (0, 2**64 - 1):  # the first and the last value that has any share
        (value,) = discrete_gaussian(np.array([700]), Scripted(word, word))
        assert value == bisect_right(ends, word << 64 | word) - REACH


@pytest.mark.parametrize("centre", [0, 1, 512, -1, -700, 10**9 + 3])
def test_draws_follow_the_law(centre: int) -> None:
    """Kolmogorov–Smirnov on 40,000 draws, mean and variance: each at a false-alarm rate of 10⁻⁶."""
    draws = discrete_gaussian(np.full(40_000, centre), stream("law", centre))
    away = draws - centre / FINE
    points = np.arange(draws.min(), draws.max() + 1)
    law = np.exp(-((np.arange(-80, 81) + centre // FINE - centre / FINE) ** 2) / (2 * SIGMA**2))
    exact = np.cumsum(law / law.sum())[points - centre // FINE + 80]
    empirical = np.searchsorted(np.sort(draws), points, side="right") / len(draws)
    assert np.abs(empirical - exact).max() < stats.kstwobign.isf(1e-6) / math.sqrt(len(draws))
    assert abs(away.mean()) < stats.norm.isf(5e-7) * SIGMA / math.sqrt(len(draws))
    assert abs(away.var() / SIGMA**2 - 1) < stats.norm.isf(5e-7) * math.sqrt(2 / len(draws))


def test_the_stream_decides_and_blocks_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    centres = np.arange(-1000, 1000) * 37
    drawn = discrete_gaussian(centres, stream("same"))
    assert not np.array_equal(drawn, discrete_gaussian(centres, stream("other")))
    monkeypatch.setattr(module, "_AT_ONCE", 64)
    assert np.array_equal(drawn, discrete_gaussian(centres, stream("same")))
    assert discrete_gaussian(np.empty(0, dtype=np.int64), stream("none")).size == 0
