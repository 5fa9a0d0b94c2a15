"""rand_k: unbiased, with the variance of the paper's Lemma 4."""

from __future__ import annotations

import itertools

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedspa.randomness.sparsify import scale


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
    kept = (torch.tensor(omega) for omega in itertools.combinations(range(d), k))
    images = [factor * torch.zeros_like(x).index_fill(0, omega, 1.0) * x for omega in kept]
    mean = torch.stack(images).mean(dim=0)
    spread = torch.stack([(image - x).square().sum() for image in images]).mean()
    assert torch.allclose(mean, x, atol=1e-9)
    assert float(spread) == pytest.approx((d / k - 1) * float(x.square().sum()), rel=1e-9, abs=1e-9)


def test_masks_that_all_agents_share_are_not_scaled() -> None:
    assert scale("shared", 10, 2) == scale("fixed", 10, 2) == 1
    assert scale("per-agent", 10, 2) == 5
