"""What events cost together, and the limits on it. Over a ledger's file: test_ledger.py; under attack:
tests/attacks/test_adaptive_choice.py."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedspa.algorithms.cpsgd.plan import BinomialEvent
from fedspa.errors import PrivacyError
from fedspa.mechanisms import event_of
from fedspa.mechanisms.discrete_gaussian.plan import DiscreteGaussianEvent
from fedspa.mechanisms.gaussian.plan import GaussianEvent
from fedspa.privacy import accounting, filter
from fedspa.privacy.budget import (
    BY_FILTER,
    BY_FILTER_SO_FAR,
    FirstPlan,
    PrivacyBudget,
    Total,
    admits,
    exceeded_limit,
    total,
    worst_case_total,
)
from fedspa.privacy.event import Event, Neighbours, shown, shown_digits

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


# Two adversaries look at the same participations: the server with its colluders, and all others together.


LOCAL = BinomialEvent(10, 600, 1, 100, 2, 400)
SUMMED = replace(LOCAL, members=10, colluders=2)
GAUSSIAN = GaussianEvent("fixed", 10, 600, 1, 40.0)
SHARE = DiscreteGaussianEvent(600, 100, 500, 10, 2)
KINDS: list[Event] = [SUMMED, SHARE]


def worst_of(events: Mapping[Event, int], first: FirstPlan | None = None) -> Total:
    own = total(events, 1e-3, "replace-one", first)
    return worst_case_total(events, 1e-3, "replace-one", first, own)


def cohort(event: Event, members: int, colluders: int) -> Event:
    found: Event = replace(event, members=members, colluders=colluders)  # type: ignore[type-var]
    return found


@pytest.mark.parametrize("event", KINDS)
def test_a_worst_case_is_the_event_of_ones_own_noise(event: Event) -> None:
    assert (event.members, event.colluders, event.honest) == (10, 2, 8)
    assert (event.worst_case().members, event.worst_case().honest) == (0, 1)
    assert event.worst_case().worst_case() == event.worst_case()
    assert event.as_server_saw() == event
    assert event.with_noise("secure").as_server_saw() == event
    assert event_of(event.to_json()) == event
    assert str(event).endswith("in sums over 10 members with up to 2 colluding")


def test_what_is_not_aggregated_is_its_own_floor() -> None:
    for event in (LOCAL, GAUSSIAN):
        assert event.worst_case() == event
        assert (event.members, event.colluders, event.honest) == (0, 0, 1)


def test_a_text_has_no_cohort_where_there_is_none() -> None:
    text = '{"batch":10,"bits":2,"dimension":100,"kind":"binomial","records":600,"steps":1,"trials":400}'
    assert event_of(text) == LOCAL
    assert LOCAL.to_json() == text
    assert '"members":10' in SUMMED.to_json()
    with pytest.raises(PrivacyError, match="not canonical"):
        event_of(text.replace('"kind"', '"colluders":0,"kind"').replace('"records"', '"members":0,"records"'))


@pytest.mark.parametrize(
    "changes",
    [
        {"members": 1, "colluders": 0},
        {"members": 0},
        {"colluders": -1},
        {"members": 10.0},
    ],
)
def test_a_cohort_that_cannot_be_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(PrivacyError):
        replace(SUMMED, **changes)


@pytest.mark.parametrize("times", [2, 20])
def test_an_aggregation_has_the_epsilon_of_the_honest_members_trials(times: int) -> None:
    alone = replace(LOCAL, trials=8 * LOCAL.trials)
    assert cost({SUMMED: times}) == cost({alone: times}) < cost({SUMMED.worst_case(): times})


def cost(events: Mapping[Event, int]) -> float:
    return accounting.epsilon(events, 1e-3, neighbours="replace-one")


@pytest.mark.slow
@settings(max_examples=5, deadline=None)
@given(
    event=st.sampled_from(KINDS),
    members=st.integers(2, 40),
    colluders=st.integers(0, 38),
    times=st.integers(1, 6),
    others=st.integers(0, 3),
    announced=st.booleans(),
)
def test_the_floor_is_never_less_and_more_colluders_are_never_cheaper(
    event: Event, members: int, colluders: int, times: int, others: int, announced: bool
) -> None:
    colluders = min(colluders, members - 2)
    one, more, larger = (cohort(event, members + extra, colluders + lost) for extra, lost in ((0, 0), (0, 1), (1, 0)))
    priced = []
    for seen in (larger, one, more):
        spent = {seen: times, **({GAUSSIAN: others} if others else {})}
        first = FirstPlan(seen, times) if announced else None
        own = total(spent, 1e-3, "replace-one", first)
        worst = worst_case_total(spent, 1e-3, "replace-one", first, own)
        assert worst.epsilon >= own.epsilon
        priced.append(own.epsilon)
    # A larger cohort is no dearer, more colluders are no cheaper: but for the digits that a search leaves open.
    assert priced[0] <= priced[1] * (1 + 2e-4)
    assert priced[1] <= priced[2] * (1 + 2e-4)


def test_a_total_composes_what_each_adversary_saw() -> None:
    """A local run and one under secure aggregation: the server's view counts 8 shares, the worst case one."""
    mixed: dict[Event, int] = {GAUSSIAN: 2, SUMMED: 3}
    assert total(mixed, 1e-3, "replace-one", None) == total(
        {GAUSSIAN: 2, replace(SUMMED, noise="secure"): 3}, 1e-3, "replace-one", None
    )
    assert worst_of(mixed) == total({GAUSSIAN: 2, LOCAL: 3}, 1e-3, "replace-one", None)
    assert worst_of({GAUSSIAN: 2, LOCAL: 3}) == total({GAUSSIAN: 2, LOCAL: 3}, 1e-3, "replace-one", None)
    assert total(mixed, 1e-3, "replace-one", None).epsilon < worst_of(mixed).epsilon


