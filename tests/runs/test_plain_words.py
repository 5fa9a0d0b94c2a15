"""The guarantee as a reader signs it: short paragraphs, and an example whose figure is true."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

import pytest

from fedspa.runs.guarantee import guesses, plain_words

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


@pytest.mark.parametrize("change", [{"noise": "exact"}, {"members": 8, "colluders": 2}, {"whole_numbers": True}])
def test_noise_in_whole_numbers_is_said(change: dict[str, Any]) -> None:
    assert "in whole numbers" in dict(plain_words(SUMMARY | change, 10))["Against whom."]


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
