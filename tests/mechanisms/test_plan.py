"""Plans: the sensitivity table, what is derived from it, and what is refused."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import chacha
import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_plans import GAUSSIAN_PLAN

from fedspa.errors import PrivacyError
from fedspa.mechanisms.gaussian import exact
from fedspa.mechanisms.gaussian.plan import (
    RADIUS_BITS,
    TAIL,
    GaussianEvent,
    _index,
    _noise,
    compare,
    noise_multiplier,
    truncation_delta,
)
from fedspa.privacy import accounting, filter
from fedspa.privacy.budget import FirstPlan, PrivacyBudget, admits, participations_within
from fedspa.privacy.event import Neighbours, Sampling
from fedspa.randomness.streams import Stream

PLAN = GAUSSIAN_PLAN


KEYS = [("poisson", "add-remove", "pld"), ("poisson", "replace-one", "pld"), ("fixed", "replace-one", "pld")]


@pytest.mark.parametrize(
    ("clip", "neighbours", "expected"),
    [
        ("coordinate", "add-remove", math.sqrt(50) * 0.01),
        ("coordinate", "replace-one", 2 * math.sqrt(50) * 0.01),
        ("l2", "add-remove", 0.01),
        ("l2", "replace-one", 0.02),
    ],
)
def test_sensitivity_table(clip: Any, neighbours: Any, expected: float) -> None:
    assert replace(PLAN, clip=clip, neighbours=neighbours).sensitivity == pytest.approx(expected, rel=1e-15)


@given(st.integers(0, 2**32 - 1))
def test_no_clipped_gradients_pass_the_sensitivity(seed: int) -> None:
    """Sums of clipped gradients with one record replaced, against the table, at the worst pair and at random ones."""
    rng = np.random.default_rng(seed)
    coordinate = replace(PLAN, neighbours="replace-one")
    l2 = replace(coordinate, clip="l2")
    a, b = rng.standard_normal((2, PLAN.active)) * rng.choice([0.001, 0.01, 10])
    clipped = [np.clip(g, -0.01, 0.01) for g in (a, b)]
    assert np.linalg.norm(clipped[0] - clipped[1]) <= coordinate.sensitivity * (1 + 1e-12)
    worst = np.clip(np.sign(a) * 9, -0.01, 0.01)
    assert np.linalg.norm(worst - -worst) == pytest.approx(coordinate.sensitivity)
    normed = [g * min(1, 0.01 / np.linalg.norm(g)) for g in (a, b)]
    assert np.linalg.norm(normed[0] - normed[1]) <= l2.sensitivity * (1 + 1e-12)


def test_derived_values() -> None:
    assert PLAN.compression == 0.05
    assert PLAN.sigma == pytest.approx(1.5 * math.sqrt(50) * 0.01 / 10)
    assert PLAN.event == GaussianEvent("poisson", 10, 600, 300, 1.5)


def test_noise_does_not_depend_on_the_relation() -> None:
    """The event carries noise in units of one example's bound; the accountant knows what the relation costs."""
    assert replace(PLAN, neighbours="replace-one").sigma == PLAN.sigma
    assert replace(PLAN, neighbours="replace-one").event == PLAN.event


@given(st.floats(1e-6, 1e6))
def test_noise_scales_with_the_clip(clip_value: float) -> None:
    other = PLAN.with_clip_value(clip_value)
    assert other.event == PLAN.event
    assert other.sigma / other.clip_norm == pytest.approx(PLAN.sigma / PLAN.clip_norm)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"active": 0}, "k is 0"),
        ({"active": 1001}, "d = 1000"),
        ({"clip": "l1"}, "coordinate, l2"),
        ({"clip_value": 1e-11}, "clip value"),
        ({"clip_value": float("nan")}, "clip value"),
        ({"neighbours": "zero-out"}, "add-remove, replace-one"),
        ({"sampling": "fixed"}, "replace-one"),
        ({"sampling": "shuffled", "neighbours": "replace-one"}, "poisson, fixed"),
        ({"participations": 0}, "participations"),
        ({"delta": 1 / 600}, "1/records"),
        ({"batch": 601}, "batch"),
        ({"local_steps": 0}, "steps"),
        ({"noise_multiplier": 0.0}, "noise multiplier"),
    ],
)
def test_inconsistent_plans_cannot_be_made(change: dict[str, Any], named: str) -> None:
    with pytest.raises(PrivacyError, match=named):
        replace(PLAN, **change)


# Calibration: the reference table, never too little noise, never a digit too much, and fast.


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


@pytest.mark.parametrize("choice", [{}, {"epsilon": 1.0, "noise": 1.0}])
def test_exactly_one_of_epsilon_and_noise(choice: dict[str, float]) -> None:
    with pytest.raises(PrivacyError, match="exactly one"):
        compare(**choice, **TABLE)  # type: ignore[arg-type]


# Noise ends somewhere, and the accounting counts it: what lies beyond is impossible under one of two neighbours.


