"""One release: noise of the plan's size on every active coordinate, divided by the public B, in any chunks."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedspa.mechanisms.gaussian.plan import GaussianPlan
from fedspa.mechanisms.gaussian.release import noisy_mean
from fedspa.randomness.streams import Stream, derive_key

KEY = derive_key(bytes(32), "release")
PLAN = GaussianPlan(200, 100, "l2", 0.5, "poisson", 8, 100, 10, 1, 1.5, "add-remove", 1e-3)


def release(
    chunks: list[torch.Tensor], plan: GaussianPlan = PLAN, key: bytes = KEY, on_grid: bool = False
) -> torch.Tensor:
    return noisy_mean(chunks, plan, Stream(key), on_grid=on_grid)


@pytest.mark.parametrize("on_grid", [False, True])
@pytest.mark.parametrize("clip", ["l2", "coordinate"])
def test_noise_has_the_plans_sigma_also_on_an_empty_batch(clip: str, on_grid: bool) -> None:
    """Empty batch, 200 × 100 values: the variance is within 5 standard errors (false alarm below 1e-6)."""
    plan = replace(PLAN, clip=clip)
    values = torch.stack([release([], plan, derive_key(KEY, clip, i), on_grid) for i in range(200)])
    assert values.mean() == pytest.approx(0, abs=5 * plan.sigma / math.sqrt(values.numel()))
    assert float(values.std()) == pytest.approx(plan.sigma, rel=5 / math.sqrt(2 * values.numel()))


@pytest.mark.parametrize("on_grid", [False, True])
def test_the_mean_divides_by_the_public_batch_not_by_the_rows(on_grid: bool) -> None:
    """The same noise key with and without rows: the difference is the clipped sum over B, for any number of rows."""
    for rows in (1, 3, 40):
        block = torch.full((rows, 100), 0.01)
        difference = release([block], on_grid=on_grid) - release([], on_grid=on_grid)
        assert torch.allclose(difference, torch.full((100,), rows * 0.01 / 8, dtype=torch.float64), atol=2e-6)


@given(cuts=st.lists(st.integers(0, 12), max_size=4), order=st.permutations(range(12)))
def test_order_and_chunks_change_nothing(cuts: list[int], order: list[int]) -> None:
    rows = torch.randn(12, 100, generator=torch.Generator().manual_seed(1))
    whole = release([rows])
    edges = [0, *sorted(cuts), 12]
    parts = [rows[torch.tensor(order)][a:b] for a, b in pairwise(edges)]
    assert torch.allclose(release(parts), whole, rtol=0, atol=1e-7)
    # In integers there is no rounding for the order to change.
    assert torch.equal(release(parts, on_grid=True), release([rows], on_grid=True))


def test_neighbours_of_a_release_differ_by_the_sensitivity_over_b() -> None:
    """Replace-one on the real path, worst pair, same noise: the paper's √2 would fail here."""
    plan = replace(PLAN, neighbours="replace-one")
    big = torch.full((1, 100), 1e6)
    distance = float((release([big], plan) - release([-big], plan)).norm())
    assert distance == pytest.approx(plan.sensitivity / plan.batch, rel=3e-6)  # a little less, see CLIP_MARGIN
