"""Bounds against closed forms and against the rates at which they may be wrong."""

import math

import numpy as np
import pytest
from scipy import stats

from fedspa.audit.bounds import (
    cosine_limit,
    epsilon_lower,
    epsilon_lower_one_run,
    mu_lower,
    proportion,
    variance_limits,
)


def test_proportion_has_its_closed_form_at_the_ends():
    assert proportion(0, 50, 0.02) == (0.0, pytest.approx(1 - 0.01 ** (1 / 50)))
    assert proportion(50, 50, 0.02) == (pytest.approx(0.01 ** (1 / 50)), 1.0)


def test_proportion_covers_the_truth_at_its_rate():
    """Exactly: the chance that a Binomial(40, 0.3) count gives an interval without 0.3 is at most α."""
    missed = sum(
        stats.binom.pmf(count, 40, 0.3)
        for count in range(41)
        if not proportion(count, 40, 0.1)[0] <= 0.3 <= proportion(count, 40, 0.1)[1]
    )
    assert 0 < missed <= 0.1


@pytest.mark.parametrize("mu", [0.2, 1.0, 2.0])
def test_mu_lower_stays_below_the_truth_and_comes_near(mu):
    n, rate = 200_000, stats.norm.cdf(mu / 2)
    bound = mu_lower(round(rate * n), round((1 - rate) * n), n, 1e-4)
    assert mu - 0.03 < bound < mu
    # 2,000 repetitions at α = 0.05: more than 140 misses have a chance of 1e-4.
    rng = np.random.default_rng(1)
    hits, false_hits = rng.binomial(500, rate, 2000), rng.binomial(500, 1 - rate, 2000)
    assert sum(mu_lower(int(h), int(f), 500, 0.05) > mu for h, f in zip(hits, false_hits)) <= 140


def test_mu_lower_is_zero_for_a_coin():
    assert mu_lower(50, 50, 100, 0.05) == 0.0


def test_epsilon_lower_of_randomised_response():
    """Truth told with chance e/(1 + e): ε is exactly 1, and more is never shown."""
    n, rate = 1_000_000, math.e / (1 + math.e)
    bound = epsilon_lower(0.0, round(rate * n), round((1 - rate) * n), n, 1e-4)
    assert 0.98 < bound < 1.0
    assert epsilon_lower(0.2, round(rate * n), round((1 - rate) * n), n, 1e-4) < bound
    assert epsilon_lower(0.0, 100, 900, 1000, 0.05) == 0.0


def test_one_run_bound_has_its_closed_form_when_all_guesses_are_right():
    """β = (e^ε/(1 + e^ε))^r at δ = 0, hence ε = logit(α^(1/r))."""
    rate = 1e-3 ** (1 / 64)
    assert epsilon_lower_one_run(100, 64, 64, 0.0, 1e-3) == pytest.approx(math.log(rate / (1 - rate)), abs=1e-9)


def test_one_run_bound_shrinks_with_delta_and_needs_better_than_a_coin():
    free, paid = (epsilon_lower_one_run(1000, 200, 180, delta, 1e-3) for delta in (0.0, 1e-6))
    assert 0 < paid < free
    assert epsilon_lower_one_run(1000, 200, 105, 0.0, 1e-3) == 0.0
    assert epsilon_lower_one_run(1000, 200, 0, 0.0, 1e-3) == 0.0


def test_one_run_bound_covers_randomised_response():
    """ε = 1 for each of 400 canaries, all guessed: at most α of all outcomes may give a bound above 1 (exact sum)."""
    rate = math.e / (1 + math.e)
    wrong = sum(
        stats.binom.pmf(correct, 400, rate)
        for correct in range(401)
        if epsilon_lower_one_run(400, 400, correct, 0.0, 0.05) > 1
    )
    assert 0.01 < wrong <= 0.05


def test_variance_limits_are_a_chi_square_interval():
    low, high = variance_limits(100, 0.05)
    assert low == pytest.approx(0.74222, abs=1e-5)
    assert high == pytest.approx(1.29561, abs=1e-5)


def test_cosine_limit_is_exceeded_at_its_rate():
    """In three dimensions a cosine is uniform on [−1, 1] (Archimedes): the limit is 1 − α."""
    assert cosine_limit(3, 1, 0.1) == pytest.approx(0.9)
    assert cosine_limit(3, 10, 0.1) == pytest.approx(0.99)
