"""What events cost together, and the limits on it. Over a ledger's file: test_ledger.py; under attack:
tests/attacks/test_adaptive_choice.py."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedspa.errors import PrivacyError
from fedspa.mechanisms.gaussian.plan import GaussianEvent
from fedspa.privacy import accounting, filter
from fedspa.privacy.budget import (
    BY_FILTER,
    BY_FILTER_SO_FAR,
    FirstPlan,
    PrivacyBudget,
    admits,
    shown,
    shown_digits,
    total,
)
from fedspa.privacy.event import Event, Neighbours
from reproduction.cpsgd.plan import BinomialEvent

POISSON, FIXED = (GaussianEvent(sampling, 10, 600, 3, 2.0) for sampling in ("poisson", "fixed"))
ROUNDED = BinomialEvent(10, 600, 1, 100, 2, 10_000)
# ε = 1.000 at δ = 1e-3 by PLD for 20 participations.
PLAN = FirstPlan(GaussianEvent("poisson", 50, 500, 50, 8.2), 20)
OTHER = replace(PLAN.event, noise_multiplier=9.0)


@pytest.mark.parametrize(
    ("epsilon", "delta", "neighbours"),
    [
        *((epsilon, 1e-3, "add-remove") for epsilon in (0, -1, math.nan, math.inf)),
        *((1, delta, "add-remove") for delta in (0, 1, math.nan)),
        (1, 1e-3, "swap"),
    ],
)
def test_cap_is_checked(epsilon: float, delta: float, neighbours: str) -> None:
    with pytest.raises(PrivacyError, match="the budget's"):
        PrivacyBudget(epsilon, delta, neighbours)  # type: ignore[arg-type]


@pytest.mark.parametrize("batch", [1, 50])
@pytest.mark.parametrize(
    "noise",
    [
        0.001,
        0.02,
    ],
)
def test_hardly_any_noise_has_an_epsilon_and_is_no_error(noise: float, batch: int) -> None:
    """Losses there are large and nearly alike, finer than floating point tells apart."""
    event = GaussianEvent("poisson", batch, 100, 1, noise)
    assert filter.least_epsilon({event: 1}, 1e-5, "add-remove") == math.inf  # a record is told apart by the noise's end
    assert not filter.fits({event: 1}, 1e5, 1e-5, "add-remove")


def test_fixed_size_batches_have_a_total_under_replace_one_only() -> None:
    both: dict[Event, int] = {POISSON: 2, FIXED: 1}
    for first in (None, FirstPlan(POISSON, 2)):
        with pytest.raises(PrivacyError, match="'replace-one'"):
            total(both, 1e-3, "add-remove", first)
        with pytest.raises(PrivacyError, match="'replace-one'"):
            admits(both, PrivacyBudget(9.0, 1e-3, "add-remove"), first)
    assert total(both, 1e-3, "replace-one", None).epsilon > accounting.epsilon(both, 1e-3, neighbours="replace-one")


@pytest.mark.parametrize(
    ("event", "neighbours"),
    [
        (PLAN.event, "add-remove"),
        (replace(PLAN.event, sampling="fixed"), "replace-one"),
        (ROUNDED, "replace-one"),
    ],
)
def test_a_plan_that_costs_exactly_the_cap_fits_and_nothing_else_does(event: Event, neighbours: Neighbours) -> None:
    plan = FirstPlan(event, 20)
    cost = accounting.epsilon({event: 20}, 1e-3, neighbours=neighbours)
    cap = PrivacyBudget(cost, 1e-3, neighbours)
    assert all(admits({event: n}, cap, plan) for n in (1, 19, 20))
    assert not admits({event: 20}, replace(cap, epsilon=cost * (1 - 1e-9)), plan)
    assert not admits({event: 20}, cap, None)  # nobody announced it
    assert not admits({event: 20}, cap, FirstPlan(event, 19))
    assert not admits({event: 21}, cap, plan)
    assert not admits({event: 19, replace(event, records=event.records + 1): 1}, cap, plan)
    assert total({event: 20}, 1e-3, neighbours, plan) == (cost, "pld (one plan)")
    assert total({event: 20}, 1e-3, neighbours, None).by == BY_FILTER


def test_what_was_done_of_a_plan_costs_the_filter_until_that_is_more() -> None:
    so_far = [total({PLAN.event: n}, 1e-3, "add-remove", PLAN) for n in range(1, 21)]
    assert [cost.epsilon for cost in so_far] == sorted(cost.epsilon for cost in so_far)
    assert (so_far[0].by, so_far[-1].by) == (BY_FILTER_SO_FAR, "pld (one plan)")
    assert so_far[0].epsilon < 0.3 < so_far[-1].epsilon
    for n, cost in enumerate(so_far, 1):
        assert admits({PLAN.event: n}, PrivacyBudget(cost.epsilon, 1e-3, "add-remove"), PLAN)


def test_a_plan_between_leaves_part_of_delta_once_it_is_given_up() -> None:
    """A cap of 1.1 is above PLD's 1.0 and below the filter's 1.19. Who keeps to the plan fits; who gives it up after 5
    of 20 has what it leaves of δ, which is less than all and more than nothing; who finished it has nothing."""
    cap = PrivacyBudget(1.1, 1e-3, "add-remove")
    assert not filter.fits(PLAN.seen, 1.1, 1e-3, "add-remove")
    assert admits({PLAN.event: 20}, cap, PLAN)
    assert not admits({PLAN.event: 20, OTHER: 1}, cap, PLAN)
    given_up = max(n for n in range(30) if admits({PLAN.event: 5, OTHER: n}, cap, PLAN))
    assert 0 < given_up < max(n for n in range(30) if admits({PLAN.event: 5, OTHER: n}, cap, None))


@settings(max_examples=12, deadline=None)
@given(
    st.integers(0, 30),
    st.integers(0, 30),
    st.integers(1, 30),
    st.sampled_from([1e-3, 1e-5]),
    st.sampled_from(["add-remove", "replace-one"]),
    st.booleans(),
)
def test_a_total_is_a_cap_that_admits_as_larger_ones_do(
    planned: int, others: int, announced: int, delta: float, neighbours: Neighbours, known: bool
) -> None:
    """But for caps between the two totals of a first plan that was left: they keep δ for all of it."""
    events = {event: n for event, n in ((PLAN.event, planned), (OTHER, others)) if n}
    first = FirstPlan(PLAN.event, announced) if known else None
    cost = total(events, delta, neighbours, first).epsilon
    if not events:
        return
    kept = (0.0, 0.0)
    if first is not None and not first.covers(events):
        kept = first.epsilon(delta, neighbours), filter.least_epsilon(first.seen, delta, neighbours)
    for larger in (1, 1.001, 1.05, 1.3, 2):
        if larger == 1 or not kept[0] <= cost * larger < kept[1]:
            assert admits(events, PrivacyBudget(cost * larger, delta, neighbours), first)
    # PLD of the same events is what they would cost had all been fixed beforehand.
    assert cost >= accounting.epsilon(events, delta, neighbours=neighbours) * (1 - 1e-9)


@given(st.floats(1e-12, 1e12))
def test_a_printed_epsilon_is_never_below_the_true_one(epsilon: float) -> None:
    assert epsilon <= float(shown(epsilon)) <= epsilon + 1.0001e-3 + 1e-15 * epsilon
    assert epsilon <= float(shown_digits(epsilon)) <= epsilon * 1.0011


@pytest.mark.parametrize(
    ("epsilon", "told"),
    [(1.00001, "1.001"), (0.000123456, "0.0001235"), (0.0, "0")],
)
def test_four_digits_are_rounded_up(epsilon: float, told: str) -> None:
    assert shown_digits(epsilon) == told
    assert shown_digits(math.inf) == "∞"
