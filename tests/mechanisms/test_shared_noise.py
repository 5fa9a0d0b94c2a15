"""The discrete Gaussian around a point of the grid: its law, its tables, and that it is whole numbers of the stream."""

from __future__ import annotations

import math
import struct
from bisect import bisect_right
from decimal import Decimal, localcontext
from itertools import pairwise

import numpy as np
import pytest
from scipy import stats
from scripted import Scripted, stream

from fedspa.mechanisms.discrete_gaussian import release as module
from fedspa.mechanisms.discrete_gaussian.plan import FINE, SIGMA
from fedspa.mechanisms.discrete_gaussian.release import REACH, discrete_gaussian
from fedspa.randomness.streams import BITS


@pytest.mark.parametrize("fraction", [0, 300, 1023])
def test_the_table_is_the_law_far_out(fraction: int) -> None:
    """Against 200 decimal digits, far beyond the table: each number has its chance but for a factor 1 ± 2⁻⁹⁰, out to
    where an accounting of shifts of eight standard deviations looks."""
    with localcontext(prec=200):
        centre = Decimal(fraction) / FINE
        law = {n: (-((n - centre) ** 2) / (2 * SIGMA**2)).exp() for n in range(-3 * REACH, 3 * REACH)}
        total = sum(law.values())
        ends = [0, *module._ends(fraction), 2**BITS]
        for n, (low, high) in zip(range(-REACH, REACH + 2), pairwise(ends)):
            if abs(n - centre) <= Decimal("20.1") * SIGMA:
                assert abs(Decimal(high - low) / 2**BITS / (law[n] / total) - 1) < Decimal(2) ** -90


def test_the_quick_tables_lead_to_the_same_place() -> None:
    """Words at the ends of cells and of values, and at random: the value whose share of [0, 1) the word lies in."""
    generator = np.random.default_rng(1)
    for fraction in (0, 5, 777, 1023):
        ends = module._ends(fraction)
        heads = [end >> BITS - 64 for end in ends]
        near = [head + shift for head in heads for shift in (-1, 1) if 0 < head + shift < 2**64]
        words = [*generator.integers(0, 2**64, 500, dtype=np.uint64).tolist(), *near, *(i << 54 for i in range(1024))]
        words = [word for word in words if word not in heads]
        drawn = discrete_gaussian(np.full(len(words), fraction), Scripted(words))
        assert drawn.tolist() == [bisect_right(heads, word) - REACH for word in words]


def test_a_word_that_meets_an_end_is_decided_by_others() -> None:
    ends = module._ends(700)
    at = len(ends) // 2
    for drawn, value in ((ends[at] - 1, at), (ends[at], at + 1), (0, 0), (2**BITS - 1, len(ends))):
        words = struct.unpack(f">{BITS // 64}Q", drawn.to_bytes(BITS // 8, "big"))
        assert discrete_gaussian(np.array([700]), Scripted(words)).tolist() == [value - REACH]


@pytest.mark.parametrize("centre", [0, 512, -700, 10**9 + 3])
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
    monkeypatch.setattr(module, "AT_ONCE", 64)
    assert np.array_equal(drawn, discrete_gaussian(centres, stream("same")))
    assert discrete_gaussian(np.empty(0, dtype=np.int64), stream("none")).size == 0
