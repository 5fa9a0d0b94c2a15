"""Two adversaries look at the same participations: the server with its colluders, and all others together."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedspa.algorithms.cpsgd.event import BinomialEvent
from fedspa.errors import PrivacyError
from fedspa.mechanisms import event_of
from fedspa.mechanisms.discrete_gaussian.event import DiscreteGaussianEvent
from fedspa.mechanisms.gaussian.event import GaussianEvent
from fedspa.privacy import accounting
from fedspa.privacy.cap import Cap, FirstPlan, Total, admits, floor_total, passed, total
from fedspa.privacy.event import Event, as_server_saw

LOCAL = BinomialEvent(10, 600, 1, 100, 2, 400, rotation=False, aggregated=1)
SUMMED = replace(LOCAL, aggregated=8, members=10, colluders=2)
ROTATED = replace(SUMMED, rotation=True, trials=4000)
GAUSSIAN = GaussianEvent("fixed", 10, 600, 1, 40.0)
SHARE = DiscreteGaussianEvent(600, 100, 500, 10, 2)
KINDS: list[Event] = [SUMMED, ROTATED, SHARE]


def floors(events: Mapping[Event, int], first: FirstPlan | None = None) -> Total:
    own = total(events, 1e-3, "replace-one", first)
    return floor_total(events, 1e-3, "replace-one", first, own)


def cohort(event: Event, members: int, colluders: int) -> Event:
    honest = {"aggregated": members - colluders} if isinstance(event, BinomialEvent) else {}
    found: Event = replace(event, members=members, colluders=colluders, **honest)  # type: ignore[type-var]
    return found


@pytest.mark.parametrize("event", KINDS)
def test_a_floor_is_the_event_of_ones_own_noise(event: Event) -> None:
    assert (event.members, event.colluders, event.honest) == (10, 2, 8)
    assert (event.floor().members, event.floor().honest) == (0, 1)
    assert event.floor().floor() == event.floor()
    assert event.as_server_saw() == event
    assert event.with_noise("secure").as_server_saw() == event
    assert event_of(event.to_json()) == event
    assert str(event).endswith("in sums over 10 members with up to 2 colluding")


def test_what_is_not_aggregated_is_its_own_floor() -> None:
    for event in (LOCAL, GAUSSIAN):
        assert event.floor() == event
        assert (event.members, event.colluders, event.honest) == (0, 0, 1)


def test_a_kind_that_forgets_its_floor_has_no_price() -> None:
    class Forgetful(GaussianEvent):
        members = 5  # type: ignore[assignment]

    with pytest.raises(PrivacyError, match="Forgetful"):
        Forgetful("fixed", 10, 600, 1, 40.0).floor()


def test_texts_of_before_are_the_texts_of_now() -> None:
    """Read out of ledgers of the first edition: local, and priced for an aggregation that nobody ran."""
    text = (
        '{"aggregated":%d,"batch":10,"bits":2,"dimension":100,"kind":"binomial","records":600,"rotation":false,'
        '"steps":1,"trials":400}'
    )
    assert event_of(text % 1) == LOCAL
    assert LOCAL.to_json() == text % 1
    priced = event_of(text % 8)
    assert priced.to_json() == text % 8
    assert priced.members == 0
    assert priced.as_server_saw() == priced.floor() == LOCAL
    assert '"members":10' in SUMMED.to_json()
    with pytest.raises(PrivacyError, match="not canonical"):
        event_of(text.replace('"kind"', '"colluders":0,"kind"').replace('"records"', '"members":0,"records"') % 1)


@pytest.mark.parametrize(
    "changes",
    [
        {"aggregated": 7},
        {"aggregated": 1, "members": 1, "colluders": 0},
        {"members": 0},
        {"aggregated": 0, "colluders": 10},
        {"aggregated": 11, "colluders": -1},
        {"members": 10.0},
        {"members": -10},
    ],
)
def test_a_cohort_that_cannot_be_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(PrivacyError):
        replace(SUMMED, **changes)


@pytest.mark.parametrize("run", [SUMMED, ROTATED])
@pytest.mark.parametrize("times", [2, 20])
def test_an_aggregation_that_is_run_has_the_price_that_it_was_given(run: BinomialEvent, times: int) -> None:
    """As before it was run: of n·m trials, with n the honest members."""
    priced = replace(run, members=0, colluders=0)
    assert priced.aggregated == run.honest == 8
    assert cost({run: times}) == cost({priced: times}) < cost({run.floor(): times})


def cost(events: Mapping[Event, int]) -> float:
    return accounting.epsilon(events, 1e-3, neighbours="replace-one")


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
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
        floor = floor_total(spent, 1e-3, "replace-one", first, own)
        assert floor.epsilon >= own.epsilon
        priced.append(own.epsilon)
    # A larger cohort is no dearer, more colluders are no cheaper: but for the digits that a search leaves open.
    assert priced[0] <= priced[1] * (1 + 2e-4)
    assert priced[1] <= priced[2] * (1 + 2e-4)


def test_a_total_composes_what_each_adversary_saw() -> None:
    """A local run and one under secure aggregation: the server's view counts 8 shares, the floor one."""
    mixed: dict[Event, int] = {GAUSSIAN: 2, SUMMED: 3}
    assert total(mixed, 1e-3, "replace-one", None) == total(
        {GAUSSIAN: 2, replace(SUMMED, noise="secure"): 3}, 1e-3, "replace-one", None
    )
    assert floors(mixed) == total({GAUSSIAN: 2, LOCAL: 3}, 1e-3, "replace-one", None)
    assert floors({GAUSSIAN: 2, LOCAL: 3}) == total({GAUSSIAN: 2, LOCAL: 3}, 1e-3, "replace-one", None)
    assert total(mixed, 1e-3, "replace-one", None).epsilon < floors(mixed).epsilon


