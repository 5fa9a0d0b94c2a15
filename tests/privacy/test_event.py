"""Events: validation, and a text form that is exact and refuses everything else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedspa.errors import PrivacyError
from fedspa.mechanisms import event_of
from fedspa.mechanisms.gaussian.plan import GaussianEvent
from fedspa.privacy.accounting import epsilon
from fedspa.privacy.budget import FirstPlan, PrivacyBudget, admits, total

EVENT = GaussianEvent("poisson", 10, 600, 300, 1.5)
TEXT = '{"batch":10,"kind":"gaussian","noise_multiplier":1.5,"records":600,"sampling":"poisson","steps":300}'


@st.composite
def events(draw: st.DrawFn) -> GaussianEvent:
    records = draw(st.integers(1, 10**9))
    return GaussianEvent(
        draw(st.sampled_from(["poisson", "fixed"])),
        draw(st.integers(1, records)),
        records,
        draw(st.integers(1, 10**9)),
        draw(st.floats(1e-300, 1e300)),
    )


@given(events())
def test_text_round_trip(event: GaussianEvent) -> None:
    assert event_of(event.to_json()) == event
    assert event_of(event.to_json()).to_json() == event.to_json()


def test_text_is_golden() -> None:
    """Ledgers on disk hold this text: it may not change."""
    assert EVENT.to_json() == TEXT


def test_the_unit_is_said_where_it_is_a_person() -> None:
    persons = replace(EVENT, unit="person")
    assert persons.to_json() == TEXT[:-1] + ',"unit":"person"}'
    assert event_of(persons.to_json()) == persons != EVENT
    assert "poisson 10/600 persons" in str(persons)
    assert event_of(TEXT).unit == "record"
    for unit in ('"record"', '"people"', "1", "null"):  # one text for an event, not two
        with pytest.raises(PrivacyError):
            event_of(TEXT[:-1] + f',"unit":{unit}}}')


def test_units_cost_the_same_and_do_not_add_up() -> None:
    persons = replace(EVENT, unit="person")
    assert epsilon({persons: 2}, 1e-5, neighbours="add-remove") == epsilon({EVENT: 2}, 1e-5, neighbours="add-remove")
    both = {EVENT: 1, persons: 1}
    with pytest.raises(PrivacyError, match="do not add up"):
        epsilon(both, 1e-5, neighbours="add-remove")
    with pytest.raises(PrivacyError, match="do not add up"):
        total(both, 1e-5, "add-remove", None)
    for first, spent in ((FirstPlan(EVENT, 3), persons), (FirstPlan(persons, 3), EVENT)):
        with pytest.raises(PrivacyError, match="do not add up"):
            admits({spent: 1}, PrivacyBudget(100.0, 1e-5, "add-remove"), first)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"kind":"gaussian"}',
        TEXT + " ",
        TEXT[:-1],
        "[" * 100_000,
        TEXT.replace("gaussian", "laplace"),
        TEXT.replace('"kind":"gaussian",', ""),
        TEXT.replace('"steps":300', '"steps":300,"extra":1'),
        TEXT.replace('"steps":300', '"steps":300,"steps":300'),
        TEXT.replace('"batch":10', '"batch":601'),
        TEXT.replace('"batch":10', '"batch":[10]'),
        TEXT.replace("poisson", "shuffled"),
        TEXT.replace("1.5", "1.50"),
        TEXT.replace("1.5", "NaN"),
        TEXT.replace("1.5", "1e400"),
    ],
)
def test_hostile_text_is_refused(text: str) -> None:
    with pytest.raises(PrivacyError):
        event_of(text)


@pytest.mark.parametrize(
    "thing",
    [
        None,
        b"{}",
        {"kind": "gaussian"},
    ],
)
def test_what_is_no_text_is_refused_in_one_line(thing: object) -> None:
    with pytest.raises(PrivacyError, match="it must be text") as caught:
        event_of(thing)  # type: ignore[arg-type]
    assert len(str(caught.value)) < 300


@given(st.text(max_size=60))
def test_any_text_is_an_event_or_a_privacy_error(text: str) -> None:
    with pytest.raises(PrivacyError):
        event_of(text)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"batch":10', '"batch":10.0'),
        ('"batch":10', '"batch":true'),
        ('"steps":300', '"steps":300.5'),
        ("1.5", "2"),
        ("1.5", "1" + "0" * 400),
    ],
)
def test_fields_of_the_wrong_type_are_refused(old: str, new: str) -> None:
    with pytest.raises(PrivacyError):
        event_of(TEXT.replace(old, new))


@pytest.mark.parametrize("noise", [2, 2.0, np.float64(2.0), np.float32(2.0)])
def test_equal_events_are_equal_texts_whatever_their_number_types(noise: float) -> None:
    event = GaussianEvent("poisson", np.int64(10), 600, 300, noise)
    assert event == GaussianEvent("poisson", 10, 600, 300, 2.0)
    assert event.to_json() == GaussianEvent("poisson", 10, 600, 300, 2.0).to_json()


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (("shuffled", 10, 600, 300, 1.5), "poisson, fixed"),
        (("poisson", 0, 600, 300, 1.5), "batch"),
        (("poisson", 601, 600, 300, 1.5), "600"),
        (("poisson", 10, 600, 0, 1.5), "steps"),
        (("poisson", 10.5, 600, 300, 1.5), "batch of a gaussian event must be a whole number"),
        (("poisson", 10, 600, 300, "1.5 or so"), "noise_multiplier of a gaussian event must be a number"),
        (("poisson", 10, 600, 300, 0.0), "noise multiplier"),
        (("poisson", 10, 600, 300, float("nan")), "noise multiplier"),
        (("poisson", 10, 600, 300, float("inf")), "noise multiplier"),
    ],
)
def test_an_event_that_cannot_be_names_what_is_wrong(fields: tuple[Any, ...], named: str) -> None:
    with pytest.raises(PrivacyError, match=named):
        GaussianEvent(*fields)
