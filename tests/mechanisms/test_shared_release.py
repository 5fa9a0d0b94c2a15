"""An agent's share: whole numbers around the sum of its clipped gradients, in which one record has a bounded part."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import torch
from sample_plans import SHARED_PLAN
from scripted import stream

from fedspa.mechanisms.base import CLIP_UNITS
from fedspa.mechanisms.discrete_gaussian.plan import FINE, SIGMA
from fedspa.mechanisms.discrete_gaussian.release import mean_gradient, placed, share
from fedspa.mechanisms.gaussian.release import sum_in_units

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
