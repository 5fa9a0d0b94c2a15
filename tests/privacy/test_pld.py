"""Composition on the grid: against the exact Gaussian, plain convolution, and the edges of floating point."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_mechanism as dp_loss
from scipy import special

from fedspa.privacy.accounting import gaussian_epsilon
from fedspa.privacy.pld import (
    Added,
    DominatingPair,
    FixedSize,
    LossMass,
    Removed,
    Replaced,
    composed_epsilon,
    composed_mass,
    mixture_log_ratio,
    mixture_loss,
    normal_mass,
    split,
)


@pytest.mark.parametrize(
    ("shift", "steps", "delta"),
    [
        (1.0, 1, 1e-5),
        (0.1, 100, 1e-10),
        (3.0, 10, 1e-6),
        (1e-3, 10**6, 1e-10),
        (20.0, 50, 1e-5),
    ],
)
@pytest.mark.parametrize("pair", [Removed, Added])
def test_gaussians_compose_to_a_gaussian(pair: type[Removed], shift: float, steps: int, delta: float) -> None:
    """Up to ε of 1e4 and n of 1e6: never below the exact ε, and above it by at most 3e-4."""
    exact = gaussian_epsilon(shift * math.sqrt(steps), delta)
    found = composed_epsilon([(pair(1.0, shift), steps)], delta)
    assert exact * (1 - 1e-12) <= found <= exact * (1 + 3e-4)


def test_a_gaussian_too_weak_to_matter_costs_nothing() -> None:
    assert composed_epsilon([(Removed(1.0, 1e-4), 1)], 1e-3) == 0.0


@pytest.mark.parametrize("pair", [Removed(0.2, 1.0), Added(0.2, 1.0), Replaced(0.2, 1.0), FixedSize(0.2, 1.0)])
def test_tilted_composition_is_plain_convolution(pair: DominatingPair) -> None:
    """The same discretised masses composed by np.convolve give the same ε: tilting, folding and windows are exact."""
    delta, steps = 1e-4, 6
    found = composed_epsilon([(pair, steps)], delta)
    part = pair.discretise(2.0**-9, 9.0)
    mass = np.array([1.0])
    for _ in range(steps):
        mass = np.convolve(mass, part.mass)
    losses = (steps * part.offset + np.arange(mass.size)) * part.interval

    def delta_at(epsilon: float) -> float:
        above = losses > epsilon
        return float(steps * part.infinite + mass[above] @ -np.expm1(epsilon - losses[above]))

    assert delta_at(found) == pytest.approx(delta, rel=2e-3)
    assert delta_at(found * 0.99) > delta


def test_parts_compose_in_any_order_and_split() -> None:
    a, b = Removed(0.05, 0.7), Removed(0.2, 0.3)
    together = composed_epsilon([(a, 30), (b, 50)], 1e-5)
    assert composed_epsilon([(b, 50), (a, 30)], 1e-5) == pytest.approx(together, rel=1e-9)
    assert composed_epsilon([(a, 10), (b, 50), (a, 20)], 1e-5) == pytest.approx(together, rel=1e-6)
    assert together > max(composed_epsilon([(a, 30)], 1e-5), composed_epsilon([(b, 50)], 1e-5))


def test_floor_saves_work_but_not_soundness() -> None:
    parts = [(Added(0.05, 0.7), 100)]
    tight = composed_epsilon(parts, 1e-5)
    assert tight <= composed_epsilon(parts, 1e-5, at_least=2 * tight) <= 2 * tight
    assert composed_epsilon(parts, 1e-5, at_least=0.9 * tight) == pytest.approx(tight, rel=1e-9)


@pytest.mark.parametrize("low", [-39.0, -1e-6, 3.0, 37.0])
def test_normal_mass_keeps_relative_precision(low: float) -> None:
    high = low + 0.01
    mass, tail = normal_mass(np.array([low]), np.array([high]))
    nodes, weights = np.polynomial.legendre.leggauss(20)
    x = low + (nodes + 1) * 0.005
    exact = float(weights @ np.exp(-(x**2) / 2)) * 0.005 / math.sqrt(2 * math.pi)
    assert mass[0] == pytest.approx(exact, rel=1e-10)
    assert tail[0] >= mass[0]


def test_normal_mass_does_not_overflow() -> None:
    mass, _ = normal_mass(np.array([50.0]), np.array([51.0]), np.array([1000.0]))
    assert mass[0] == pytest.approx(math.exp(1000 + special.log_ndtr(-50.0)), rel=1e-9)
    whole, _ = normal_mass(np.array([-math.inf]), np.array([0.0]))
    assert whole[0] == pytest.approx(0.5)


def test_split_keeps_both_masses() -> None:
    """P-mass 0.3 and Q-mass 0.29 in the cell of losses (0, 0.1): kept by the two ends; slack goes up, never down."""
    down, up = split(np.array([0.3]), np.array([0.01]), np.array([0.0]), 0.1)
    assert down + up == pytest.approx(0.3)
    assert down + up * math.exp(-0.1) == pytest.approx(0.29)
    slackened = split(np.array([0.3]), np.array([0.01]), np.array([0.001]), 0.1)
    assert slackened[1] > up
    assert split(np.array([0.3]), np.array([9.0]), np.array([0.0]), 0.1)[1] == pytest.approx(0.3)


@pytest.mark.parametrize(("one", "together"), [(0.25, 0.4375), (0.75, 0.9375), (1.0, 1.0), (1.0 + 1e-12, 1.0)])
def test_mass_at_infinite_loss_composes(one: float, together: float) -> None:
    mass = LossMass(0.5, -1, np.array([0.2, 0.5, 0.3]) * max(0.0, 1 - one) + 1e-9, one)
    assert composed_mass(mass, 2).infinite == pytest.approx(together, abs=1e-12)


# Poisson pairs: discretised from above, and the replace pair really is the worst one.


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
