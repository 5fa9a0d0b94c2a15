"""Poisson pairs: discretised from above, and the replace pair really is the worst one."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_mechanism as dp_loss

from fedspa.privacy.pld import Added, LossMass, Removed, Replaced, mixture_log_ratio, mixture_loss

KINDS = [
    (Removed, dp_loss.AdjacencyType.REMOVE),
    (Added, dp_loss.AdjacencyType.ADD),
    (Replaced, dp_loss.AdjacencyType.REPLACE),
]


def profile(part: LossMass, epsilon: float) -> float:
    losses = part.losses
    return float(part.infinite + part.mass[losses > epsilon] @ -np.expm1(epsilon - losses[losses > epsilon]))


@pytest.mark.parametrize(("pair", "adjacency"), KINDS)
@pytest.mark.parametrize("rate", [1e-4, 1 / 60, 0.95])
@pytest.mark.parametrize("shift", [0.01, 3.0])
def test_profile_lies_above_dp_accountings_and_near_it(
    pair: type[Removed], adjacency: dp_loss.AdjacencyType, rate: float, shift: float
) -> None:
    part = pair(rate, shift).discretise(2.0**-12, 8.0)
    assert part.mass.min() >= 0
    assert part.mass.sum() + part.infinite == pytest.approx(1, abs=1e-12)
    exact = dp_loss.GaussianPrivacyLoss(1 / shift, sampling_prob=rate, adjacency_type=adjacency)
    reach = max(abs(part.losses[0]), abs(part.losses[-1]))
    for epsilon in np.linspace(-1, 1, 41) * reach:
        delta = exact.get_delta_for_epsilon(float(epsilon))
        assert profile(part, epsilon) >= delta * (1 - 1e-9) - 1e-15
        assert profile(part, epsilon) <= delta + 2.0**-12


@pytest.mark.parametrize("rate", [1e-5, 0.01, 0.5, 0.999])
def test_loss_and_its_inverse(rate: float) -> None:
    x = np.linspace(-5, 60, 301)
    losses = mixture_loss(rate, 2.0, x)
    assert np.all(np.diff(losses) >= 0)
    sharp = x > -0.5  # below, the loss clings to ln(1−q) and its inverse is ill-conditioned
    assert mixture_log_ratio(rate, losses)[sharp] == pytest.approx((2.0 * x - 2.0)[sharp], rel=1e-6, abs=1e-6)
    assert mixture_log_ratio(rate, np.array([math.log1p(-rate) - 1e-3]))[0] == -math.inf


def test_small_losses_keep_their_digits() -> None:
    """At q = 1e-9 a loss of 1e-12 is q·(r − 1) to twelve digits, not the rounding of ln(1 + 1e-12)."""
    assert mixture_loss(1e-9, 1e-3, np.array([1.0]))[0] == pytest.approx(1e-9 * math.expm1(1e-3 - 5e-7), rel=1e-9)


@pytest.mark.parametrize("rate", [0.05, 0.5])
@pytest.mark.parametrize("noise", [0.7, 2.0])
def test_opposite_examples_are_the_worst_replacement(rate: float, noise: float) -> None:
    """H_γ by quadrature in the plane, x of norm 1 against x' of any norm and angle: never above the replace pair.

    The quadrature is good to 2e-3 of δ (a four times finer one to 1e-4); the pair itself meets the bound.
    """
    grid = np.linspace(-9, 9, 361) * max(noise, 1)
    cell = (grid[1] - grid[0]) ** 2
    first, second = np.meshgrid(grid, grid)

    def density(at: tuple[float, float]) -> np.ndarray:
        squared = (first - at[0]) ** 2 + (second - at[1]) ** 2
        return np.exp(-squared / (2 * noise**2)) / (2 * math.pi * noise**2)

    away, present = density((0.0, 0.0)), density((1.0, 0.0))
    p = (1 - rate) * away + rate * present
    worst = Replaced(rate, 1 / noise).discretise(2.0**-14, 9.0)
    for epsilon in (0.0, 0.02, 0.2, 0.6):
        allowed = profile(worst, epsilon)
        for norm in (0.0, 0.3, 0.7, 1.0):
            for angle in np.linspace(0, math.pi, 7):
                q = (1 - rate) * away + rate * density((norm * math.cos(angle), norm * math.sin(angle)))
                for upper, lower in ((p, q), (q, p)):
                    measured = float(np.maximum(upper - math.exp(epsilon) * lower, 0).sum() * cell)
                    assert measured <= allowed * (1 + 2e-3)
        opposite = (1 - rate) * away + rate * density((-1.0, 0.0))
        assert float(np.maximum(p - math.exp(epsilon) * opposite, 0).sum() * cell) == pytest.approx(allowed, rel=1e-2)
