"""The agent's own limits: parsed strictly, and no laxer plan passes."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_plans import BINOMIAL_PLAN, GAUSSIAN_PLAN

from fedspa.agent.ledger.ledger import Ledger
from fedspa.agent.policy import Code, Policy, PolicyRefusal
from fedspa.errors import BudgetError, ConfigError
from fedspa.mechanisms import Plan
from fedspa.privacy.budget import PrivacyBudget, worst_case_total

TEXT = """
epsilon = 1.5
delta = 1e-3
neighbours = "add-remove"
min_noise_multiplier = 2
max_local_steps = 50
max_rounds = 20
max_compression = 0.5
clippings = ["l2"]
"""
POLICY = Policy.parse(TEXT)
PLAN = replace(
    GAUSSIAN_PLAN,
    clip="l2",
    clip_value=1.0,
    batch=50,
    records=500,
    local_steps=50,
    participations=20,
    noise_multiplier=8.20,
)


def take_part(policy: Policy, ledger: Ledger, run: str, message: str) -> None:
    policy.admit(PLAN, ledger, "a", run, message)
    ledger.reserve("a", PLAN.event, run, message, cap=policy.cap, announced=PLAN.participations)
    ledger.release("a", run, message, "sha")


def test_parse() -> None:
    assert POLICY.min_noise_multiplier == 2.0
    assert POLICY.clippings == ("l2",)
    assert POLICY.cap == PrivacyBudget(1.5, 1e-3, "add-remove")
    assert POLICY.unit is None
    assert Policy.parse(TEXT + 'unit = "person"').unit == "person"


@pytest.mark.parametrize("key", re.findall(r"^\w+", TEXT, re.MULTILINE))
def test_every_limit_must_be_stated(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} is missing"):
        Policy.parse(re.sub(rf"(?m)^{key} .*$", "", TEXT))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("epsilon", value) for value in ("0", "-1", "nan", "inf", "true", '"1"', "[1]")),
        *(("delta", value) for value in ("0", "1", "1.5", "nan", "false")),
        *(("neighbours", value) for value in ('"swap"', "1", '["add-remove"]')),
        *(("min_noise_multiplier", value) for value in ("0", "-0.5", "nan", "inf")),
        *(("max_local_steps", value) for value in ("0", "1.0", "nan", "true", "-3")),
        *(("max_rounds", value) for value in ("0", "2.5", "inf")),
        *(("max_compression", value) for value in ("0", "1.1", "nan")),
        *(("clippings", value) for value in ("[]", '"l2"', '["linf"]', "[1]", '["l2", "median"]')),
    ],
)
def test_bad_values_are_refused_by_name(key: str, value: str) -> None:
    text = re.sub(rf"(?m)^{key} .*$", "", TEXT) + f"{key} = {value}\n"
    with pytest.raises(ConfigError, match=f"^{key} ") as caught:
        Policy.parse(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (TEXT + "max_step = 3", "unknown key 'max_step'; allowed: epsilon, delta"),
        (TEXT + "[privacy]\nepsilon = 2", "unknown key 'privacy'"),
        (TEXT + "epsilon = 2", "not TOML"),
        ("epsilon: 2", "not TOML"),
    ],
)
def test_what_is_no_policy(text: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Policy.parse(text)


# Of sums over 12 agents with 4 colluding: 8 shares of noise count, each of multiplier 33.3.
SUMMED = replace(BINOMIAL_PLAN, adversary="secure-aggregation", members=12, colluders=4)
TRUSTING = replace(
    POLICY,
    neighbours="replace-one",
    max_rounds=45,
    clippings=("coordinate",),
    min_honest=8,
    min_colluders=4,
    max_worst_case=20.0,
)
LAXER: list[tuple[Code, Policy, Plan]] = [
    ("unit", replace(POLICY, unit="person"), PLAN),
    ("unit", replace(POLICY, unit="record"), replace(PLAN, unit="person")),
    ("relation", replace(POLICY, neighbours="replace-one"), PLAN),
    ("relation", POLICY, replace(PLAN, sampling="fixed", neighbours="replace-one")),
    ("delta", replace(POLICY, delta=9e-4), PLAN),
    ("delta", replace(POLICY, delta=0.5), PLAN),
    ("noise-too-small", replace(POLICY, min_noise_multiplier=8.21), PLAN),
    ("too-many-steps", replace(POLICY, max_local_steps=49), PLAN),
    ("too-many-rounds", replace(POLICY, max_rounds=19), PLAN),
    ("compression-too-large", replace(POLICY, max_compression=0.049), PLAN),
    ("clipping-not-allowed", replace(POLICY, clippings=("coordinate",)), PLAN),
    ("aggregation", replace(TRUSTING, min_honest=None, min_colluders=0, max_worst_case=None), SUMMED),
    ("aggregation", replace(TRUSTING, min_honest=9), SUMMED),
    ("aggregation", TRUSTING, replace(SUMMED, members=11)),
    ("aggregation", replace(TRUSTING, min_colluders=5), SUMMED),
    ("aggregation", TRUSTING, replace(SUMMED, colluders=3)),
    ("noise-too-small", replace(TRUSTING, min_noise_multiplier=95), SUMMED),
]


@pytest.mark.parametrize(("code", "policy", "plan"), LAXER)
def test_a_laxer_plan_is_refused(code: Code, policy: Policy, plan: Plan) -> None:
    with pytest.raises(PolicyRefusal) as caught:
        policy.check(plan)
    assert caught.value.code == code
    assert code in str(caught.value)


def test_every_code_is_met() -> None:
    # An algorithm without any plan is `not-private`: tests/attacks and tests/flower meet it.
    assert {code for code, _, _ in LAXER} | {"budget", "not-private"} == set(get_args(Code))


def test_sums_over_honest_members_pass() -> None:
    TRUSTING.check(SUMMED)
    TRUSTING.check(replace(SUMMED, members=20, colluders=6))
    TRUSTING.check(replace(BINOMIAL_PLAN, trials=20_000))  # nobody's noise but its own
    replace(TRUSTING, min_noise_multiplier=94).check(SUMMED)  # 33.3·√8
    assert TRUSTING.cap == PrivacyBudget(1.5, 1e-3, "replace-one", 20.0, 8, 4)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("min_honest = 3", "min_honest and max_worst_case: a policy states both"),
        ("min_colluders = 3", "min_honest and max_worst_case: a policy states both"),
        ("min_honest = 0\nmax_worst_case = 3", "min_honest is 0"),
        ("min_honest = 2\nmax_worst_case = 1.4", r"max_worst_case is 1.4; it must be at least epsilon = 1\.5"),
        ("min_honest = 2\nmax_worst_case = 3\nmin_colluders = -1", "min_colluders is -1"),
    ],
)
def test_what_is_said_of_sums_is_said_whole(text: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match) as refused:
        Policy.parse(TEXT + text)
    assert "\n" not in str(refused.value)


def test_the_floor_of_all_runs_is_capped(tmp_path: Path) -> None:
    plan = replace(SUMMED, trials=60, participations=3)
    with Ledger.open(tmp_path / "ledger.sqlite") as ledger:
        TRUSTING.admit(plan, ledger, "a", "run", "0")
        for message in ("0", "1", "2"):
            ledger.reserve("a", plan.event, "run", message, cap=TRUSTING.cap, announced=3)
        spent, first, own = ledger.spent("a"), ledger.first_plan("a"), ledger.total("a", 1e-3, "replace-one")
        cost = worst_case_total(spent, 1e-3, "replace-one", first, own).epsilon
        assert own.epsilon < cost
        tight = replace(TRUSTING, epsilon=cost, max_worst_case=cost)
        with pytest.raises(PolicyRefusal, match="against all others together") as refused:
            tight.admit(plan, ledger, "a", "another", "0")
        assert refused.value.code == "budget"
        # Without a worst-case ε, what was aggregated counts as if all others had colluded.
        local = replace(BINOMIAL_PLAN, trials=20_000, participations=1)
        alone = replace(TRUSTING, epsilon=0.9 * cost, min_honest=None, min_colluders=0, max_worst_case=None)
        with pytest.raises(PolicyRefusal, match="of its cap"):
            alone.admit(local, ledger, "a", "another", "0")
        replace(TRUSTING, epsilon=0.9 * cost).admit(local, ledger, "a", "another", "0")


@given(
    noise=st.floats(0.1, 20),
    steps=st.integers(1, 100),
    rounds=st.integers(1, 40),
    active=st.integers(1, 1000),
    stricter=st.floats(1.0, 3.0),
)
def test_what_passes_passes_when_stricter(noise: float, steps: int, rounds: int, active: int, stricter: float) -> None:
    plan = replace(PLAN, noise_multiplier=noise, local_steps=steps, participations=rounds, active=active)
    allowed = noise >= 2 and steps <= 50 and rounds <= 20 and active <= 500
    if not allowed:
        with pytest.raises(PolicyRefusal):
            POLICY.check(plan)
        return
    POLICY.check(plan)
    POLICY.check(replace(plan, noise_multiplier=noise * stricter, local_steps=1, active=1))


def test_load(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    with pytest.raises(ConfigError, match="the path of a policy"):
        Policy.load(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not TOML"):
        Policy.load(path)
    path.write_text("epsilon = 1", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"policy .*policy\.toml: delta is missing"):
        Policy.load(path)
    path.write_text(TEXT, encoding="utf-8")
    assert Policy.load(path) == POLICY


def test_two_runs_of_one_under_a_cap_of_one_and_a_half(tmp_path: Path) -> None:
    """PLAN costs ε = 1.000, and a second one, which the server may choose by what it saw of the first, brings that to
    1.776: it is refused before it begins, not at its 20th round."""
    with Ledger.open(tmp_path / "ledger.sqlite") as ledger:
        for number in range(20):
            take_part(POLICY, ledger, "first", str(number))
        assert ledger.epsilon("a", 1e-3, "add-remove") == pytest.approx(1.0, abs=2e-3)
        with pytest.raises(PolicyRefusal, match=r"ε = 0\.(499|500) left") as caught:
            take_part(POLICY, ledger, "second", "0")
        assert caught.value.code == "budget"
        assert isinstance(caught.value.__cause__, BudgetError)
        assert ledger.participations("a", "second") == 0
        with pytest.raises(PolicyRefusal, match=r"rdp filter \(plans chosen after releases\)"):
            take_part(replace(POLICY, epsilon=1.77), ledger, "second", "0")
        take_part(replace(POLICY, epsilon=1.78), ledger, "second", "0")
