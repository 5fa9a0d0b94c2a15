"""Fixed-size sampling: the dominating pair against the mechanism itself, a second construction and a lower twin."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from dp_accounting.pld import pld_pmf
from scipy import special

from fedspa.privacy.pld import FixedSize, LossMass, composed_epsilon, mixture_loss


def recipe(rate: float, shift: float, epsilon: np.ndarray) -> np.ndarray:
    """δ(ε) of the dominating pair, from its formula and not from its cells."""
    positive = np.abs(epsilon)
    t = np.log1p(np.expm1(positive) / rate)
    h = special.ndtr(shift / 2 - t / shift) - np.exp(t + special.log_ndtr(-shift / 2 - t / shift))
    delta = rate * h
    return np.where(epsilon >= 0, delta, -np.expm1(-positive) + np.exp(-positive) * delta)


def profile(part: LossMass, epsilon: float) -> float:
    losses = part.losses
    return float(part.infinite + part.mass[losses > epsilon] @ -np.expm1(epsilon - losses[losses > epsilon]))


def second_construction(rate: float, shift: float, steps: int, delta: float, interval: float) -> float:
    """dp_accounting's connect-the-dots on the recipe, and its own composition."""
    top = math.ceil(math.log1p(rate * math.expm1(shift * (shift / 2 + 9))) / interval)
    deltas = recipe(rate, shift, np.arange(-top, top + 1) * interval)
    pmf = pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(interval, -top, top, deltas)
    return float(pmf.self_compose(steps, 1e-15).get_epsilon_for_delta(delta))


def lower_twin(rate: float, shift: float, steps: int, delta: float, interval: float) -> float:
    """Every loss rounded down, and what is beyond the reach to the last cell: the true ε cannot be below this."""
    top = math.ceil(math.log1p(rate * math.expm1(shift * (shift / 2 + 9))) / interval)
    edges = np.arange(0, top + 1) * interval
    x = np.log1p(np.expm1(edges) / rate) / shift + shift / 2
    more = (1 - rate) * special.ndtr(-x) + rate * special.ndtr(shift - x)  # P(L > edge)
    less = special.ndtr(-x)  # P(L < −edge)
    positive = more - np.append(more[1:], 0.0)
    negative = less - np.append(less[1:], 0.0)
    # (e_j, e_{j+1}] goes to e_j; [−e_{j+1}, −e_j) goes to −e_{j+1}; what is left is exactly 0
    rest = 1 - positive.sum() - negative.sum()
    mass = np.concatenate((negative[::-1], positive))
    mass[top + 1] += rest
    pmf = pld_pmf.DensePLDPmf(interval, -(top + 1), mass, 0.0, pessimistic_estimate=False)
    return float(pmf.self_compose(steps, 0).get_epsilon_for_delta(delta))


@pytest.mark.parametrize(("rate", "shift"), [(1e-4, 0.01), (0.3, 0.5), (0.9, 0.01), (0.9, 5.0)])
def test_discretised_profile_lies_above_the_recipe_and_near_it(rate: float, shift: float) -> None:
    part = FixedSize(rate, shift).discretise(2.0**-10, 8.0)
    assert part.mass.min() >= 0
    assert part.mass.sum() + part.infinite == pytest.approx(1, abs=1e-12)
    for epsilon in np.linspace(-1, 1, 41) * part.losses[-1]:
        exact = float(recipe(rate, shift, np.array(epsilon)))
        assert profile(part, epsilon) >= exact * (1 - 1e-9) - 1e-15
        # At most a chord above: on a grid of 2^-10 that is below 2^-10/8 of e^ε, and of the mass there is.
        assert profile(part, epsilon) <= exact + 2.0**-10


