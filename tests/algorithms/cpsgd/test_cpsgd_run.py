"""Whole runs of cpSGD: what they promise, and that a promise which is none is said in every output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from small_runs import ALGORITHMS, small

import fedspa
from fedspa.agent.ledger.ledger import Ledger
from fedspa.algorithms.cpsgd.plan import BinomialEvent
from fedspa.errors import ConfigError, PrivacyError
from fedspa.mechanisms.base import Cohort
from fedspa.privacy.budget import worst_case_total
from fedspa.privacy.event import shown
from fedspa.report.record import promise, read
from fedspa.runs.config import cohort_of, load
from fedspa.runs.guarantee import describe_guarantee, statement


def cpsgd(out: Path, options: dict[str, Any] | None = None, **sections: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """A small run; an option of None is unset."""
    base = ALGORITHMS["cpsgd"]
    merged = {name: {**base.get(name, {}), **sections.get(name, {})} for name in {*base, *sections}}
    own = {**base["algorithm"]["options"], **(options or {})}
    merged["algorithm"]["options"] = {key: value for key, value in own.items() if value is not None}
    return small(out, **merged)


def test_a_run_states_what_its_ledger_holds(tmp_path: Path) -> None:
    result = fedspa.run(cpsgd(tmp_path / "run", privacy={"noise": "secure"}))
    summary = result.summary
    with Ledger.open(tmp_path / "run/ledger.sqlite", create=False) as ledger:
        spent = ledger.spent("agent-0")
        (event,) = spent
        assert isinstance(event, BinomialEvent)
        assert spent[event] == 4
        assert ledger.epsilon("agent-0", 1e-3, "replace-one") == summary["epsilon"]
        with pytest.raises(PrivacyError, match="replace-one"):
            ledger.epsilon("agent-0", 1e-3, "add-remove")
    assert event.noise == "secure"
    assert (summary["accountant"], summary["adversary"], summary["private"]) == ("pld", "local", True)
    assert (summary["bits"], summary["trials"], summary["neighbours"]) == (4, 9000, "replace-one")
    assert "against the server and all others" in statement(summary)
    assert "accountant pld" in statement(summary)
    assert result.metrics[-1].private


def test_outside_the_theorem_it_runs_and_promises_nothing(tmp_path: Path) -> None:
    result = fedspa.run(cpsgd(tmp_path / "run", {"compression": 0.1, "bits": 1, "trials": None}))
    summary = result.summary
    assert summary["trials"] == 7
    assert summary["compression"] == pytest.approx(0.1, abs=2e-3)
    assert summary["epsilon"] is None
    assert not summary["private"]
    assert statement(summary).startswith("NONE")
    for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines():
        assert json.loads(line)["epsilon"] is None
        assert json.loads(line)["private"] is False


SUMMED = {"adversary": "secure-aggregation", "members": 5, "colluders": 1}


def test_under_secure_aggregation_both_epsilons_are_stated_everywhere(tmp_path: Path) -> None:
    alone = fedspa.run(cpsgd(tmp_path / "alone", privacy={"noise": "secure"})).summary
    result = fedspa.run(cpsgd(tmp_path / "summed", privacy={"noise": "secure", **SUMMED}))
    summary = result.summary
    assert (summary["adversary"], summary["members"], summary["colluders"]) == ("secure-aggregation", 5, 1)
    assert summary["private"]
    assert not any("private" in warning or "guarantee" in warning for warning in summary["warnings"])
    with Ledger.open(tmp_path / "summed/ledger.sqlite", create=False) as ledger:
        ((event, times),) = ledger.spent("agent-0").items()
        assert ledger.epsilon("agent-0", 1e-3, "replace-one") == summary["epsilon"]
        own, first = ledger.total("agent-0", 1e-3, "replace-one"), ledger.first_plan("agent-0")
        floor = worst_case_total(ledger.spent("agent-0"), 1e-3, "replace-one", first, own)
        assert floor.epsilon == summary["epsilon_worst_case"]
    assert (event.members, event.colluders, event.honest, times) == (5, 1, 4, 4)
    # The same noise of each agent: its worst case is what it pays without aggregation.
    assert summary["epsilon"] < alone["epsilon"] == summary["epsilon_worst_case"]
    assert (alone["epsilon_worst_case"], alone["members"], alone["colluders"]) == (None, None, None)
    for line in (tmp_path / "summed/metrics.jsonl").read_text().splitlines():
        metrics = json.loads(line)
        assert metrics["private"]
        assert metrics["epsilon"] < metrics["epsilon_worst_case"]
    assert result.metrics[-1].epsilon_worst_case == summary["epsilon_worst_case"]
    said = statement(summary)
    assert "against the server with up to 1 of the 5 agents or more whose sums it sees" in said
    assert f"WORST-CASE ε = {shown(summary['epsilon_worst_case'])} against all others together" in said
    words = dict(describe_guarantee(summary, 6))
    assert "up to 1 of these agents" in words["Against whom."]
    assert "the noise of 4 honest agents" in words["Against whom."]
    assert f"ε = {shown(summary['epsilon_worst_case'])} at the same δ" in words["The worst case."]
    assert "The worst case." not in dict(describe_guarantee(alone, 6))


def test_a_floor_that_bounds_nothing_is_said_to_be_infinite(tmp_path: Path) -> None:
    few = {"bits": 1, "trials": 12}
    result = fedspa.run(cpsgd(tmp_path / "run", few, privacy={"noise": "secure", **SUMMED}))
    summary = result.summary
    assert summary["private"]
    assert summary["epsilon"] is not None
    assert (summary["epsilon_worst_case"], result.metrics[-1].epsilon_worst_case) == (None, None)
    assert "WORST-CASE ε = ∞ against all others together" in statement(summary)
    assert "nothing is promised then" in dict(describe_guarantee(summary, 6))["The worst case."]
    held = promise(read(tmp_path / "run"))
    assert held is not None
    assert held.facts["epsilon_worst_case"] is None


# What a config of cpSGD must say, and that each refusal is one line that names its key.

GOOD: dict[str, dict[str, Any]] = {
    "federation": {"agents": 6, "per_round": 6},
    "algorithm": {"name": "cpsgd", "local_steps": 1, "options": {"trials": 9000}},
    "privacy": {"sampling": "fixed", "clip": "coordinate"},
}


def changed(key: str, value: Any) -> dict[str, dict[str, Any]]:
    section, _, name = key.partition(".")
    if name.startswith("options."):
        name, value = "options", {"trials": 9000, name.partition(".")[2]: value}
    return {**GOOD, section: {**GOOD.get(section, {}), name: value}}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("federation.per_round", 5),
        ("algorithm.local_steps", 2),
        ("algorithm.coding", "f32"),
        ("algorithm.options.bits", 17),
        ("privacy.sampling", "poisson"),
        ("privacy.neighbours", "add-remove"),
        ("privacy.clip", "l2"),
        ("privacy.noise_multiplier", 1.0),
        ("algorithm.options.trials", 2**31),
    ],
)
def test_what_cpsgd_cannot_do_is_refused_by_name(key: str, value: Any) -> None:
    load(GOOD)
    with pytest.raises(ConfigError, match=key) as refused:
        load(changed(key, value))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "noise",
    [{}, {"epsilon": 1.0, "trials": 5}, {"epsilon": 1.0, "compression": 0.4}, {"trials": 5, "compression": 0.4}],
)
def test_exactly_one_thing_decides_the_trials(noise: dict[str, Any]) -> None:
    options = {key: noise[key] for key in noise if key != "epsilon"}
    values = {**GOOD, "privacy": {"sampling": "fixed", "clip": "coordinate", "epsilon": noise.get("epsilon")}}
    values["algorithm"] = {**GOOD["algorithm"], "options": options}
    with pytest.raises(ConfigError, match="exactly one of"):
        load(values)


def summed(**privacy: Any) -> dict[str, dict[str, Any]]:
    return {**GOOD, "privacy": {**GOOD["privacy"], "adversary": "secure-aggregation", **privacy}}


def test_sums_over_a_rounds_agents() -> None:
    assert cohort_of(load(GOOD)) is None
    assert cohort_of(load(summed())) == Cohort(members=6, most=6, colluders=0)
    assert cohort_of(load(summed(members=4, colluders=3))) == Cohort(members=4, most=6, colluders=3)


@pytest.mark.parametrize(
    ("privacy", "match"),
    [
        ({"members": 7}, r"privacy\.members is 7; it must not exceed federation\.per_round = 6"),
        ({"members": 1}, r"privacy\.members is 1"),
        ({"colluders": 6}, r"privacy\.colluders is 6; it must be below .* 6 "),
        ({"adversary": "local", "colluders": 1}, r"privacy\.colluders is 1, which is for"),
    ],
)
def test_a_cohort_that_hides_nobody_is_refused_by_name(privacy: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match) as refused:
        load(summed(**privacy))
    assert "\n" not in str(refused.value)


def test_a_sum_over_one_agent_and_one_of_no_noise_are_refused() -> None:
    alone = {**summed(), "federation": {"agents": 1, "per_round": 1}}
    with pytest.raises(ConfigError, match=r"federation\.per_round is 1; .* 2 or more"):
        load(alone)
    with pytest.raises(ConfigError, match="fedavg is not run under it, only: fedspa, dp-fed, cpsgd"):
        load({"algorithm": {"name": "fedavg"}, "privacy": {"adversary": "secure-aggregation"}})
