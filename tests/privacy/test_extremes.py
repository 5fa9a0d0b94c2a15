"""Any numbers, plausible or not: an ε that is no NaN and not negative, infinity, or an error of one line. No traceback,
no numpy warning, no hang."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedspa.algorithms.cpsgd.plan import BinomialEvent
from fedspa.errors import PrivacyError
from fedspa.mechanisms.gaussian.plan import TERMS, GaussianEvent, GaussianPlan, compare, noise_multiplier
from fedspa.privacy import accounting
from fedspa.privacy.budget import FirstPlan, PrivacyBudget, admits, total
from fedspa.privacy.event import MOST

# Of all sizes, and beyond them: floats by their exponent, whole numbers by their digits.
ANY_FLOAT = st.one_of(
    st.floats(-310, 308).map(lambda power: 10.0**power),
    st.sampled_from([0.0, -1.0, math.nan, math.inf, -math.inf, 5e-324, 1.7e308, 1 - 2**-53]),
)
ANY_INT = st.one_of(
    st.integers(-2, 20), st.integers(0, 16).map(lambda power: 10**power), st.sampled_from([2**63, 10**30])
)
COUNT = st.one_of(st.integers(1, 20), st.integers(0, 15).map(lambda power: 10**power))
NOISE = st.floats(-320, 308.2).map(lambda power: max(10.0**power, 5e-324))
DELTA = st.one_of(st.floats(-307, -0.01).map(lambda power: 10.0**power), st.just(1 - 2**-53))


@pytest.fixture(autouse=True)
def no_warnings() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def answer(asked: Callable[[], float]) -> float:
    """What `asked` gives; ∞ where it is refused in one line."""
    said, found = "", math.inf
    try:
        found = asked()
    except PrivacyError as error:
        said = str(error)
    assert len(said) < 400
    assert "\n" not in said
    assert found >= 0  # neither negative nor NaN
    return found


@given(st.sampled_from(["poisson", "fixed", "shuffled"]), ANY_INT, ANY_INT, ANY_INT, ANY_FLOAT)
def test_events_of_any_numbers(sampling: Any, batch: int, records: int, steps: int, noise: float) -> None:
    rate = answer(lambda: GaussianEvent(sampling, batch, records, steps, noise).rate)
    assert 0 < rate <= 1 or rate == math.inf


@given(ANY_INT, ANY_INT, ANY_INT, ANY_INT, ANY_INT, ANY_INT)
def test_binomial_events_of_any_numbers(b: int, m: int, steps: int, d: int, bits: int, trials: int) -> None:
    answer(lambda: float(BinomialEvent(b, m, steps, d, bits, trials).rate))


@given(ANY_INT, ANY_INT, ANY_INT, ANY_INT, ANY_INT, ANY_FLOAT, ANY_FLOAT, ANY_FLOAT)
def test_plans_of_any_numbers(
    d: int, k: int, batch: int, records: int, rounds: int, noise: float, clip: float, delta: float
) -> None:
    answer(
        lambda: (
            GaussianPlan(d, k, "l2", clip, "poisson", batch, records, 3, rounds, noise, "add-remove", delta).compression
        )
    )


def event_of(sampling: Any, batch: int, records: int, steps: int, noise: float) -> GaussianEvent:
    return GaussianEvent(sampling, min(batch, records), records, steps, noise)


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(TERMS), COUNT, COUNT, COUNT, COUNT, NOISE, DELTA)
def test_epsilon_of_any_event(by: Any, batch: int, m: int, steps: int, times: int, noise: float, delta: float) -> None:
    sampling, neighbours = by
    event = event_of(sampling, batch, m, steps, noise)
    answer(lambda: accounting.epsilon({event: times}, delta, neighbours=neighbours))


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(TERMS), COUNT, COUNT, COUNT, COUNT, NOISE, DELTA, ANY_FLOAT)
def test_caps_of_any_event(
    by: Any, batch: int, m: int, steps: int, times: int, noise: float, delta: float, epsilon: float
) -> None:
    sampling, neighbours = by
    event = event_of(sampling, batch, m, steps, noise)
    other = replace(event, records=event.records + 1) if event.records < MOST else replace(event, steps=1)
    spent, first = Counter({event: times}) + Counter({other: 1}), FirstPlan(event, times)
    found = answer(lambda: total(spent, delta, neighbours, first).epsilon)
    answer(lambda: float(admits({event: times}, PrivacyBudget(epsilon, delta, neighbours), None)))
    if 0 < found < math.inf:
        assert admits(spent, PrivacyBudget(found, delta, neighbours), first)


@pytest.mark.parametrize("epsilon", [1e-300, 1e300])
@pytest.mark.parametrize("delta", [1e-300, 1e-5])
def test_calibration_at_any_numbers(epsilon: float, delta: float) -> None:
    shape = {"sampling": "poisson", "batch": 10, "records": 600, "steps": 300, "participations": 5}
    answer(lambda: noise_multiplier(epsilon, delta, **shape, neighbours="add-remove"))  # type: ignore[arg-type]


@pytest.mark.long
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(COUNT, COUNT, COUNT, COUNT, st.one_of(NOISE, st.none()), DELTA, ANY_FLOAT)
def test_the_whole_table_at_any_numbers(
    batch: int, m: int, steps: int, times: int, noise: float | None, delta: float, epsilon: float
) -> None:
    setting = {"batch": min(batch, m), "records": m, "local_steps": steps, "participations": times, "delta": delta}

    def table() -> float:
        rows = compare(**setting, noise=noise, epsilon=epsilon if noise is None else None)  # type: ignore[arg-type]
        assert not any(math.isnan(row.epsilon) for row in rows)
        return 0.0

    answer(table)


def test_no_noise_worth_the_name_is_never_free() -> None:
    """Where the accountant gives up on sampling the answer is that without it, from above."""
    for sampling, neighbours in TERMS:
        costs = [
            accounting.epsilon({GaussianEvent(sampling, 1, 10, 5, noise): 1}, 1e-5, neighbours=neighbours)
            for noise in (1e-1, 1e-2, 1.1e-3, 0.9e-3, 1e-4, 1e-100, 1e-200)
        ]
        assert costs == sorted(costs)
        assert costs[-1] == math.inf


def test_more_noise_than_any_costs_no_more_than_much() -> None:
    for noise in (1e8, 1e9, 1e150, 1e300):
        for batch in (1, 10):
            event = GaussianEvent("poisson", batch, 10, 5, noise)
            assert 0 <= accounting.epsilon({event: 1}, 1e-12, neighbours="add-remove") < 1e-6
