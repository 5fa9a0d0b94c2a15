"""rand_k: unbiased, with the variance of the paper's Lemma 4; noise lands on active coordinates only."""

from __future__ import annotations

import itertools

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedspa.randomness.mask import active_coordinates
from fedspa.randomness.sparsify import scale, sparsify


@st.composite
def vectors(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    d = draw(st.integers(1, 7))
    x = draw(hnp.arrays(np.float64, d, elements=st.floats(-100, 100)))
    return x, draw(st.integers(1, d))


@given(vectors())
def test_expectation_and_variance_over_all_masks(case: tuple[np.ndarray, int]) -> None:
    """E[S(x)] = x and E‖S(x) − x‖² = (1/p − 1)‖x‖², exactly, by going through every mask."""
    x, k = torch.from_numpy(case[0]), case[1]
    d = len(x)
    factor = scale("per-agent", d, k)
    images = [sparsify(x, torch.tensor(omega), factor) for omega in itertools.combinations(range(d), k)]
    mean = torch.stack(images).mean(dim=0)
    spread = torch.stack([(image - x).square().sum() for image in images]).mean()
    assert torch.allclose(mean, x, atol=1e-9)
    assert float(spread) == pytest.approx((d / k - 1) * float(x.square().sum()), rel=1e-9, abs=1e-9)


def test_masks_that_all_agents_share_are_not_scaled() -> None:
    assert scale("shared", 10, 2) == scale("fixed", 10, 2) == 1
    assert scale("per-agent", 10, 2) == 5


def test_inactive_coordinates_are_exactly_zero() -> None:
    omega = torch.from_numpy(active_coordinates(bytes(16), 1000, 50))
    image = sparsify(torch.full((1000,), 1e30), omega, 20.0)
    outside = torch.ones(1000, dtype=torch.bool)
    outside[omega] = False
    assert (image[outside] == 0).all()
    assert (image[omega] == torch.tensor(2e31)).all()
