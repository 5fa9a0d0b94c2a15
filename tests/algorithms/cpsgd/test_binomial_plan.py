"""cpSGD's plan derives everything; its compression has an inverse; its trials are the fewest that serve."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_plans import BINOMIAL_PLAN

from fedspa.agent.policy import Policy, PolicyRefusal
from fedspa.algorithms.cpsgd.accounting import surely_infinite
from fedspa.algorithms.cpsgd.plan import BinomialPlan, trials_for_compression, with_least_trials
from fedspa.errors import PrivacyError
from fedspa.privacy import accounting

PLAN = BINOMIAL_PLAN


def test_derived_by_hand() -> None:
    assert PLAN.levels == 4
    assert PLAN.clip_norm == pytest.approx(5.0)  # √100·0.5
    assert PLAN.reach == 0.5
    assert PLAN.step == pytest.approx(1 / 3)  # 2·0.5/3
    assert PLAN.sigma == pytest.approx(100 / 2 / 3)  # s·√10,000/2
    assert PLAN.noise_multiplier == pytest.approx(100 / 6 * 10 / 5)
    assert PLAN.compression == pytest.approx(math.log2(10_004) / 32)
    assert (PLAN.sampling, PLAN.neighbours, PLAN.local_steps) == ("fixed", "replace-one", 1)


def test_a_rotated_plan_spans_what_a_rotated_coordinate_hardly_passes() -> None:
    rotated = replace(PLAN, rotation=True, clip="l2", clip_value=5.0)
    assert rotated.coordinates == 128
    assert rotated.reach == pytest.approx(4.99533 * 5 / math.sqrt(128), rel=1e-5)  # κ·G/√d
    assert rotated.event.rotation


SUMMED = replace(PLAN, adversary="secure-aggregation", members=12, colluders=4)


def test_secure_aggregation_counts_the_honest_members() -> None:
    assert (SUMMED.event.aggregated, SUMMED.event.members, SUMMED.event.colluders) == (8, 12, 4)
    assert SUMMED.floor_event == PLAN.event
    assert cost(PLAN) > cost(SUMMED) == cost(replace(PLAN, trials=8 * PLAN.trials))
    assert cost(replace(SUMMED, colluders=11)) == cost(PLAN)
    assert SUMMED.noise_multiplier == PLAN.noise_multiplier  # of the agent's own share
    assert ("members", "12", "added up at least, of whom up to 4 may collude") in SUMMED.report_rows()


@pytest.mark.parametrize("rotation", [False, True])
def test_the_sum_of_everyones_numbers_lies_within_its_bounds(rotation: bool) -> None:
    """Each is a level, 0 to 3, and Binomial(10,000, ½): over 20 agents, though 12 are enough."""
    found = replace(SUMMED, rotation=rotation).aggregation
    assert found is not None
    assert (found.members, found.colluders, found.honest) == (12, 4, 8)
    assert (found.low, found.high, found.count) == (0, 20 * 10_003, 128 if rotation else 100)


@pytest.mark.parametrize("rotation", [False, True])
def test_shares_are_calibrated_against_the_honest_ones(rotation: bool) -> None:
    alone, shared = (with_least_trials(replace(plan, rotation=rotation), 2.0) for plan in (PLAN, SUMMED))
    assert shared.trials == -(-alone.trials // 8)
    assert (shared.members, shared.colluders) == (12, 4)


@pytest.mark.parametrize(
    "changes",
    [
        {"members": 21},
        {"members": 1, "colluders": 0},
        {"colluders": 12},
        {"colluders": -1},
        {"members": 0},
        {"adversary": "local"},
    ],
)
def test_no_cohort_that_cannot_be(changes: dict[str, Any]) -> None:
    with pytest.raises(PrivacyError):
        replace(SUMMED, **changes)


def test_too_little_noise_has_no_guarantee() -> None:
    """5 trials: that a number is 6 or more tells a record apart, with a chance of 100·0.3·2⁻⁵ a release."""
    weak = replace(PLAN, trials=5)
    assert cost(weak) == math.inf
    edge = with_least_trials(weak, 1e9).trials
    assert cost(replace(PLAN, trials=edge)) < math.inf
    assert cost(replace(PLAN, trials=edge - 1)) == math.inf


def test_with_rotation_noise_can_run_out_too() -> None:
    weak = replace(PLAN, trials=20, rotation=True)
    assert cost(weak) == math.inf
    edge = with_least_trials(weak, 1e9).trials
    assert 30 < edge < 60  # (h + 1)/2v < 1: about 2·ln(10·128/δ of a release)
    assert cost(replace(weak, trials=edge)) < math.inf
    assert cost(replace(weak, trials=edge - 1)) == math.inf


@pytest.mark.parametrize(
    ("compression", "bits", "trials"),
    [(0.4, 1, 7130), (0.1, 1, 7), (0.1, 3, 1), (0.5, 4, 65520), (0.25, 8, 0), (0.02, 1, 0), (0.99, 1, 0)],
)
def test_trials_of_a_compression(compression: float, bits: int, trials: int) -> None:
    """2^(32·0.4) = 7131.55 → 7132 − 2; 2^3.2 = 9.19 → 9 − 2 and 9 − 8; 2^8 − 2^8 = 0 is refused."""
    if trials:
        assert trials_for_compression(compression, bits) == trials
        return
    with pytest.raises(PrivacyError, match="compression"):
        trials_for_compression(compression, bits)


@given(st.integers(1, 2**31 - 2**16), st.integers(1, 16))
def test_compression_and_trials_are_inverses(trials: int, bits: int) -> None:
    plan = replace(PLAN, trials=trials, bits=bits)
    again = trials_for_compression(plan.compression, bits) if plan.compression < 0.96 else trials
    assert abs(again - trials) <= 1e-12 * 32 * (trials + 2**bits) + 0.5


def cost(plan: BinomialPlan) -> float:
    return accounting.epsilon({plan.event: plan.participations}, plan.delta, neighbours="replace-one")


@pytest.mark.parametrize("epsilon", [0.5, 2.0, 100.0])
@pytest.mark.parametrize("rotation", [False, True])
def test_calibrated_to_the_fewest_trials(epsilon: float, rotation: bool) -> None:
    plan = with_least_trials(replace(PLAN, rotation=rotation, trials=1), epsilon)
    assert cost(plan) <= epsilon
    assert cost(replace(plan, trials=plan.trials - 1)) > epsilon


def test_what_no_noise_can_reach_is_said() -> None:
    with pytest.raises(PrivacyError, match="fewer bits"):
        with_least_trials(replace(PLAN, dimension=10**8, bits=12, rotation=True), 0.01)
    with pytest.raises(PrivacyError, match="epsilon"):
        with_least_trials(PLAN, math.inf)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("clip", "l2"),
        ("clip", "norm"),
        ("clip_value", 0.0),
        ("clip_value", math.nan),
        ("bits", 0),
        ("bits", 17),
        ("trials", 0),
        ("trials", 2.5),
        ("adversary", "nobody"),
        ("agents", 0),
        ("batch", 601),
        ("batch", 0),
        ("records", 0),
        ("participations", 0),
        ("delta", 0.0),
        ("delta", 0.01),
        ("dimension", 0),
        ("rotation", 1),
    ],
)
def test_no_inconsistent_plan_exists(field: str, value: object) -> None:
    with pytest.raises(PrivacyError):
        replace(PLAN, **{field: value})  # type: ignore[arg-type]


def test_no_sensitivity_is_a_field() -> None:
    assert not {field.name for field in fields(PLAN)} & {"sensitivity", "sigma", "step", "epsilon", "event"}


POLICY = Policy(
    epsilon=5.0,
    delta=1e-3,
    neighbours="replace-one",
    min_noise_multiplier=1.0,
    max_local_steps=1,
    max_rounds=45,
    max_compression=0.5,
    clippings=("coordinate",),
)


@pytest.mark.parametrize(
    ("plan", "code"),
    [
        (PLAN, None),
        (replace(PLAN, trials=5), "noise-too-small"),
        (replace(PLAN, delta=1.5e-3), "delta"),
        (replace(PLAN, participations=46), "too-many-rounds"),
        (replace(PLAN, trials=100_000), "compression-too-large"),
        (replace(PLAN, rotation=True, clip="l2"), "clipping-not-allowed"),
        (replace(PLAN, bits=7), "noise-too-small"),
    ],
)
def test_a_policy_judges_it(plan: BinomialPlan, code: str | None) -> None:
    if code is None:
        POLICY.check(plan)
        return
    with pytest.raises(PolicyRefusal) as refused:
        POLICY.check(plan)
    assert refused.value.code == code


def test_add_remove_policies_refuse_it() -> None:
    with pytest.raises(PolicyRefusal) as refused:
        replace(POLICY, neighbours="add-remove").check(PLAN)
    assert refused.value.code == "relation"


@pytest.mark.parametrize("bits", [1, 4, 8])
@pytest.mark.parametrize("delta", [1e-3, 1e-6])
def test_the_quick_test_for_no_epsilon_says_what_the_accountant_says(bits: int, delta: float) -> None:
    """Where it says that there is none, the accountant has none; where not, the accountant has one here."""
    plan = replace(PLAN, bits=bits, delta=delta)
    edge = with_least_trials(plan, 1e9).trials
    for trials in {1, edge // 2, edge - 1, edge, 2 * edge}:
        weak = replace(plan, trials=max(1, trials))
        assert surely_infinite(weak.event, weak.participations, delta) is (cost(weak) == math.inf)
