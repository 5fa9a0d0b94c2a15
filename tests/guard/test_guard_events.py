"""Events of dp_accounting in the ledger's words: the same ε by both, and what has no proven cost refused by name."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import dp_accounting
import pytest
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant
from hypothesis import given
from hypothesis import strategies as st

from fedspa.errors import PrivacyError
from fedspa.guard import Guard
from fedspa.guard.guard import events_of, fraction_of
from fedspa.mechanisms.gaussian.plan import GaussianEvent
from fedspa.privacy.event import Event, Neighbours

GAUSSIAN = dp_event.GaussianDpEvent(2.0)
SAMPLED = dp_event.PoissonSampledDpEvent(0.05, GAUSSIAN)
RELATIONS = dp_accounting.NeighboringRelation


def named(event: Any, neighbours: Neighbours = "add-remove") -> list[Event]:
    return events_of(event, neighbours=neighbours)


@pytest.mark.parametrize("neighbours", ["add-remove", "replace-one"])
@pytest.mark.parametrize(
    "event",
    [
        GAUSSIAN,
        dp_event.SelfComposedDpEvent(GAUSSIAN, 3),
        dp_event.SelfComposedDpEvent(SAMPLED, 40),
        dp_event.PoissonSampledDpEvent(1 / 3, dp_event.GaussianDpEvent(4.0)),
        dp_event.ComposedDpEvent([dp_event.SelfComposedDpEvent(SAMPLED, 4), dp_event.NoOpDpEvent(), SAMPLED]),
    ],
)
def test_epsilon_is_that_of_dp_accounting(event: Any, neighbours: Neighbours, guarded: Callable[..., Guard]) -> None:
    guard = guarded(20.0, 1e-5, neighbours=neighbours)
    with guard.spend(event):
        pass
    relation = RELATIONS.ADD_OR_REMOVE_ONE if neighbours == "add-remove" else RELATIONS.REPLACE_ONE
    theirs = PLDAccountant(relation).compose(event).get_epsilon(1e-5)
    assert guard.total().epsilon == pytest.approx(theirs, rel=2e-3)
    assert guard.total().by == "pld (one plan)"


def test_what_they_are_in_the_ledger() -> None:
    assert named(GAUSSIAN) == [GaussianEvent("poisson", 1, 1, 1, 2.0)]
    assert named(dp_event.SelfComposedDpEvent(SAMPLED, 40)) == [GaussianEvent("poisson", 1, 20, 40, 2.0)]
    both = dp_event.ComposedDpEvent([SAMPLED, GAUSSIAN, dp_event.SelfComposedDpEvent(SAMPLED, 2)])
    assert named(both) == [GaussianEvent("poisson", 1, 20, 3, 2.0), GaussianEvent("poisson", 1, 1, 1, 2.0)]
    nested = dp_event.SelfComposedDpEvent(dp_event.SelfComposedDpEvent(SAMPLED, 2), 5)
    assert named(nested) == [GaussianEvent("poisson", 1, 20, 10, 2.0)]
    fixed = dp_event.SampledWithoutReplacementDpEvent(600, 10, GAUSSIAN)
    assert named(fixed, "replace-one") == [GaussianEvent("fixed", 10, 600, 1, 2.0)]


@pytest.mark.parametrize(
    "event",
    [dp_event.NoOpDpEvent(), dp_event.PoissonSampledDpEvent(0.0, GAUSSIAN), dp_event.SelfComposedDpEvent(GAUSSIAN, 0)],
)
def test_what_releases_nothing(event: Any) -> None:
    assert named(event) == []


@pytest.mark.parametrize(
    ("event", "match"),
    [
        (dp_event.NonPrivateDpEvent(), "NonPrivateDpEvent cannot be spent: no proven accountant"),
        (dp_event.UnsupportedDpEvent(), "UnsupportedDpEvent cannot be spent"),
        (dp_event.LaplaceDpEvent(1.0), "LaplaceDpEvent cannot be spent: no proven accountant"),
        (dp_event.DiscreteLaplaceDpEvent(1.0, 1), "DiscreteLaplaceDpEvent"),
        (dp_event.RandomizedResponseDpEvent(0.5, 2), "RandomizedResponseDpEvent"),
        (
            dp_event.SampledWithReplacementDpEvent(600, 10, GAUSSIAN),
            "SampledWithReplacementDpEvent of GaussianDpEvent cannot",
        ),
        (dp_event.SingleEpochTreeAggregationDpEvent(1.0, 4), "SingleEpochTreeAggregationDpEvent cannot be spent"),
        (dp_event.RepeatAndSelectDpEvent(GAUSSIAN, 2.0, 1.0), "RepeatAndSelectDpEvent of GaussianDpEvent cannot"),
        (dp_event.MixtureOfGaussiansDpEvent(1.0, [1.0], [1.0]), "MixtureOfGaussiansDpEvent cannot be spent"),
        (dp_event.ZCDpEvent(0.1), "ZCDpEvent cannot be spent"),
        (dp_event.TruncatedSubsampledGaussianDpEvent(600, 0.1, 20, 1.0), "TruncatedSubsampledGaussianDpEvent"),
        (dp_event.PoissonSampledDpEvent(0.1, dp_event.LaplaceDpEvent(1.0)), "PoissonSampledDpEvent of LaplaceDpEvent"),
        (dp_event.PoissonSampledDpEvent(0.1, SAMPLED), "PoissonSampledDpEvent of PoissonSampledDpEvent"),
        (dp_event.ComposedDpEvent([GAUSSIAN, dp_event.NonPrivateDpEvent()]), "NonPrivateDpEvent"),
        (dp_event.SelfComposedDpEvent(GAUSSIAN, 2.5), "count 2.5"),
        (dp_event.SelfComposedDpEvent(GAUSSIAN, -1), "count -1"),
        (dp_event.GaussianDpEvent(0.0), "noise multiplier is 0.0"),
        (dp_event.GaussianDpEvent(float("nan")), "noise multiplier is nan"),
        (dp_event.GaussianDpEvent("much"), "noise multiplier is 'much'"),
        (dp_event.PoissonSampledDpEvent(1.5, GAUSSIAN), "sampling probability is 1.5"),
        (dp_event.PoissonSampledDpEvent(float("nan"), GAUSSIAN), "sampling probability is nan"),
        (dp_event.SampledWithoutReplacementDpEvent(600, 10, GAUSSIAN), "no proven privacy cost under 'add-remove'"),
        (GaussianEvent("fixed", 10, 600, 1, 2.0), "no proven privacy cost under 'add-remove'"),
        ("GaussianDpEvent(1.0)", "is no event; give one of fedspa's"),
        (None, "is no event"),
    ],
)
def test_what_has_no_sound_price(event: Any, match: str) -> None:
    with pytest.raises(PrivacyError, match=match):
        named(event)


def test_a_class_of_ones_own_is_not_taken_for_its_parent() -> None:
    class Mine(dp_event.GaussianDpEvent):
        pass

    with pytest.raises(PrivacyError, match="Mine cannot be spent: no proven accountant for it is available"):
        named(Mine(1.0))


@given(st.floats(1e-12, 1.0, allow_nan=False))
def test_a_rate_is_never_priced_below_itself(rate: float) -> None:
    found = fraction_of(rate)
    assert rate <= float(found) <= rate * (1 + 1e-5) + 2**-49
    assert found.denominator <= 10**15


def test_simple_rates_stay_as_they_are() -> None:
    assert fraction_of(0.01) == Fraction(1, 100)
    assert fraction_of(1 / 3) == Fraction(1, 3)


def test_two_words_on_the_noise_are_one_too_many() -> None:
    event = GaussianEvent("poisson", 1, 20, 1, 2.0, noise="seeded")
    assert events_of(event, neighbours="add-remove", noise="seeded") == [event]
    with pytest.raises(PrivacyError, match="give one of them"):
        events_of(event, neighbours="add-remove", noise="secure")
