"""Clipping: the bound holds for any rows, is attained, and makes the plan's sensitivity true and tight."""

from __future__ import annotations

import math
from typing import get_args

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedspa.mechanisms.base import Clipping
from fedspa.mechanisms.clipping import CLIP_MARGIN, clip_rows, share_below
from fedspa.mechanisms.gaussian.plan import GaussianPlan
from fedspa.privacy.event import Neighbours

CLIPPINGS = get_args(Clipping)
K = 6

any_rows = hnp.arrays(np.float32, st.tuples(st.integers(1, 8), st.just(K)), elements=st.floats(width=32))
bounds = st.floats(1e-3, 1e3)


def plan(clip: Clipping, value: float, neighbours: Neighbours) -> GaussianPlan:
    return GaussianPlan(10, K, clip, value, "poisson", 4, 100, 1, 1, 1.0, neighbours, 1e-3)


@pytest.mark.parametrize("clip", CLIPPINGS)
@given(rows=any_rows, value=bounds)
def test_no_row_passes_the_bound_whatever_it_holds(clip: Clipping, rows: np.ndarray, value: float) -> None:
    clipped = clip_rows(torch.from_numpy(rows), clip, value).to(torch.float64)
    assert torch.isfinite(clipped).all()
    if clip == "coordinate":
        assert clipped.abs().max() <= np.float32(value)
    else:
        assert clipped.norm(dim=1).max() <= value * (1 + 1e-6)


@pytest.mark.parametrize("clip", CLIPPINGS)
@pytest.mark.parametrize("value", [0.1, 1e-7])
def test_the_bound_holds_for_rows_at_the_end_of_float32(clip: Clipping, value: float) -> None:
    """There value/norm is a subnormal number, with so few digits that the clipped norm came to twice the bound."""
    rows = torch.logspace(30, 38.5, 200).unsqueeze(1) * torch.ones(1, K)
    clipped = clip_rows(rows, clip, value).to(torch.float64)
    limit = value if clip == "l2" else math.sqrt(K) * value
    assert clipped.norm(dim=1).max() <= limit * (1 + 1e-6)


@pytest.mark.parametrize("clip", CLIPPINGS)
@given(rows=any_rows, value=bounds)
def test_rows_within_the_bound_are_left_alone(clip: Clipping, rows: np.ndarray, value: float) -> None:
    clipped = clip_rows(torch.from_numpy(rows), clip, value)
    again = clip_rows(clipped, clip, value * 1.001)
    assert torch.equal(again, clipped)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("clip", CLIPPINGS)
def test_a_row_with_a_bad_number_counts_as_zero_and_spoils_no_other(clip: Clipping, bad: float) -> None:
    rows = torch.ones(2, K)
    rows[0, 3] = bad
    clipped = clip_rows(rows, clip, 0.5)
    assert (clipped[0] == 0).all()
    assert (clipped[1] > 0).all()


@given(seed=st.integers(0, 2**20), exponent=st.floats(-6, 6), value=bounds, size=st.sampled_from([1, 7, 1000]))
def test_float32_rows_do_not_exceed_the_bound_by_their_rounding(
    seed: int, exponent: float, value: float, size: int
) -> None:
    """Not by the last bit: the accountant has no margin for it."""
    rows = 10.0**exponent * torch.randn(3, size, generator=torch.Generator().manual_seed(seed))
    assert float(clip_rows(rows, "l2", value).double().norm(dim=1).max()) <= value
    assert float(clip_rows(rows, "coordinate", value).double().abs().max()) <= value


@pytest.mark.parametrize("neighbours", get_args(Neighbours))
@pytest.mark.parametrize("clip", CLIPPINGS)
@given(common=any_rows, one=any_rows, other=any_rows, value=bounds)
def test_neighbouring_sums_differ_by_at_most_the_plans_sensitivity(
    clip: Clipping, neighbours: Neighbours, common: np.ndarray, one: np.ndarray, other: np.ndarray, value: float
) -> None:
    def total(*blocks: np.ndarray) -> torch.Tensor:
        return sum(clip_rows(torch.from_numpy(b).double(), clip, value).sum(dim=0) for b in blocks)  # type: ignore

    left = total(common, one[:1])
    right = total(common) if neighbours == "add-remove" else total(common, other[:1])
    allowed = plan(clip, value, neighbours).sensitivity
    assert (left - right).norm() <= allowed * (1 + 1e-9)


@pytest.mark.parametrize("neighbours", get_args(Neighbours))
@pytest.mark.parametrize("clip", CLIPPINGS)
def test_a_worst_pair_attains_the_sensitivity(clip: Clipping, neighbours: Neighbours) -> None:
    """The paper's sensitivity for replace-one, √2·√p·G, is smaller than what this pair shows."""
    value = 0.7
    up = clip_rows(torch.full((1, K), 1e6, dtype=torch.float64), clip, value)[0]
    down = clip_rows(torch.full((1, K), -1e6, dtype=torch.float64), clip, value)[0]
    distance = float((up - down).norm() if neighbours == "replace-one" else up.norm())
    chosen = plan(clip, value, neighbours)
    assert chosen.sensitivity * (1 - 1.01 * CLIP_MARGIN) <= distance <= chosen.sensitivity * (1 + 1e-12)
    if neighbours == "replace-one":
        assert distance > math.sqrt(2) * chosen.clip_norm * 1.4


@pytest.mark.parametrize("clip", CLIPPINGS)
@given(rows=any_rows, value=bounds)
def test_a_share_lies_between_0_and_1(clip: Clipping, rows: np.ndarray, value: float) -> None:
    shares = share_below(torch.from_numpy(rows), clip, value)
    assert ((shares >= 0) & (shares <= 1)).all()


def test_shares_by_hand() -> None:
    rows = torch.tensor([[3.0, 4.0, 0.0], [0.1, 0.0, 0.0], [0.0, 0.0, 0.0]])
    assert share_below(rows, "l2", 1.0).tolist() == [0, 1, 1]
    assert share_below(rows, "coordinate", 3.5).tolist() == [0.5, 1, 1]
