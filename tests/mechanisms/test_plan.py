"""Plans: the sensitivity table, what is derived from it, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_plans import GAUSSIAN_PLAN

from fedspa.errors import PrivacyError
from fedspa.mechanisms.gaussian.plan import QUANTILE_NOISE_FACTOR, GaussianEvent

PLAN = GAUSSIAN_PLAN


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


@given(st.floats(0.1, 100))
def test_quantile_clip_costs_one_gaussian(noise: float) -> None:
    """Stacked with its noise as unit, (gradient, bit − ½) of one example has norm 1/z: the cost of one Gaussian of z.

    Replaced by its opposite it moves by twice that, in both parts.
    """
    plan = replace(PLAN, clip_rule="quantile", noise_multiplier=noise)
    gradient, bit = 1 / plan.gradient_noise_multiplier, 0.5 / plan.count_noise
    assert math.hypot(gradient, bit) == pytest.approx(1 / noise, rel=1e-9)
    assert plan.gradient_noise_multiplier == QUANTILE_NOISE_FACTOR * noise
    assert plan.event.noise_multiplier == noise


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"active": 0}, "k is 0"),
        ({"active": 1001}, "d = 1000"),
        ({"clip": "l1"}, "coordinate, l2"),
        ({"clip_rule": "guess"}, "given, quantile"),
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