def test_the_samplers_end_no_earlier(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least radius but one is drawn within `TAIL`, the least beyond: no draw that is wider was left out. The angles
    are 0 but for the bits that they lend."""
    words = np.array([0, 0, 1, 0], dtype=np.uint64)  # radii, then angles
    monkeypatch.setattr(Stream, "uint64", lambda self, n: words)
    values = Stream(bytes(32)).gaussian(4)
    assert values[0] < TAIL < values[1]
    halves = np.zeros((16, chacha.LANES), dtype=np.uint32)  # low and high, of a radius and an angle, four times
    halves[2] = 1
    monkeypatch.setattr(chacha, "block_words", lambda *_: halves)
    drawn = chacha.ChaChaNoise(bytes(32)).gaussian(chacha.GROUP).reshape(8, -1)
    assert (drawn[0] < TAIL).all()
    assert (drawn[2] > TAIL).all()
    assert np.allclose(drawn[[0, 2], 0], values[:2], rtol=1e-15)
    assert exact._LAST_SIGMA > TAIL


@pytest.mark.parametrize(
    "shift",
    [
        0.3,
        2.5,
        5.0,
    ],
)
def test_one_pair_that_is_moved_as_far_as_can_be(shift: float) -> None:
    """By integration over a disc that ends: the mass within T of the centre and beyond T of the other one."""
    with mpmath.workdps(30):
        end = mpmath.mpf(TAIL)

        def ring(radius: mpmath.mpf) -> mpmath.mpf:
            """Of a circle around the centre, the part that is beyond T of the other centre, which is `shift` away."""
            cosine = (end**2 - radius**2 - shift**2) / (2 * radius * shift)
            return radius * mpmath.exp(-(radius**2) / 2) * mpmath.acos(max(min(cosine, 1), -1)) / mpmath.pi

        truth = mpmath.quad(ring, mpmath.linspace(end - shift, end, 40))
    assert float(truth) <= truncation_delta(shift) <= 1000 * float(truth) + 5e-14 * shift


def test_however_a_record_spreads_its_bound() -> None:
    rng = np.random.default_rng(7)
    for _ in range(300):
        shift = rng.uniform(0.05, 8)
        moves = np.abs(rng.standard_normal(rng.integers(1, 2000)) ** rng.integers(1, 12))
        moves *= shift / np.linalg.norm(moves)
        chance = 2.0**-RADIUS_BITS * np.expm1(moves * TAIL - moves**2 / 2).sum()
        assert chance <= truncation_delta(shift)


@pytest.mark.parametrize(
    ("sampling", "neighbours"),
    [("poisson", "add-remove"), ("poisson", "replace-one"), ("fixed", "replace-one")],
)
@pytest.mark.parametrize("batch", [50, 99, 100])
def test_where_outcomes_are_impossible_there_is_no_epsilon(sampling: str, neighbours: Neighbours, batch: int) -> None:
    """One step of z = 0.19, or 0.38 where a record counts twice: 6·10⁻⁶ of the releases are proofs, half where half
    takes part. At δ = 10⁻⁶ that is no ε; at 10⁻³ it is one."""
    twice = neighbours == "replace-one" and not (sampling == "poisson" and batch <= 50)
    event = GaussianEvent(sampling, batch, 100, 1, 0.38 if twice else 0.19)  # type: ignore[arg-type]
    assert math.isinf(accounting.epsilon({event: 1}, 1e-6, neighbours=neighbours))
    assert accounting.epsilon({event: 1}, 1e-3, neighbours=neighbours) < 60
    assert math.isinf(filter.least_epsilon({event: 1}, 1e-6, neighbours))
    assert not filter.fits({event: 1}, 1e6, 1e-6, neighbours)
    assert filter.least_epsilon({event: 1}, 0.01, neighbours) < 60


def test_ordinary_plans_keep_their_epsilon() -> None:
    """What is taken off over ten thousand steps is less than a hundred-millionth of a δ of 10⁻³."""
    step = GaussianEvent("poisson", 10, 1000, 10_000, 1.0).step
    assert 10_000 * step.extra_delta("add-remove") < 1e-8 * 1e-3


@pytest.mark.parametrize(("participations", "delta"), [(100, 1e-5), (10_000, 1e-12)])
@pytest.mark.parametrize(("sampling", "neighbours"), [("poisson", "add-remove"), ("fixed", "replace-one")])
def test_the_end_of_the_noise_does_not_decide_how_much_of_it_is_taken(
    sampling: Sampling, neighbours: Neighbours, participations: int, delta: float
) -> None:
    """Up to a million steps, what calibration takes for ε = 1 costs ε = 1, and a hundredth less costs little more: no
    cliff is beside it."""
    shape: dict[str, Any] = {"sampling": sampling, "batch": 10, "records": 600, "steps": 100}
    noise = noise_multiplier(1.0, delta, **shape, participations=participations, neighbours=neighbours)
    own, less = (
        accounting.epsilon(
            {GaussianEvent(**shape, noise_multiplier=each): participations}, delta, neighbours=neighbours
        )
        for each in (noise, 0.99 * noise)
    )
    assert 0.99 < own <= 1.0 < less < 1.03


@pytest.mark.parametrize("epsilon", [0.0, -1.0, float("nan"), float("inf")])
def test_epsilon_must_make_sense(epsilon: float) -> None:
    with pytest.raises(PrivacyError, match="epsilon"):
        noise_multiplier(epsilon, 1e-3, **POISSON_PLD, **MNIST)


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
