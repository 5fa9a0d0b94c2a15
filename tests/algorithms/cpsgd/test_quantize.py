"""cpSGD's release: unbiased, of the stated variance, never beyond its sensitivity, and all in whole numbers."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_plans import BINOMIAL_PLAN
from scipy import stats
from scipy.linalg import hadamard
from scripted import stream

from fedspa.algorithms.cpsgd.accounting import sensitivity
from fedspa.algorithms.cpsgd.plan import BinomialPlan, example_grid, reach
from fedspa.algorithms.cpsgd.release import dequantized, quantized, release, rotate, unrotate
from fedspa.errors import PrivacyError
from fedspa.randomness.philox import ROTATION_DOMAIN, words

SEED = bytes(range(16))
PLAN = replace(BINOMIAL_PLAN, dimension=50, bits=3, trials=100, agents=5, batch=4, records=100, participations=1)
ROTATED = replace(PLAN, rotation=True)
NORM = replace(PLAN, rotation=True, clip="l2", clip_value=2.0)
PLANS = pytest.mark.parametrize("plan", [PLAN, ROTATED, NORM], ids=["coordinate", "rotated", "l2"])


def batch(plan: BinomialPlan, seed: int = 0, scale: float = 0.3) -> torch.Tensor:
    return scale * torch.randn(plan.batch, plan.dimension, generator=torch.Generator().manual_seed(seed))


def clipped_mean(rows: torch.Tensor, plan: BinomialPlan) -> np.ndarray:
    rows = rows.to(torch.float64)
    if plan.clip == "coordinate":
        rows = rows.clamp(-plan.clip_value, plan.clip_value)
    else:
        rows = rows * (plan.clip_value / rows.norm(dim=1, keepdim=True).clamp(min=plan.clip_value))
    return (rows.sum(0) / plan.batch).numpy()


@PLANS
def test_the_estimate_is_unbiased_with_the_stated_variance(plan: BinomialPlan) -> None:
    """1,500 releases. Means within 5.5σ in each of 50 coordinates (false alarm 2·10⁻⁶); the mean square error between
    s²m/4 and s²(m + 1)/4, five standard deviations allowed (10⁻⁶)."""
    rows, draws = batch(plan), 1500
    coins, noise = stream("coins"), stream("noise")
    seen = np.stack([dequantized(release([rows], plan, SEED, coins, noise), plan, SEED) for _ in range(draws)])
    errors = seen - clipped_mean(rows, plan)
    most = plan.step**2 * (plan.trials + 1) / 4
    assert np.abs(errors.mean(0)).max() < 5.5 * math.sqrt(most / draws)
    slack = 5 * math.sqrt(2 / errors.size)
    assert plan.step**2 * plan.trials / 4 * (1 - slack) < (errors**2).mean() < most * (1 + slack)


@PLANS
def test_without_noise_the_levels_enclose_the_value(plan: BinomialPlan) -> None:
    """Every level is one of the two around the exact value, and in 0 … k − 1."""
    grid = example_grid(plan)
    generator = np.random.default_rng(1)
    total = generator.integers(-plan.batch * 1000, plan.batch * 1000, plan.dimension) * (grid.limit // 1000)
    levels = quantized(total, plan, SEED, stream("levels"))
    exact = rotate(total, plan.coordinates, SEED) if plan.rotation else total
    half = reach(plan)
    place = (np.clip(exact, -half, half) + half) / (2 * half) * (plan.levels - 1)
    assert (np.abs(levels - place) <= 1).all()
    assert levels.min() >= 0
    assert levels.max() <= plan.levels - 1


@pytest.mark.parametrize("end", [-1, 1])
def test_the_ends_of_the_span_are_levels(end: int) -> None:
    """A batch that pulls every coordinate to its clip gives the first or last level without chance."""
    total = np.full(PLAN.dimension, end * PLAN.batch * example_grid(PLAN).limit)
    assert (quantized(total, PLAN, SEED, stream("ends")) == (0 if end < 0 else PLAN.levels - 1)).all()


@given(st.integers(0, 2**32), st.sampled_from([PLAN, ROTATED, NORM]), st.integers(1, 6), st.booleans())
@settings(max_examples=150, deadline=None)
def test_neighbours_never_pass_the_sensitivity(seed: int, plan: BinomialPlan, bits: int, worst: bool) -> None:
    """Real batches that differ in one example, the same coins: at δ = 10⁻⁹ no bound is ever passed."""
    plan = replace(plan, bits=bits, delta=1e-9)
    generator = torch.Generator().manual_seed(seed)
    rows = batch(plan, seed, scale=1.0)
    other = rows.clone()
    if worst:
        rows[0] = 1e9 * torch.sign(torch.randn(plan.dimension, generator=generator))
        other[0] = -rows[0]
    else:
        other[0] = 10 ** float(torch.randn(1, generator=generator)) * torch.randn(plan.dimension, generator=generator)
    numbers = [release([part], plan, SEED, stream(seed), stream("noise", seed)) for part in (rows, other)]
    distance = np.abs(numbers[0] - numbers[1])
    moved = sensitivity(plan.event, 1e-9)
    assert distance.sum() <= moved.l1
    assert math.sqrt((distance**2).sum()) <= moved.l2
    assert distance.max() <= moved.largest


def test_no_example_counts_for_more_than_its_clip() -> None:
    """NaN and ∞ count as zero, huge rows as clipped ones; whatever the blocks."""
    rows = batch(PLAN)
    broken = rows.clone()
    broken[1], broken[2, 7] = math.nan, math.inf
    zero = rows.clone()
    zero[1:3] = 0
    whole, parts = ([broken], [broken[:1], broken[1:1], broken[1:]])
    first, second, third = (release(blocks, PLAN, SEED, stream(1), stream(2)) for blocks in (whole, parts, [zero]))
    assert np.array_equal(first, second)
    assert np.array_equal(first, third)


def test_rotation_by_hand() -> None:
    size, vector = 8, np.arange(5)
    signs = np.array([1 - 2 * (int(words(SEED, ROTATION_DOMAIN, 0, 1)[0]) >> i & 1) for i in range(size)])
    padded = np.concatenate([vector, np.zeros(3, dtype=np.int64)])
    assert np.array_equal(rotate(vector, size, SEED), hadamard(8) @ (signs * padded))
    assert set(signs) == {-1, 1}


@given(st.integers(1, 300), st.binary(min_size=16, max_size=16))
def test_rotation_has_an_inverse_and_keeps_lengths(dimension: int, seed: bytes) -> None:
    vector = np.random.default_rng(dimension).integers(-1000, 1000, dimension)
    size = 1 << (dimension - 1).bit_length()
    turned = rotate(vector, size, seed)
    assert int((turned**2).sum()) == size * int((vector**2).sum())
    assert np.allclose(unrotate(turned / math.sqrt(size), dimension, seed), vector, atol=1e-9)


def test_rotated_coordinates_stay_within_the_levels() -> None:
    """The longest sum there can be, under 200 seeds: none passes but with chance 2⁻¹⁰ each; P(> 3 of 200) < 10⁻⁴."""
    plan = replace(ROTATED, dimension=1000)
    total = np.full(1000, plan.batch * example_grid(plan).limit)
    beyond = sum(
        int(np.abs(rotate(total, plan.coordinates, i.to_bytes(16, "little"))).max() > reach(plan)) for i in range(200)
    )
    assert stats.binom.sf(3, 200, 2**-10) < 1e-4
    assert beyond <= 3


def test_rounding_and_noise_have_streams_of_their_own() -> None:
    rows = [batch(PLAN)]
    first = release(rows, PLAN, SEED, stream("a"), stream("b"))
    assert not np.array_equal(first, release(rows, PLAN, SEED, stream("a"), stream("c")))
    assert not np.array_equal(first, release(rows, PLAN, SEED, stream("c"), stream("b")))
    assert first.dtype == np.int64


def test_what_does_not_fit_into_64_bits_is_refused() -> None:
    with pytest.raises(PrivacyError, match="fewer bits"):
        reach(replace(PLAN, bits=16, batch=2**21, records=2**21, delta=1e-9, dimension=10**6, rotation=True))
