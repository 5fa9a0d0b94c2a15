"""Samplers draw what the accountants assume. Statistics: fixed keys, so they either always pass or never."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from fedspa.randomness.streams import Stream, derive_key, draw_batch

ROOT = bytes(32)


def stream(name: str) -> Stream:
    return Stream(derive_key(ROOT, name))


def test_poisson_batches_have_binomial_sizes_empty_and_large_ones_included() -> None:
    source = stream("sizes")
    sizes = np.array([len(draw_batch("poisson", 2, 2 / 40, 40, source)) for _ in range(20_000)])
    assert sizes.min() == 0  # chance of an empty batch 0.13
    assert sizes.max() >= 9  # 4.5 times the expected size; chance of seeing none in 20,000 below 1e-10
    counts = np.bincount(np.minimum(sizes, 8), minlength=9)
    law = stats.binom(40, 2 / 40)
    expected = len(sizes) * np.append(law.pmf(range(8)), law.sf(7))
    assert stats.chisquare(counts, expected).pvalue > 1e-4  # false-alarm rate 1e-4


def test_poisson_includes_each_record_independently() -> None:
    source = stream("pairs")
    draws = np.zeros((20_000, 10), dtype=bool)
    for row in draws:
        row[draw_batch("poisson", 3, 3 / 10, 10, source)] = True
    correlation = np.corrcoef(draws.T)
    assert np.abs(correlation - np.eye(10)).max() < 0.035  # 45 pairs, 4.9 standard deviations: below 1e-4
    assert np.abs(draws.mean(axis=0) - 0.3).max() < 0.016  # 10 records, 4.9 standard deviations: below 1e-5


def test_fixed_batches_are_uniform_subsets_of_the_exact_size() -> None:
    source = stream("subsets")
    seen: dict[tuple[int, ...], int] = {}
    for _ in range(20_000):
        batch = draw_batch("fixed", 3, 3 / 6, 6, source)
        assert len(batch) == 3
        seen[tuple(batch.tolist())] = seen.get(tuple(batch.tolist()), 0) + 1
    assert len(seen) == 20  # 6 choose 3
    assert stats.chisquare(list(seen.values())).pvalue > 1e-4  # false-alarm rate 1e-4


def test_steps_are_fresh_not_shuffled_epochs() -> None:
    """In a shuffled epoch two successive batches never meet; independent ones of 5 in 10 nearly always do."""
    source = stream("fresh")
    overlaps = [
        len(np.intersect1d(draw_batch("fixed", 5, 5 / 10, 10, source), draw_batch("fixed", 5, 5 / 10, 10, source)))
        for _ in range(2000)
    ]
    assert np.mean(overlaps) == pytest.approx(2.5, abs=0.09)  # 4.8 standard deviations
