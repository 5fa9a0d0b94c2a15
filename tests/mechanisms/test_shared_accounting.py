"""Sums of discrete Gaussian shares, enumerated: no pair of neighbours is easier to tell apart than the accounting says,
and its ε is hardly more than that of a Gaussian with the same noise."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise, product

import mpmath
import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import special

from fedspa.mechanisms.discrete_gaussian import plan as shared_accounting
from fedspa.mechanisms.discrete_gaussian import release as noise
from fedspa.mechanisms.discrete_gaussian.plan import FINE, SIGMA, DiscreteGaussianEvent, SharedNoise, stretch
from fedspa.privacy import accounting, filter
from fedspa.randomness import streams as inversion

Array = NDArray[np.float64]
# What the tables leave out of each law, and float64's rounding of the sums here.
TINY = 1e-14
WINDOW = 400


def share(fraction: int) -> Array:
    """One share's law on −WINDOW … WINDOW, as it is drawn: the lengths that the table gives to its values."""
    ends = [0, *noise._ends(fraction), 2**inversion.BITS]
    law = np.zeros(2 * WINDOW + 1)
    first = WINDOW - noise.REACH
    law[first : first + len(ends) - 1] = [float(high - low) / 2.0**inversion.BITS for low, high in pairwise(ends)]
    return law


