"""The guarantee as a reader signs it: short paragraphs, and an example whose figure is true."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

import pytest

from fedspa.runs.statement import guesses, plain_words

SUMMARY: dict[str, Any] = {
    "unit": "record",
    "epsilon": 1.0,
    "epsilon_floor": None,
    "epsilon_replace_one": 2.0,
    "epsilon_total": None,
    "delta": 1e-3,
    "neighbours": "add-remove",
    "sampling": "poisson",
    "accountant": "pld",
    "participations_max": 5,
    "noise": "secure",
    "private": True,
    "adversary": "local",
    "members": None,
    "colluders": None,
    "algorithm": "fedspa",
    "warnings": [],
}


@pytest.mark.parametrize("neighbours", ["add-remove", "replace-one"])
@pytest.mark.parametrize("unit", ["record", "person"])
def test_four_short_paragraphs_say_all_that_is_signed(unit: str, neighbours: str) -> None:
    words = dict(plain_words(SUMMARY | {"unit": unit, "neighbours": neighbours}, 10))
    assert list(words) == ["Who is protected.", "Against whom.", "What is promised.", "What is not covered."]
    assert all(len(text.split()) <= 130 for text in words.values())
    assert unit in words["Who is protected."]
    assert "keyed by the operating system, in float64" in words["Against whom."]
    promise = words["What is promised."]
    assert "at most 74 times in 100" in promise
    for term in ("ε = 1.000", "δ = 0.001", neighbours, "poisson sampling", "accountant pld", "5 participations"):
        assert term in promise
    assert ("all that the agent holds of you" in promise) is (unit == "person")
    assert ("used or left out" in promise) is (neighbours == "add-remove")


@pytest.mark.parametrize("change", [{"noise": "exact"}, {"members": 8, "colluders": 2}, {"whole_numbers": True}])
def test_noise_in_whole_numbers_is_said(change: dict[str, Any]) -> None:
    assert "in whole numbers" in dict(plain_words(SUMMARY | change, 10))["Against whom."]


def test_a_weak_promise_is_said() -> None:
    words = dict(plain_words(SUMMARY | {"epsilon": 8.0}, 10))
    assert "So large an ε protects hardly at all." in words["What is promised."]
    assert "hardly" not in str(plain_words(SUMMARY, 10))


@pytest.mark.parametrize(("epsilon", "delta", "often"), [(0, 0, 50), (math.log(3), 0, 75), (1, 0, 74), (1, 0.1, 76)])
def test_guesses_of_known_mechanisms(epsilon: float, delta: float, often: int) -> None:
    """Randomised response reaches e^ε/(1 + e^ε)."""
    assert guesses(epsilon, delta) == often


def test_nothing_is_known_for_sure_of_an_epsilon_without_bound() -> None:
    assert guesses(1e6, 0.0) == guesses(1.0, 1.0) == 100


@pytest.mark.parametrize("mu", [0.1, 0.5, 1.0, 3.0])
def test_no_guess_at_a_gaussian_is_better_than_stated(mu: float) -> None:
    """The best test between N(0, 1) and N(mu, 1) is right with chance Φ(mu/2); δ(ε) is the Gaussian's own."""
    phi = NormalDist().cdf
    for epsilon in (0.01, 0.1, 0.5, 1.0, 2.0, 5.0):
        delta = phi(mu / 2 - epsilon / mu) - math.exp(epsilon) * phi(-mu / 2 - epsilon / mu)
        assert 100 * phi(mu / 2) <= guesses(epsilon, delta)
