"""Calibration: the reference table, never too little noise, never a digit too much, and fast."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedspa.errors import PrivacyError
from fedspa.mechanisms.gaussian.plan import GaussianEvent, _index, _noise, compare, noise_multiplier
from fedspa.privacy import accounting
from fedspa.privacy.budget import FirstPlan, PrivacyBudget, admits, participations_within

MNIST: dict[str, Any] = {"batch": 10, "records": 600, "steps": 300, "participations": 5}
MNIST_10: dict[str, Any] = {**MNIST, "participations": 10}
CIFAR: dict[str, Any] = {"batch": 50, "records": 500, "steps": 50, "participations": 20}
FIXED_PLD: dict[str, Any] = {"sampling": "fixed", "neighbours": "replace-one"}
POISSON_REPLACE: dict[str, Any] = {"sampling": "poisson", "neighbours": "replace-one"}
POISSON_PLD: dict[str, Any] = {"sampling": "poisson", "neighbours": "add-remove"}
METHODS = [FIXED_PLD, POISSON_REPLACE, POISSON_PLD]


def cost(noise: float, method: dict[str, Any], setting: dict[str, Any], delta: float) -> float:
    event = GaussianEvent(method["sampling"], setting["batch"], setting["records"], setting["steps"], noise)
    return accounting.epsilon(
        {event: setting["participations"]},
        delta,
        neighbours=method["neighbours"],
    )


@pytest.mark.parametrize(
    ("method", "setting", "expected"),
    [
        (FIXED_PLD, MNIST, 4.12),
        (FIXED_PLD, CIFAR, 17.0),
        (POISSON_REPLACE, MNIST, 3.33),
        (POISSON_PLD, MNIST_10, 2.47),
        (POISSON_PLD, CIFAR, 8.20),
    ],
)
def test_reference_table(method: dict[str, Any], setting: dict[str, Any], expected: float) -> None:
    started = time.process_time()
    noise = noise_multiplier(1.0, 1e-3, **method, **setting)
    assert time.process_time() - started < 5
    assert noise == pytest.approx(expected, rel=0.01)
    assert cost(noise, method, setting, 1e-3) <= 1.0


@settings(max_examples=8, deadline=None)
@given(
    st.sampled_from(METHODS),
    st.floats(0.1, 20),
    st.sampled_from([1e-3, 1e-5, 1e-8]),
    st.integers(1, 100),
    st.integers(1, 200),
    st.integers(1, 10),
)
def test_smallest_that_suffices(
    method: dict[str, Any], epsilon: float, delta: float, batch: int, steps: int, participations: int
) -> None:
    setting = {"batch": batch, "records": 100, "steps": steps, "participations": participations}
    noise = noise_multiplier(epsilon, delta, **method, **setting)
    assert cost(noise, method, setting, delta) <= epsilon
    assert cost(_noise(_index(noise) - 1), method, setting, delta) > epsilon
    assert float(f"{noise:.4g}") == noise


@given(st.floats(1e-6, 1e6))
def test_four_digits_round_up(noise: float) -> None:
    rounded = _noise(_index(noise))
    assert noise <= rounded <= noise * 1.001 * (1 + 1e-12)
    assert _noise(_index(noise) - 1) < noise
    assert _index(rounded) == _index(noise)


def test_out_of_reach_is_an_error() -> None:
    """δ(0) of a plain Gaussian is its total variation, which no finite noise brings to 1e-12 over so many steps."""
    with pytest.raises(PrivacyError, match="no noise multiplier"):
        noise_multiplier(1e-9, 1e-12, **POISSON_PLD, batch=1, records=1, steps=10**9, participations=10**9)


@pytest.mark.parametrize("epsilon", [0.0, -1.0, float("nan"), float("inf")])
def test_epsilon_must_make_sense(epsilon: float) -> None:
    with pytest.raises(PrivacyError, match="epsilon"):
        noise_multiplier(epsilon, 1e-3, **POISSON_PLD, **MNIST)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "wrong",
    [
        *({"delta": delta} for delta in (0.0, -1.0, 1.0, 2.0, float("nan"), float("inf"))),
        *({name: value} for name in ("batch", "records", "steps", "participations") for value in (0, -3)),
    ],
    ids=str,
)
def test_what_no_mechanism_has_is_refused_by_name(method: dict[str, Any], wrong: dict[str, float]) -> None:
    name = "batch" if "records" in wrong else next(iter(wrong))
    with pytest.raises(PrivacyError, match=f"^{name} is "):
        noise_multiplier(1.0, **{"delta": 1e-3, **MNIST, **wrong}, **method)


@settings(max_examples=5, deadline=None)
@given(st.floats(0.7, 5), st.floats(0.3, 10), st.integers(0, 20), st.integers(0, 200))
def test_participations_fit_and_one_more_does_not(noise: float, budget: float, already: int, announced: int) -> None:
    event = GaussianEvent("poisson", 10, 600, 30, noise)
    other = GaussianEvent("poisson", 24, 600, 10, 2.0)
    spent = {other: already, event: 1}
    cap, first = PrivacyBudget(budget, 1e-5, "add-remove"), FirstPlan(event, announced) if announced else None
    more = participations_within(event, cap, spent, first)
    assert not admits({**spent, event: 2 + more}, cap, first)
    assert more == 0 or admits({**spent, event: 1 + more}, cap, first)


def test_participations_undo_calibration() -> None:
    noise = noise_multiplier(1.0, 1e-3, **FIXED_PLD, **MNIST_10)
    event = GaussianEvent("fixed", 10, 600, 300, noise)
    cap, plan = PrivacyBudget(1.0, 1e-3, "replace-one"), FirstPlan(event, 10)
    assert participations_within(event, cap, {}, plan) == 10
    assert participations_within(event, cap, {event: 4}, plan) == 6
    assert participations_within(event, cap, {event: 11}, plan) == 0


def test_participations_stop_at_a_million() -> None:
    event = GaussianEvent("poisson", 1, 10**6, 1, 1000.0)
    assert participations_within(event, PrivacyBudget(1.0, 1e-3, "add-remove"), {}, None) == 10**6


# The comparison table of `fedspa privacy`

TABLE: dict[str, Any] = {"batch": 10, "records": 600, "local_steps": 300, "participations": 5, "delta": 1e-3}
KEYS = [("poisson", "add-remove", "pld"), ("poisson", "replace-one", "pld"), ("fixed", "replace-one", "pld")]


def test_the_table_of_noise_for_an_epsilon() -> None:
    table = compare(epsilon=1.0, **TABLE)
    assert [(row.sampling, row.neighbours, row.accountant) for row in table] == KEYS
    assert [row.noise for row in table] == pytest.approx([1.83, 3.33, 4.12], rel=0.01)
    assert all(0.99 < row.epsilon <= 1.0 for row in table)


def test_the_table_of_epsilon_at_a_noise() -> None:
    table = compare(noise=9.291, **TABLE)
    assert [(row.sampling, row.neighbours, row.accountant) for row in table] == KEYS
    assert {row.noise for row in table} == {9.291}
    poisson, replaced, fixed = (row.epsilon for row in table)
    assert fixed == pytest.approx(0.33, rel=0.02)  # what the paper's noise gives
    assert fixed > replaced > poisson


@pytest.mark.parametrize("choice", [{}, {"epsilon": 1.0, "noise": 1.0}])
def test_exactly_one_of_epsilon_and_noise(choice: dict[str, float]) -> None:
    with pytest.raises(PrivacyError, match="exactly one"):
        compare(**choice, **TABLE)  # type: ignore[arg-type]
