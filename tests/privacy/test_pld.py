"""Composition on the grid: against the exact Gaussian, plain convolution, and the edges of floating point."""

from __future__ import annotations

import math

import numpy as np
import pytest
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