@pytest.mark.parametrize("event", KINDS)
@pytest.mark.parametrize("announced", [False, True])
def test_a_cap_without_a_floor_trusts_no_aggregation(event: Event, announced: bool) -> None:
    first = FirstPlan(event, 3) if announced else None
    own, worst = total({event: 3}, 1e-3, "replace-one", first).epsilon, worst_of({event: 3}, first).epsilon
    assert own < worst < math.inf
    between = PrivacyBudget((own + worst) / 2, 1e-3, "replace-one")
    assert not admits({event: 3}, between, first)
    assert admits({event: 3}, replace(between, epsilon=worst), first)
    assert admits({event: 3}, replace(between, worst_case=worst), first)
    limit = exceeded_limit({event: 3}, replace(between, worst_case=worst * 0.999), first)
    assert (limit.epsilon, limit.words) == (worst * 0.999, "against all others together")
    assert limit.total({event: 3}, first).epsilon == worst


def test_a_cap_trusts_no_cohort_that_it_does_not_allow() -> None:
    own, worst = total({SUMMED: 3}, 1e-3, "replace-one", None).epsilon, worst_of({SUMMED: 3}).epsilon
    trusting = PrivacyBudget((own + worst) / 2, 1e-3, "replace-one", worst, min_honest=8, min_colluders=2)
    assert admits({SUMMED: 3}, trusting, None)
    assert not admits({SUMMED: 3}, replace(trusting, min_honest=9), None)
    assert not admits({SUMMED: 3}, replace(trusting, min_colluders=3), None)
    assert trusting.sees(LOCAL) == LOCAL


def test_a_kind_that_forgets_its_worst_case_has_no_cost() -> None:
    class Forgetful(GaussianEvent):
        members = 5  # type: ignore[assignment]

    with pytest.raises(PrivacyError, match="Forgetful"):
        Forgetful("fixed", 10, 600, 1, 40.0).worst_case()


@pytest.mark.parametrize(
    "worst",
    [
        0.0,
        math.nan,
    ],
)
def test_a_worst_case_is_positive_and_finite(worst: float) -> None:
    with pytest.raises(PrivacyError, match="the budget's worst_case"):
        PrivacyBudget(1.0, 1e-3, "add-remove", worst)