def summed_law(point: float, others: tuple[int, ...]) -> Array:
    """The sum of one agent's share and others': its own centre is `point` steps of the grid, between two of which it is
    rounded at random; theirs are given."""
    low, part = divmod(point, 1)
    laws = [np.roll(share(int(at) % FINE), int(at) // FINE) for at in (low, low + 1)]
    law = (1 - part) * laws[0] + part * laws[1]
    for other in others:
        law = np.convolve(law, share(other))[WINDOW:-WINDOW]
    return law


def gaussian_delta(shift: float, gamma: Array) -> Array:
    """H_γ of N(μ, 1) against N(0, 1)."""
    log = np.log(gamma)
    return np.asarray(special.ndtr(shift / 2 - log / shift) - gamma * special.ndtr(-shift / 2 - log / shift))


def hockey_stick(p: Array, q: Array, gamma: Array) -> Array:
    return np.array([np.maximum(p - each * q, 0).sum() for each in gamma])


@pytest.mark.parametrize("others", [(), (0,), (311, 1000)])
@pytest.mark.parametrize("moved", [0.25, 3.5, 300.0, 1500.5, 4000.0])
def test_no_pair_is_easier_to_tell_apart_than_its_gaussian(others: tuple[int, ...], moved: float) -> None:
    """Places of the pair on the grid and in between, both directions, and γ out to where nothing is left to tell."""
    honest = 1 + len(others)
    shift = stretch(honest) * moved / FINE / (SIGMA * math.sqrt(honest))
    gamma = np.exp(np.linspace(-12, 12, 241) * max(shift, shift**2))
    allowed = gaussian_delta(shift, gamma)
    for start in (0.0, 0.4, 0.75, 100.0, 511.9, 1023.0, 1023.5):
        laws = summed_law(start, others), summed_law(start + moved, others)
        for p, q in (laws, laws[::-1]):
            assert (hockey_stick(p, q, gamma) <= allowed + TINY).all()


@pytest.mark.parametrize("bound", [32_000, 20_000])
@pytest.mark.parametrize("delta", [1e-6, 1e-20])
def test_a_large_floor_holds_for_the_law_as_it_is_drawn(bound: int, delta: float) -> None:
    """Where a record moves a share by many standard deviations, what one law leaves out is likely under the other."""

    def law(centre: int) -> dict[int, Fraction]:
        ends = [0, *noise._ends(centre % FINE), 2**inversion.BITS]
        first = centre // FINE - noise.REACH
        return {first + i: Fraction(high - low, 2**inversion.BITS) for i, (low, high) in enumerate(pairwise(ends))}

    event = DiscreteGaussianEvent(records=100, active=1, bound=bound)
    gamma = Fraction(math.exp(accounting.epsilon({event: 1}, delta, neighbours="add-remove")))
    laws = law(0), law(bound)
    for p, q in (laws, laws[::-1]):
        assert sum(max(Fraction(0), chance - gamma * q.get(y, 0)) for y, chance in p.items()) <= delta


@pytest.mark.parametrize("moved", [(1024.0, 300.5), (0.5, 0.5), (2048.0, 0.25)])
def test_two_coordinates_add_up_as_gaussians_do(moved: tuple[float, float]) -> None:
    shift = stretch(1) * math.hypot(*moved) / FINE / SIGMA
    gamma = np.exp(np.linspace(-6, 6, 61) * max(shift, shift**2))
    for start in product((0.0, 0.5, 700.25), repeat=2):
        p, q = (
            np.outer(*(summed_law(at, ())[WINDOW - 90 : WINDOW + 90] for at in both))
            for both in (start, (start[0] + moved[0], start[1] + moved[1]))
        )
        for one, other in ((p, q), (q, p)):
            assert (hockey_stick(one, other, gamma) <= gaussian_delta(shift, gamma) + TINY).all()


@pytest.mark.parametrize("honest", [1, 8])
def test_the_stretch_is_needed(honest: int) -> None:
    """Without κ the bound is wrong, if by little: the law has no more than the variance of its Gaussian, and lies on a
    grid."""
    others = (0,) * (honest - 1)
    shift = 1 / (SIGMA * math.sqrt(honest))
    p, q = summed_law(FINE, others), summed_law(0, others)
    gamma = np.exp(np.linspace(-2, 2, 401) * shift)
    found = hockey_stick(p, q, gamma)
    assert (found > gaussian_delta(shift, gamma) + TINY).any()
    assert (found <= gaussian_delta(shift * stretch(honest), gamma) + TINY).all()


def test_moments_are_the_gaussians() -> None:
    """Rényi divergences of the law that is not cut off: at whole steps of the grid those of a Gaussian to many digits,
    in between below the ε of the accounting."""
    n = np.arange(-145, 146)
    for moved in (0.3, 1.0, 700.0, 1024.0, 1900.5):
        low, part = divmod(moved, 1)
        laws = [np.exp(-((n - at / FINE) ** 2) / (2 * SIGMA**2)) for at in (0, low, low + 1)]
        base, down, up = (law / law.sum() for law in laws)
        mixed = (1 - part) * down + part * up
        for order in (1.5, 2.0, 6.0, 20.0):
            exact = order * (moved / FINE / SIGMA) ** 2 / 2
            allowed = order * (SharedNoise(1, 1, 1).gaussian_shift("add-remove") * moved) ** 2 / 2
            for p, q in ((mixed, base), (base, mixed)):
                log = order * np.log(p) + (1 - order) * np.log(q)
                found = np.logaddexp.reduce(log) / (order - 1)
                assert found <= allowed + 1e-12
                if part == 0:
                    assert math.isclose(found, exact, rel_tol=1e-9, abs_tol=1e-12)


def test_what_the_theorem_leaves_out_is_taken_off_delta() -> None:
    """k·5·10⁻³² a release: a δ below has no ε by any accountant, and one that is far above does not feel it."""
    event = DiscreteGaussianEvent(records=100, active=10**6, bound=2048, members=10, colluders=2)
    for times, delta, told in ((1, 4e-26, False), (1, 1e-25, True), (10, 4e-25, False), (10, 1e-5, True)):
        assert math.isfinite(accounting.epsilon({event: times}, delta, neighbours="add-remove")) == told
        # The filter has a sixteenth of δ for it.
        assert filter.fits({event: times}, 1e6, 16 * delta, "add-remove") == told


def test_the_stretch_is_right_to_nine_digits() -> None:
    """Against 60 digits, at the place of the grid where it is largest and at others."""
    deviation = SIGMA * math.sqrt(3)
    found = []
    with mpmath.workdps(60):
        for t in (-19.9 * deviation, -5 * deviation, 0.0, 0.5, 8 * deviation, 19.9 * deviation):
            step = round(t * FINE)
            points = [mpmath.mpf(step - i) / FINE for i in (0, 1)]
            tails = [
                mpmath.nsum(lambda j, at=at: mpmath.exp(-((at - j) ** 2) / (2 * SIGMA**2 * 3)), [0, 600]) / _norm()
                if t <= 0
                else mpmath.nsum(lambda j, at=at: mpmath.exp(-((at + j) ** 2) / (2 * SIGMA**2 * 3)), [1, 600]) / _norm()
                for at in points
            ]
            q = [-mpmath.sqrt(2) * _upper_quantile(2 * tail) for tail in tails]
            least = min(mpmath.npdf(each) for each in q)
            found.append(float(abs(tails[0] - tails[1]) / least * FINE * deviation))
    assert max(found) <= stretch(3)
    assert math.isclose(max(found), stretch(3), rel_tol=1e-3)


def _norm() -> mpmath.mpf:
    return mpmath.sqrt(2 * mpmath.pi * SIGMA**2 * 3)


def _upper_quantile(p: mpmath.mpf) -> mpmath.mpf:
    """erfc⁻¹(p): Newton's steps from float64's."""
    x = mpmath.mpf(-float(special.ndtri_exp(float(mpmath.log(p / 2)))) / math.sqrt(2))
    for _ in range(5):
        x += (mpmath.erfc(x) - p) * mpmath.exp(x**2) * mpmath.sqrt(mpmath.pi) / 2
    return x


@pytest.mark.parametrize(("honest", "most"), [(1, 1.005), (2, 1.003), (8, 1.0013), (80, 1.0004)])
def test_a_sum_costs_hardly_more_than_a_gaussian(honest: int, most: float) -> None:
    assert 1 + 1 / (24 * SIGMA**2 * honest) < stretch(honest) < most


def test_more_noise_costs_less_and_more_of_a_record_costs_more() -> None:
    def cost(bound: int, honest: int, neighbours: str = "add-remove") -> float:
        return SharedNoise(bound, honest, 1).gaussian_shift(neighbours)  # type: ignore[arg-type]

    assert cost(1000, 8) < cost(1001, 8) < cost(1000, 7) < cost(1000, 1)
    assert cost(1000, 8, "replace-one") == 2 * cost(1000, 8)
    assert cost(1000, 10**6) == cost(1000, shared_accounting._MOST_HONEST)
    assert cost(2**20, 1) == math.inf  # further than what κ was found for