@pytest.mark.parametrize("noise", [0.537, 2.102, 17.184])
def test_rounding_of_the_shift_adds_no_cell(noise: float) -> None:
    """2/noise is a number whose square is rounded one way by a power and another by a product. Where the grid's first
    loss, of x = μ/2, came out below 0, all others were a cell off, and ε up to 2.4 times what it is."""
    part = FixedSize(0.1, 2 / noise).discretise(2.0**-8, 8.0)
    assert part.offset == -(len(part.mass) // 2)
    assert float(part.mass.sum()) + part.infinite == pytest.approx(1, abs=1e-12)
    less, own, more = (composed_epsilon([(FixedSize(0.1, 2 / (noise * f)), 20)], 1e-3) for f in (0.999, 1, 1.001))
    assert less > own > more


def test_every_noise_of_four_digits_begins_its_grid_at_loss_0() -> None:
    noises = np.concatenate([np.arange(1000, 10_000) / 10.0**digits for digits in (1, 2, 3, 4)])
    assert all(float(mixture_loss(0.1, shift, np.array([shift / 2]))[0]) == 0 for shift in (2 / noises).tolist())


def test_interval_moves_the_profile_by_its_square_only() -> None:
    deltas = [profile(FixedSize(0.1, 1.0).discretise(2.0**-k, 8.0), 0.3) for k in (4, 6, 14)]
    coarse, fine = deltas[0] - deltas[2], deltas[1] - deltas[2]
    assert 0 < fine < coarse / 8


@pytest.mark.parametrize(("steps", "delta"), [(1, 1e-6), (8, 1e-3)])
@pytest.mark.parametrize(("rate", "shift"), [(1 / 60, 0.5), (0.5, 1.0), (1e-3, 3.0)])
def test_between_a_lower_twin_and_the_second_construction(rate: float, shift: float, steps: int, delta: float) -> None:
    ours = composed_epsilon([(FixedSize(rate, shift), steps)], delta)
    coarse = second_construction(rate, shift, steps, delta, 1e-3)
    scale = max(ours, 0.01)
    lower = lower_twin(rate, shift, steps, delta, 2e-3 * scale / steps)
    assert lower <= ours
    assert ours - lower <= 2.5e-3 * scale
    assert ours <= coarse * (1 + 2e-5) + 1e-9
    assert coarse - ours <= 0.01 * scale + 1e-3


@pytest.mark.parametrize(
    ("rate", "shift", "steps"), [(1 / 60, 2 / 4.12, 1500), (1 / 60, 2 / 5.5, 3000), (0.1, 2 / 17, 1000)]
)
def test_second_construction_agrees_at_the_papers_settings(rate: float, shift: float, steps: int) -> None:
    ours = composed_epsilon([(FixedSize(rate, shift), steps)], 1e-3)
    assert ours == pytest.approx(second_construction(rate, shift, steps, 1e-3, 1e-4), rel=2e-4)


def test_every_small_database_is_below_the_recipe() -> None:
    """All samples of 2 of 4 records written out: values in {−1, 0, 1}, one replaced, H_γ by quadrature, both ways."""
    noise, records, batch = 1.3, 4, 2
    x = np.linspace(-14, 14, 5601)

    def output(values: tuple[float, ...]) -> np.ndarray:
        sums = [sum(sample) for sample in itertools.combinations(values, batch)]
        return np.mean([np.exp(-(((x - s) / noise) ** 2) / 2) for s in sums], axis=0) / (noise * math.sqrt(2 * math.pi))

    tightest = 0.0
    for others in itertools.combinations_with_replacement((-1.0, 0.0, 1.0), records - 1):
        for a, b in itertools.permutations((-1.0, 0.0, 1.0), 2):
            p, q = output((*others, a)), output((*others, b))
            for epsilon in (-0.5, -0.1, 0.0, 0.1, 0.5, 1.0):
                measured = float(np.maximum(p - math.exp(epsilon) * q, 0).sum() * (x[1] - x[0]))
                allowed = float(recipe(batch / records, 2 / noise, np.array(epsilon)))
                assert measured <= allowed + 1e-6  # the quadrature's own error
                if epsilon > 0:
                    tightest = max(tightest, measured / allowed)
    assert tightest > 0.999  # the bound is met: half a sensitivity less would be caught


def test_monte_carlo_of_the_mechanism_stays_below() -> None:
    """Three steps on the worst pair: +1 among −1's. Likelihood ratios are exact, so δ̂ has only sampling error.

    δ̂ is a mean of [0, 1] values over 400 000 draws with mean about 0.01: standard error below 1.6e-4, five of them
    allowed; the false-alarm rate is below 1e-6.
    """
    batch, records, noise, steps, delta = 3, 12, 2.0, 3, 0.01
    rng = np.random.default_rng(20210821)
    draws = 400_000
    sampled = rng.random((draws, steps)) < batch / records  # whether a uniform 3 of 12 hold the one record
    outputs = -batch + 2.0 * sampled + noise * rng.standard_normal((draws, steps))
    with_it = np.exp(-(((outputs + batch - 2) / noise) ** 2) / 2)
    without = np.exp(-(((outputs + batch) / noise) ** 2) / 2)
    q = batch / records
    losses = np.log((1 - q) + q * with_it / without).sum(axis=1)

    def measured(epsilon: float) -> float:
        return float(np.maximum(-np.expm1(epsilon - losses), 0).mean())

    ours = composed_epsilon([(FixedSize(q, 2 / noise), steps)], delta)
    assert measured(ours) <= delta + 8e-4
    assert measured(0.8 * ours) > delta + 8e-4
    half = composed_epsilon([(FixedSize(q, 1 / noise), steps)], delta)
    assert measured(half) > delta + 8e-4  # the add-remove sensitivity in a replace-one account is caught
