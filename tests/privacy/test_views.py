"""Two adversaries look at the same participations: the server with its colluders, and all others together."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedspa.errors import PrivacyError
from fedspa.mechanisms import event_of
from fedspa.mechanisms.discrete_gaussian.plan import DiscreteGaussianEvent
from fedspa.mechanisms.gaussian.plan import GaussianEvent
from fedspa.privacy import accounting
from fedspa.privacy.budget import FirstPlan, PrivacyBudget, Total, admits, exceeded_limit, total, worst_case_total
from fedspa.privacy.event import Event
from reproduction.cpsgd.plan import BinomialEvent

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
    assert limit is not None
    assert (limit.epsilon, limit.words) == (worst * 0.999, "against all others together")
    assert limit.total({event: 3}, first).epsilon == worst


def test_a_cap_trusts_no_cohort_that_it_does_not_allow() -> None:
    own, worst = total({SUMMED: 3}, 1e-3, "replace-one", None).epsilon, worst_of({SUMMED: 3}).epsilon
    trusting = PrivacyBudget((own + worst) / 2, 1e-3, "replace-one", worst, min_honest=8, min_colluders=2)
    assert admits({SUMMED: 3}, trusting, None)
    assert not admits({SUMMED: 3}, replace(trusting, min_honest=9), None)
    assert not admits({SUMMED: 3}, replace(trusting, min_colluders=3), None)
    assert trusting.sees(LOCAL) == LOCAL


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


def test_a_kind_that_forgets_its_worst_case_has_no_cost() -> None:
    class Forgetful(GaussianEvent):
        members = 5  # type: ignore[assignment]

    with pytest.raises(PrivacyError, match="Forgetful"):
        Forgetful("fixed", 10, 600, 1, 40.0).worst_case()