def test_runs_with_different_colluders_are_each_as_its_own_adversary_saw_it() -> None:
    three, none = cohort(SUMMED, 10, 3), cohort(SUMMED, 10, 0)
    both = total({three: 2, none: 2}, 1e-3, "replace-one", None).epsilon
    alike = [total({event: 4}, 1e-3, "replace-one", None).epsilon for event in (none, three)]
    assert alike[0] < both < alike[1]
    assert floors({three: 2, none: 2}) == floors({three: 4})


def test_an_aggregation_that_was_only_priced_is_none() -> None:
    priced = replace(SUMMED, members=0, colluders=0)
    assert as_server_saw({priced: 2, SUMMED: 1}) == {LOCAL: 2, SUMMED: 1}
    assert total({priced: 2}, 1e-3, "replace-one", None) == total({LOCAL: 2}, 1e-3, "replace-one", None)


@pytest.mark.parametrize("event", KINDS)
@pytest.mark.parametrize("announced", [False, True])
def test_a_cap_without_a_floor_trusts_no_aggregation(event: Event, announced: bool) -> None:
    first = FirstPlan(event, 3) if announced else None
    own, floor = total({event: 3}, 1e-3, "replace-one", first).epsilon, floors({event: 3}, first).epsilon
    assert own < floor < math.inf
    between = Cap((own + floor) / 2, 1e-3, "replace-one")
    assert not admits({event: 3}, between, first)
    assert admits({event: 3}, replace(between, epsilon=floor), first)
    assert admits({event: 3}, replace(between, floor=floor), first)
    limit = passed({event: 3}, replace(between, floor=floor * 0.999), first)
    assert limit is not None
    assert (limit.epsilon, limit.words) == (floor * 0.999, "against all others together")
    assert limit.total({event: 3}, first).epsilon == floor


def test_a_cap_trusts_no_cohort_that_it_does_not_allow() -> None:
    own, floor = total({SUMMED: 3}, 1e-3, "replace-one", None).epsilon, floors({SUMMED: 3}).epsilon
    trusting = Cap((own + floor) / 2, 1e-3, "replace-one", floor, min_honest=8, min_colluders=2)
    assert admits({SUMMED: 3}, trusting, None)
    assert not admits({SUMMED: 3}, replace(trusting, min_honest=9), None)
    assert not admits({SUMMED: 3}, replace(trusting, min_colluders=3), None)
    assert trusting.sees(LOCAL) == LOCAL


def test_the_floor_of_all_entries_is_capped_also_where_the_last_is_local() -> None:
    spent: dict[Event, int] = {SUMMED: 3}
    own, floor = total(spent, 1e-3, "replace-one", None).epsilon, floors(spent).epsilon
    quiet = GaussianEvent("fixed", 10, 600, 1, 10.0)
    cap = Cap(2 * floor, 1e-3, "replace-one", 2 * floor)
    assert admits({**spent, quiet: 1}, cap, None)
    assert not admits({**spent, quiet: 1}, replace(cap, floor=floor * 1.0001), None)
    assert own < floor


@pytest.mark.parametrize("floor", [0.0, -1.0, math.nan, math.inf])
def test_a_floor_is_positive_and_finite(floor: float) -> None:
    with pytest.raises(PrivacyError, match="the cap's floor"):
        Cap(1.0, 1e-3, "add-remove", floor)
