"""Plans and events of sums with shares of noise: what they say, refuse, and are calibrated to."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from sample_plans import SHARED_PLAN

from fedspa.errors import PrivacyError
from fedspa.mechanisms import event_of
from fedspa.mechanisms.base import CLIP_UNITS, Cohort, Plan, PlanRequest
from fedspa.mechanisms.discrete_gaussian.plan import (
    DISCRETE_GAUSSIAN,
    FINE,
    MOST_BOUND,
    SIGMA,
    DiscreteGaussianEvent,
    calibrated,
    check,
)
from fedspa.mechanisms.discrete_gaussian.release import REACH
from fedspa.mechanisms.gaussian.plan import noise_multiplier
from fedspa.privacy import accounting
from fedspa.privacy.event import Event

EVENT = DiscreteGaussianEvent(600, 50, 2000, 10, 2)
CONFIG: dict[str, Any] = {
    "algorithm.local_steps": 1,
    "algorithm.coding": None,
    "algorithm.mask": "shared",
    "algorithm.compression": 0.1,
    "privacy.sampling": "poisson",
    "privacy.clip": "l2",
    "privacy.epsilon": 1.0,
    "privacy.noise_multiplier": None,
}


def asked(**other: Any) -> PlanRequest:
    values: dict[str, Any] = {
        "dimension": 1000,
        "active": 50,
        "agents": 100,
        "participations": 5,
        "sampling": "poisson",
        "batch": 600,
        "records": 600,
        "local_steps": 1,
        "neighbours": None,
        "delta": 1e-3,
        "clip": "l2",
        "clip_value": 0.5,
        "epsilon": 1.0,
        "options": {"privacy.noise_multiplier": None},
        "cohort": Cohort(10, 12, 2),
    }
    return PlanRequest(**{**values, **other})


def cost(event: Event, times: int = 5, neighbours: Any = "add-remove") -> float:
    return accounting.epsilon({event: times}, 1e-3, neighbours=neighbours)


def test_a_plan_is_one() -> None:
    plan: Plan = SHARED_PLAN
    assert plan.event == EVENT
    assert plan.worst_case_event == EVENT.worst_case() == replace(EVENT, members=0, colluders=0)
    assert (plan.batch, plan.local_steps, plan.sampling, plan.clip) == (600, 1, "poisson", "l2")
    assert plan.noise_multiplier == 2 * 1024 * 2 / 2000


def test_texts_are_canonical_and_say_the_cohort() -> None:
    assert EVENT.to_json() == (
        '{"active":50,"bound":2000,"colluders":2,"kind":"discrete-gaussian","members":10,"records":600}'
    )
    assert event_of(EVENT.to_json()) == EVENT
    floor = EVENT.worst_case()
    assert floor.to_json() == '{"active":50,"bound":2000,"kind":"discrete-gaussian","records":600}'
    assert event_of(floor.to_json()) == floor == floor.worst_case()
    assert (EVENT.honest, floor.honest) == (8, 1)
    assert EVENT.with_noise("seeded").as_server_saw() == EVENT
    assert "10 members with up to 2 colluding" in str(EVENT)
    assert "own share" in str(floor)


@pytest.mark.parametrize(
    "wrong",
    [
        {"bound": 0},
        {"bound": 1.5},
        {"members": 1},
        {"colluders": 10},
        {"members": 0},
    ],
)
def test_events_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(PrivacyError):
        replace(EVENT, **wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"active": 1001},
        {"delta": 1 / 600},
        {"members": 0, "colluders": 0},
        {"most": 9},
    ],
)
def test_plans_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(PrivacyError):
        replace(SHARED_PLAN, **wrong)


@pytest.mark.parametrize(("members", "colluders"), [(10, 2), (100, 20), (2, 1)])
@pytest.mark.parametrize("neighbours", ["add-remove", "replace-one"])
def test_calibration_is_to_the_last_step(members: int, colluders: int, neighbours: Any) -> None:
    plan = calibrated(asked(cohort=Cohort(members, members, colluders), neighbours=neighbours))
    assert cost(plan.event, neighbours=neighbours) <= 1 < cost(replace(plan.event, bound=plan.bound + 1), 5, neighbours)
    # The noise of all honest shares, against that of one Gaussian at the same ε.
    sizes = {"batch": 600, "records": 600, "steps": 1, "participations": 5}
    gaussian = noise_multiplier(1.0, 1e-3, sampling="poisson", neighbours=neighbours, **sizes)
    assert 1 - 1e-3 < plan.noise_multiplier * math.sqrt(members - colluders) / gaussian < 1.007
    assert cost(plan.worst_case_event, neighbours=neighbours) >= cost(plan.event, neighbours=neighbours)


def test_mixed_with_others_it_composes_as_one_more_gaussian() -> None:
    from fedspa.mechanisms.gaussian.plan import GaussianEvent

    other = GaussianEvent("poisson", 600, 600, 1, 5.0)
    both = accounting.epsilon({EVENT: 5, other: 1}, 1e-3, neighbours="add-remove")
    shift = math.sqrt(5 * EVENT.step.gaussian_shift("add-remove") ** 2 + 0.2**2)  # type: ignore[operator]
    assert math.isclose(both, accounting.gaussian_epsilon(shift, 1e-3), rel_tol=1e-9)


def test_noise_that_is_given_is_an_agents_own() -> None:
    plan = calibrated(asked(epsilon=None, options={"privacy.noise_multiplier": 3.0}))
    assert plan.bound == int(SIGMA * FINE / 3)
    assert plan.noise_multiplier >= 3.0
    with pytest.raises(PrivacyError, match="a share takes"):
        calibrated(asked(epsilon=None, options={"privacy.noise_multiplier": 1e5}))


def test_a_step_is_on_all_records_of_a_sum() -> None:
    with pytest.raises(PrivacyError, match=r"algorithm\.batch = 600"):
        calibrated(asked(batch=100))
    with pytest.raises(PrivacyError, match="secure-aggregation"):
        calibrated(asked(cohort=None))
    with pytest.raises(PrivacyError, match="larger epsilon"):
        calibrated(asked(epsilon=1e-9, delta=1e-6))


def test_plans_are_made_again_from_ledgers_and_announcements() -> None:
    assert DISCRETE_GAUSSIAN.of_event(EVENT, asked()) == SHARED_PLAN
    keys = ("dimension", "active", "sampling", "batch", "local_steps", *DISCRETE_GAUSSIAN.announced)
    told = {key: getattr(SHARED_PLAN, key) for key in keys}
    assert DISCRETE_GAUSSIAN.of_terms(told) == SHARED_PLAN
    for key, value in (("batch", 100), ("sampling", "fixed"), ("local_steps", 2)):
        with pytest.raises(PrivacyError, match=key):
            DISCRETE_GAUSSIAN.of_terms({**told, key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("algorithm.local_steps", 2),
        ("algorithm.mask", "per-agent"),
        ("privacy.sampling", "fixed"),
        ("privacy.clip", "coordinate"),
        ("privacy.epsilon", None),
    ],
)
def test_configs_that_do_not_add_up_are_refused(key: str, value: object) -> None:
    check(CONFIG)
    check({**CONFIG, "algorithm.mask": "per-agent", "algorithm.compression": 1.0})
    with pytest.raises(ValueError, match=key):
        check({**CONFIG, key: value})


@pytest.mark.parametrize("active", [10, 200, 10_000])
def test_bounds_hold_any_sum_of_honest_shares(active: int) -> None:
    """Every member at its reach, and fourteen standard deviations of all noise."""
    plan = replace(SHARED_PLAN, dimension=10_000, active=active, records=700)
    most = plan.reach * plan.bound / CLIP_UNITS / FINE
    assert 700 / 8 <= plan.reach / CLIP_UNITS <= 700
    if active <= 64:
        assert plan.reach == 700 * CLIP_UNITS  # nothing is held
    total = plan.aggregation
    assert total.high == -total.low >= 12 * most + 14 * SIGMA * math.sqrt(12)
    assert total.high <= 12 * (most + 1) + 14 * SIGMA * math.sqrt(12) + 1
    assert (total.members, total.colluders, total.honest, total.count) == (10, 2, 8, active)
    assert REACH > 13 * SIGMA
    assert plan.update_bound(1.0, 2.0) > 2 * (most * FINE / plan.bound * plan.clip_value / 700)


def test_sums_beyond_64_bits_are_refused() -> None:
    SHARED_PLAN.check_sendable(exact=True)
    with pytest.raises(PrivacyError, match="64-bit"):
        replace(SHARED_PLAN, records=2**22, delta=1e-9, bound=MOST_BOUND).check_sendable(exact=False)
