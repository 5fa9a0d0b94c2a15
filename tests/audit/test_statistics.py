"""Bounds against closed forms and against the rates at which they may be wrong; questions against what they are to see.

On production a check fails with chance 1e-5 for another seed.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats
from targets import synthetic

from fedspa.audit.statistics import (
    columns,
    cosine_limit,
    cosines,
    epsilon_lower,
    epsilon_lower_one_run,
    law_question,
    mu_lower,
    overlap_question,
    proportion,
    sampler_questions,
    shares_question,
    sizes_question,
    variance_limits,
)

ALPHA = 1e-5


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
    """The truth with chance e/(1 + e): ε is exactly 1, and more is never shown."""
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


def test_cosines_see_a_vector_that_comes_twice():
    vectors = np.random.default_rng(0).normal(size=(20, 100))
    assert cosines("", vectors, "").answer(ALPHA).holds
    vectors[3] = -vectors[17]
    assert cosines("", vectors, "").answer(ALPHA).lower_bound == pytest.approx(1.0)
    assert not cosines("", vectors, "").answer(ALPHA).holds


def test_a_large_models_coordinates_are_looked_at_to_the_last():
    draws = np.random.default_rng(0).normal(size=(100, 1000))
    assert columns("", draws).answer(ALPHA).holds
    draws[:, 999] = draws[:, 998]
    assert not columns("", draws).answer(ALPHA).holds


@pytest.mark.parametrize("law", [stats.norm, stats.binom(5, 0.5)])
def test_the_distance_from_a_law_is_that_of_kolmogorov_and_smirnov(law):
    """Of a discrete law too, whose distribution function jumps; scipy's own is for continuous laws."""
    values = law.rvs(size=300, random_state=1)
    grid = np.concatenate([values, np.nextafter(values, -np.inf)])
    expected = max(abs((values <= point).mean() - law.cdf(point)) for point in grid)
    seen = law_question("", law, [values], "").answer(ALPHA)
    assert seen.lower_bound == pytest.approx(expected)
    assert seen.claimed == pytest.approx(math.sqrt(math.log(2 / ALPHA) / 600))


def test_the_worst_of_several_samples_counts():
    samples = [stats.norm.rvs(size=2000, random_state=1), stats.norm.rvs(size=500, random_state=2) + 0.5]
    seen = law_question("", stats.norm, samples, "").answer(ALPHA)
    assert not seen.holds
    assert seen.claimed == pytest.approx(math.sqrt(math.log(4 / ALPHA) / 1000))


def test_a_record_drawn_too_often_is_seen():
    plan = synthetic().plan
    counts = np.full(plan.records, 500)
    assert shares_question("", plan, counts, 1000).answer(ALPHA).holds
    counts[0] = 600
    assert not shares_question("", plan, counts, 1000).answer(ALPHA).holds


def test_overlaps_on_either_side_are_seen():
    plan = synthetic().plan
    expected = round(1000 * plan.records * plan.event.rate**2)
    assert overlap_question("", plan, expected, 1000).answer(ALPHA).holds
    assert not overlap_question("", plan, round(0.9 * expected), 1000).answer(ALPHA).holds
    assert not overlap_question("", plan, round(1.1 * expected), 1000).answer(ALPHA).holds


@pytest.mark.parametrize(("records", "batch", "pairs"), [(32, 1, 150), (32, 2, 150), (16, 8, 200)])
def test_overlaps_of_fixed_batches_alarm_no_oftener_than_stated(records, batch, pairs):
    """At the rate of a single question, by the exact law of the sum: a normal law in its place alarms on batches of
    one 15 times too often."""
    plan = replace(synthetic(sampling="fixed").plan, records=records, batch=batch)
    one = stats.hypergeom(records, batch, batch).pmf(np.arange(batch + 1))
    law = np.fft.irfft(np.fft.rfft(one, pairs * batch + 1) ** pairs, pairs * batch + 1)
    alarming = [not overlap_question("", plan, both, pairs).answer(ALPHA).holds for both in range(pairs * batch + 1)]
    assert 0 < law[alarming].sum() <= ALPHA


@pytest.mark.parametrize(("records", "batch", "draws"), [(64, 2, 150), (60_000, 1, 100), (64, 32, 150)])
def test_sizes_of_poisson_batches_alarm_no_oftener_than_stated(records, batch, draws):
    """χ² over cells of some ten expected batches alarmed up to three times as often as its law says."""
    plan = replace(synthetic().plan, records=records, batch=batch, delta=1e-6)
    rng, alpha, audits = np.random.default_rng(0), 1e-2, 400
    drawn = rng.binomial(records, plan.event.rate, size=(audits, draws))
    alarms = sum(not sizes_question("", plan, sizes, 1).answer(alpha).holds for sizes in drawn)
    assert alarms <= stats.binom.isf(1e-6, audits, alpha)


@pytest.mark.parametrize("parts", [1, 2])
def test_a_record_that_is_twice_in_one_batch_is_seen(parts):
    """Whatever the sizes: one of 100 pairs of steps is enough."""
    drawn = np.zeros((parts, 100, 16), dtype=np.int64)
    drawn[:, :, :4] = 2 // parts
    (sound,) = (q for q in sampler_questions("", synthetic().plan, drawn) if q.name == ": twice")
    assert sound.answer(0.0).holds
    drawn[0, 7, 3] += 1
    (twice,) = (q for q in sampler_questions("", synthetic().plan, drawn) if q.name == ": twice")
    assert not twice.answer(0.0).holds


def test_one_batch_of_another_size_breaks_fixed():
    plan = synthetic(sampling="fixed").plan
    sizes = np.full(100, plan.batch)
    assert sizes_question("", plan, sizes, 1).answer(ALPHA).holds
    sizes[7] += 1
    assert not sizes_question("", plan, sizes, 1).answer(ALPHA).holds
