"""cpSGD's release: unbiased, of the stated variance, never beyond its sensitivity, and all in whole numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_plans import BINOMIAL_PLAN
from scripted import stream

from fedspa.algorithms.cpsgd.audit import largest_move
from fedspa.algorithms.cpsgd.plan import BinomialPlan, reach
from fedspa.algorithms.cpsgd.respond import Integers, dequantized, noised, quantized
from fedspa.errors import PrivacyError
from fedspa.mechanisms.base import CLIP_UNITS
from fedspa.mechanisms.gaussian.release import sum_in_units
from fedspa.randomness.streams import Stream

PLAN = replace(BINOMIAL_PLAN, dimension=50, bits=3, trials=100, agents=5, batch=4, records=100, participations=1)


def batch(seed: int = 0, scale: float = 0.3) -> torch.Tensor:
    return scale * torch.randn(PLAN.batch, PLAN.dimension, generator=torch.Generator().manual_seed(seed))


def released(rows: Iterable[torch.Tensor], coins: Stream, noise: Stream, plan: BinomialPlan = PLAN) -> Integers:
    return noised(sum_in_units(rows, plan.clip, plan.clip_value, plan.dimension), plan, coins, noise)


def test_the_estimate_is_unbiased_with_the_stated_variance() -> None:
    """600 releases. Means within 5.5σ in each of 50 coordinates (false alarm 2·10⁻⁶); the mean square error between
    s²m/4 and s²(m + 1)/4, five standard deviations allowed (10⁻⁶)."""
    rows, draws = batch(), 600
    coins, noise = stream("coins"), stream("noise")
    seen = np.stack([dequantized(released([rows], coins, noise), PLAN) for _ in range(draws)])
    errors = seen - rows.to(torch.float64).clamp(-PLAN.clip_value, PLAN.clip_value).mean(0).numpy()
    most = PLAN.step**2 * (PLAN.trials + 1) / 4
    assert np.abs(errors.mean(0)).max() < 5.5 * math.sqrt(most / draws)
    slack = 5 * math.sqrt(2 / errors.size)
    assert PLAN.step**2 * PLAN.trials / 4 * (1 - slack) < (errors**2).mean() < most * (1 + slack)


def test_without_noise_the_levels_enclose_the_value() -> None:
    """Every level is one of the two around the exact value, and in 0 … k − 1."""
    generator, half = np.random.default_rng(1), reach(PLAN)
    total = generator.integers(-half, half, PLAN.dimension)
    levels = quantized(total, PLAN, stream("levels"))
    assert (np.abs(levels - (total + half) / (2 * half) * (PLAN.levels - 1)) <= 1).all()
    assert 0 <= levels.min() <= levels.max() <= PLAN.levels - 1


@pytest.mark.parametrize("end", [-1, 1])
def test_the_ends_of_the_span_are_levels(end: int) -> None:
    """A batch that pulls every coordinate to its clip gives the first or last level without chance."""
    total = np.full(PLAN.dimension, end * PLAN.batch * CLIP_UNITS)
    assert (quantized(total, PLAN, stream("ends")) == (0 if end < 0 else PLAN.levels - 1)).all()


@given(st.integers(0, 2**32), st.integers(1, 6), st.booleans())
@settings(max_examples=60, deadline=None)
def test_neighbours_never_pass_the_sensitivity(seed: int, bits: int, worst: bool) -> None:
    """Batches that differ in one example, the same coins and noise: no coordinate moves by more than ⌈(k − 1)/B⌉."""
    plan = replace(PLAN, bits=bits)
    generator = torch.Generator().manual_seed(seed)
    rows = batch(seed, scale=1.0)
    other = rows.clone()
    if worst:
        rows[0] = 1e9 * torch.sign(torch.randn(plan.dimension, generator=generator))
        other[0] = -rows[0]
    else:
        other[0] = 10 ** float(torch.randn(1, generator=generator)) * torch.randn(plan.dimension, generator=generator)
    numbers = [released([part], stream(seed), stream("noise", seed), plan) for part in (rows, other)]
    assert np.abs(numbers[0] - numbers[1]).max() <= largest_move(plan)


def test_no_example_counts_for_more_than_its_clip() -> None:
    """NaN and ∞ count as zero, huge rows as clipped ones; whatever the blocks."""
    rows = batch()
    broken = rows.clone()
    broken[1], broken[2, 7] = math.nan, math.inf
    zero = rows.clone()
    zero[1:3] = 0
    whole, parts = ([broken], [broken[:1], broken[1:1], broken[1:]])
    first, second, third = (released(blocks, stream(1), stream(2)) for blocks in (whole, parts, [zero]))
    assert np.array_equal(first, second)
    assert np.array_equal(first, third)


def test_what_does_not_fit_into_64_bits_is_refused() -> None:
    with pytest.raises(PrivacyError, match="fewer bits"):
        reach(replace(PLAN, bits=16, batch=2**23, records=2**23, delta=1e-9))
