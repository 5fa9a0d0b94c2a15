"""The guarantee as a reader signs it: short paragraphs, and an example whose figure is true."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_runs import ALGORITHMS, small
from small_sums import SUMS

from fedspa.runs.config import load
from fedspa.runs.guarantee import describe_guarantee, found_at, guesses
from fedspa.runs.setup import root_of

SUMMARY: dict[str, Any] = {
    "unit": "record",
    "epsilon": 1.0,
    "epsilon_worst_case": None,
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
    assert "in whole numbers" in dict(describe_guarantee(SUMMARY | change, 10))["Against whom."]


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


# Where a simulation's private randomness starts: the seed decides it where there is no ε, or where it was asked to.

NOISY = {
    **{name: sections for name, sections in ALGORITHMS.items() if name != "fedavg"},
    **{f"{name}, in sums": sections for name, sections in SUMS.items()},
}


def with_noise(noise: str, sections: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {**sections, "privacy": {**sections.get("privacy", {}), "noise": noise}}


@pytest.mark.parametrize("name", NOISY)
def test_whoever_adds_noise_draws_it_anew(tmp_path: Path, name: str) -> None:
    for noise in ("secure", "exact"):
        config = load(small(tmp_path / "run", **with_noise(noise, NOISY[name])))
        assert root_of(config) != root_of(config)


@pytest.mark.parametrize("noise", ["secure", "exact", "seeded"])
def test_without_noise_the_seed_decides(tmp_path: Path, noise: str) -> None:
    one, same = (load(small(tmp_path / "run", **with_noise(noise, ALGORITHMS["fedavg"]))) for _ in range(2))
    assert root_of(one) == root_of(same)
    other = load(small(tmp_path / "run", **with_noise(noise, {**ALGORITHMS["fedavg"], "run": {"seed": 5}})))
    assert root_of(other) != root_of(one)


@given(st.floats(0.01, 8), st.floats(1e-9, 1e-3))
def test_what_an_attack_finds_is_what_the_worst_pair_gives_away(epsilon: float, delta: float) -> None:
    """Randomised response that tells all with chance δ is the strongest pair of outputs under (ε, δ). An attack accuses
    where all was told, then where the answer says "used", then at random, as often as the level allows."""
    level, factor = 0.01, math.exp(epsilon)
    rightly, wrongly = (1 - delta) * factor / (1 + factor), (1 - delta) / (1 + factor)
    power = delta + min(1.0, level / wrongly) * rightly + max(0.0, level - wrongly) / factor
    assert found_at(epsilon, delta, level) == pytest.approx(power, abs=1e-9)
