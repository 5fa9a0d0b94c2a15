"""The discrete Gaussian around a point of the grid: its law, its tables, and that it is whole numbers of the stream."""

from __future__ import annotations

import math
import struct
from bisect import bisect_right
from dataclasses import replace
from decimal import Decimal, localcontext
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch
from sample_plans import SHARED_PLAN
from scipy import stats
from scripted import Scripted, stream

from fedspa.mechanisms.base import CLIP_UNITS
from fedspa.mechanisms.discrete_gaussian import release as module
from fedspa.mechanisms.discrete_gaussian.plan import FINE, SIGMA
from fedspa.mechanisms.discrete_gaussian.release import REACH, discrete_gaussian, mean_gradient, placed, share
from fedspa.mechanisms.gaussian.release import sum_in_units
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


# An agent's share: whole numbers around the sum of its clipped gradients, in which one record has a bounded part.


PLAN = replace(SHARED_PLAN, dimension=4, active=4, clip_value=0.5)


def test_no_row_measures_more_than_its_bound() -> None:
    """Whatever floating point makes of a row: its whole numbers are counted exactly."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(300, 4, generator=generator) * 10.0 ** torch.randint(-12, 12, (300, 1), generator=generator)
    rows[0], rows[1, 2], rows[2] = torch.inf, torch.nan, 0
    for row in rows:
        numbers = sum_in_units([row.unsqueeze(0)], "l2", 0.5, 4)
        assert sum(int(number) ** 2 for number in numbers) <= CLIP_UNITS**2
    assert np.array_equal(
        sum_in_units(rows.split(7), "l2", 0.5, 4), sum(sum_in_units([row.unsqueeze(0)], "l2", 0.5, 4) for row in rows)
    )
    long = sum_in_units([torch.full((1, 4), 1e6)], "l2", 0.5, 4)
    assert sum(int(number) ** 2 for number in long) > (CLIP_UNITS * (1 - 1e-5)) ** 2


def test_a_point_is_one_of_the_two_nearest_and_right_on_average() -> None:
    total = np.array([0, 1, -1, CLIP_UNITS // 3, -5 * CLIP_UNITS - 12_345, 10**9])
    points = np.stack([placed(total, PLAN, stream("points", i)) for i in range(4000)])
    exact = np.array([float(Fraction(int(value) * PLAN.bound, CLIP_UNITS)) for value in total])
    assert (np.abs(points - exact) < 1).all()
    part = exact - np.floor(exact)
    assert (np.abs(points.mean(0) - exact) <= 6 * np.sqrt(part * (1 - part) / len(points)) + 1e-12).all()


def test_what_lies_beyond_the_reach_is_held_there() -> None:
    plan = replace(PLAN, dimension=1000, active=1000)
    total = np.full(1000, 2 * plan.reach)
    total[1::2] *= -1
    at = placed(total, plan, stream("held"))
    assert np.abs(at).max() <= plan.reach * plan.bound // CLIP_UNITS + 1
    assert plan.reach == CLIP_UNITS * plan.records // 8
    # Nothing that was close is further apart than it was.
    assert np.array_equal(at, placed(np.sign(total) * plan.reach, plan, stream("held")))


def test_a_share_is_the_sum_and_its_noise() -> None:
    total = np.array([0, 7 * CLIP_UNITS, -3 * CLIP_UNITS + 5])
    drawn = np.stack([share(total, PLAN, stream("r", i), stream("n", i)) for i in range(3000)])
    exact = total * (PLAN.bound / FINE / CLIP_UNITS)
    assert (np.abs(drawn.mean(0) - exact) < 6 * SIGMA / np.sqrt(3000)).all()
    assert (np.abs(drawn.std(0) / SIGMA - 1) < 0.08).all()
    assert drawn.dtype == np.int64


def test_a_sum_is_read_as_the_mean_gradient() -> None:
    """Three members whose records each pull with half the bound: exactly that, but for noise."""
    gradient = np.array([0.25, 0.0, -0.125, 0.3])
    total = np.rint(gradient / PLAN.clip_value * CLIP_UNITS).astype(np.int64) * PLAN.records
    whole = sum(share(total, PLAN, stream("r", i), stream("n", i)) for i in range(3))
    assert isinstance(whole, np.ndarray)
    assert np.abs(mean_gradient(whole, 3, PLAN) - gradient).max() < 6 * PLAN.sigma / np.sqrt(3)
