"""Whole runs of cpSGD: what they promise, and that a promise which is none is said in every output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from small_runs import ALGORITHMS, small

import fedspa
from fedspa.agent.ledger.ledger import Ledger
from fedspa.agent.policy import PolicyRefusal
from fedspa.algorithms.cpsgd.accounting import composed_epsilon
from fedspa.algorithms.cpsgd.event import BinomialEvent
from fedspa.algorithms.cpsgd.plan import BinomialPlan
from fedspa.engine.native import library
from fedspa.errors import BudgetError, PrivacyError
from fedspa.privacy.cap import BY_FILTER, floor_total
from fedspa.report.record import promise, read
from fedspa.report.tables import epsilons
from fedspa.runs.config import load
from fedspa.runs.setup import prepare
from fedspa.runs.statement import plain_words, shown, statement


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
    assert summary["epsilon"] == composed_epsilon({event: 4}, 1e-3)
    assert (summary["accountant"], summary["adversary"], summary["private"]) == ("binomial", "local", True)
    assert (summary["bits"], summary["trials"], summary["neighbours"]) == (4, 9000, "replace-one")
    assert "against the server and all others" in statement(summary)
    assert "accountant binomial" in statement(summary)
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
        floor = floor_total(ledger.spent("agent-0"), 1e-3, "replace-one", first, own)
        assert floor.epsilon == summary["epsilon_floor"]
    assert (event.members, event.colluders, event.honest, times) == (5, 1, 4, 4)
    # The same noise of each agent: its floor is what it pays without aggregation.
    assert summary["epsilon"] < alone["epsilon"] == summary["epsilon_floor"]
    assert (alone["epsilon_floor"], alone["members"], alone["colluders"]) == (None, None, None)
    for line in (tmp_path / "summed/metrics.jsonl").read_text().splitlines():
        metrics = json.loads(line)
        assert metrics["private"]
        assert metrics["epsilon"] < metrics["epsilon_floor"]
    assert result.metrics[-1].epsilon_floor == summary["epsilon_floor"]
    said = statement(summary)
    assert "against the server with up to 1 of the 5 agents or more whose sums it sees" in said
    assert f"FLOOR ε = {shown(summary['epsilon_floor'])} against all others together" in said
    words = dict(plain_words(summary, 6))
    assert "up to 1 of these agents" in words["Against whom."]
    assert "the noise of 4 honest agents" in words["Against whom."]
    assert f"ε = {shown(summary['epsilon_floor'])} at the same δ" in words["The floor."]
    assert "The floor." not in dict(plain_words(alone, 6))


def test_a_floor_that_bounds_nothing_is_said_to_be_infinite(tmp_path: Path) -> None:
    few = {"rotation": False, "bits": 1, "trials": 12}
    result = fedspa.run(cpsgd(tmp_path / "run", few, privacy={"noise": "secure", **SUMMED}))
    summary = result.summary
    assert summary["private"]
    assert summary["epsilon"] is not None
    assert (summary["epsilon_floor"], result.metrics[-1].epsilon_floor) == (None, None)
    assert "FLOOR ε = ∞ against all others together" in statement(summary)
    assert "nothing is promised then" in dict(plain_words(summary, 6))["The floor."]
    table = epsilons(promise(read(tmp_path / "run")))
    assert [row[1] for row in table if row[0] == "floor"] == ["∞"]


def test_epsilon_sets_the_trials_of_the_honest_members(tmp_path: Path) -> None:
    plans = [
        prepare(load(cpsgd(tmp_path / "run", {"trials": None}, privacy={"epsilon": 3.0, **changes}))).plan
        for changes in ({}, SUMMED)
    ]
    alone, shared = plans
    assert isinstance(alone, BinomialPlan)
    assert isinstance(shared, BinomialPlan)
    assert shared.trials == -(-alone.trials // 4)


def test_epsilon_sets_the_trials(tmp_path: Path) -> None:
    config = load(cpsgd(tmp_path / "run", {"trials": None}, privacy={"epsilon": 3.0}))
    plan = prepare(config).plan
    assert plan is not None
    assert isinstance(plan.event, BinomialEvent)
    assert 2.99 < composed_epsilon({plan.event: 4}, 1e-3) <= 3.0


def test_a_ledger_that_holds_a_run_without_a_guarantee_says_so(tmp_path: Path) -> None:
    shared = {"run": {"ledger": str(tmp_path / "ledger.sqlite"), "engine": "generic"}}
    fedspa.run(cpsgd(tmp_path / "weak", {"trials": 7}, **shared))
    summary = fedspa.run(cpsgd(tmp_path / "strong", privacy={"noise": "secure"}, **shared)).summary
    assert summary["private"]
    assert summary["epsilon_total"] is None
    assert any("no guarantee over all runs" in warning for warning in summary["warnings"])


def test_runs_of_both_kinds_on_one_ledger_add_up(tmp_path: Path) -> None:
    shared: dict[str, Any] = {"ledger": str(tmp_path / "ledger.sqlite"), "engine": "generic"}
    fixed = {"sampling": "fixed", "noise_multiplier": 4.0, "noise": "secure"}
    gaussian = fedspa.run(small(tmp_path / "gaussian", run=dict(shared), privacy=fixed)).summary
    rounded = fedspa.run(cpsgd(tmp_path / "rounded", run=dict(shared), privacy={"noise": "secure"})).summary
    # The second run was chosen after the first: both are moments of one filter, which cpSGD enters release by release.
    assert rounded["epsilon_total"] > max(gaussian["epsilon"], rounded["epsilon"])
    assert (gaussian["accountant_total"], rounded["accountant_total"]) == ("pld (one plan)", BY_FILTER)
    assert f"with all runs in the ledger ({BY_FILTER})" in statement(rounded)
    assert total_priced_by(tmp_path / "rounded") == BY_FILTER


def total_priced_by(folder: Path) -> str:
    """As the report's table has it."""
    (accountant,) = (row[4] for row in epsilons(promise(read(folder))) if "all runs" in row[-1])
    return accountant


@pytest.mark.parametrize(
    ("sections", "code"),
    [({"privacy": {"adversary": "secure-aggregation"}}, "aggregation")],
)
def test_a_policy_refuses_what_is_not_private(tmp_path: Path, sections: dict[str, Any], code: str) -> None:
    (tmp_path / "policy.toml").write_text(
        'epsilon = 50.0\ndelta = 1e-3\nneighbours = "replace-one"\nmin_noise_multiplier = 0.01\nmax_local_steps = 1\n'
        'max_rounds = 10\nmax_compression = 0.6\nclippings = ["coordinate"]\n'
    )
    limits = {"run": {"policy": str(tmp_path / "policy.toml")}}
    fedspa.run(cpsgd(tmp_path / "fine", **limits))
    with pytest.raises(PolicyRefusal) as refused:
        fedspa.run(cpsgd(tmp_path / "refused", **limits, **sections))
    assert refused.value.code == code
    assert not (tmp_path / "refused").exists()


def test_a_compression_without_room_for_noise_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(PrivacyError, match=r"compression 0\.1 leaves"):
        fedspa.run(cpsgd(tmp_path / "run", {"compression": 0.1, "trials": None}))


@pytest.mark.skipif(library.library() is None, reason="the native engine was not built")
def test_it_takes_the_fastest_engine(tmp_path: Path) -> None:
    fast = fedspa.run(cpsgd(tmp_path / "native", run={"engine": "auto"})).summary
    slow = fedspa.run(cpsgd(tmp_path / "generic", run={"engine": "generic"})).summary
    assert (fast["engine"], slow["engine"]) == ("native", "generic")
    assert fast["accuracy_last"] == pytest.approx(slow["accuracy_last"], abs=0.02)
    assert prepare(load(cpsgd(tmp_path / "run", privacy={"noise": "exact"}))).engine.name == "generic"


def test_totals_over_local_and_aggregated_runs(tmp_path: Path) -> None:
    """Ten agents, m = 200: each run is as its own adversary saw it, and the floor composes everything."""
    shared: dict[str, Any] = {"ledger": str(tmp_path / "ledger.sqlite"), "engine": "generic"}
    sections: dict[str, dict[str, Any]] = {
        "federation": {"agents": 10, "rounds": 2, "per_round": 10},
    }
    secure, few = {"noise": "secure"}, {"bits": 1, "rotation": False, "trials": 200}
    alone = fedspa.run(cpsgd(tmp_path / "alone", few, **sections, privacy=dict(secure))).summary
    sums = {**secure, "adversary": "secure-aggregation", "colluders": 2}
    summed = fedspa.run(cpsgd(tmp_path / "summed", few, **sections, privacy=sums, run=dict(shared))).summary
    assert summed["epsilon_total"] == summed["epsilon"] < alone["epsilon"] / 2
    assert summed["epsilon_total_floor"] == summed["epsilon_floor"] == alone["epsilon"]
    later = fedspa.run(cpsgd(tmp_path / "later", few, **sections, privacy=dict(secure), run=dict(shared))).summary
    assert later["private"]
    assert (later["members"], later["epsilon_floor"]) == (None, None)
    assert alone["epsilon"] < later["epsilon_total"] < later["epsilon_total_floor"]
    both = f"{shown(later['epsilon_total'])} against the server with all runs in the ledger ({BY_FILTER})"
    assert f"{both}, and {shown(later['epsilon_total_floor'])} against all others together" in statement(later)
    assert "with up to the colluding agents that each run reckoned with" in str(plain_words(later, 10))
    assert [row[0] for row in epsilons(promise(read(tmp_path / "later"))) if "all runs" in row[-1]] == [
        "verified",
        "floor",
    ]


POLICY = """
epsilon = {epsilon}
delta = 1e-3
neighbours = "replace-one"
min_noise_multiplier = 0.01
max_local_steps = 1
max_rounds = 10
max_compression = 1.0
clippings = ["coordinate"]
"""


def test_a_policy_without_a_floor_prices_what_was_aggregated_by_it(tmp_path: Path) -> None:
    shared: dict[str, Any] = {"ledger": str(tmp_path / "ledger.sqlite"), "engine": "generic"}
    sections: dict[str, dict[str, Any]] = {
        "federation": {"agents": 10, "rounds": 2, "per_round": 10},
    }
    plain = {"bits": 1, "rotation": False}
    sums = {"noise": "secure", "adversary": "secure-aggregation"}
    summed = fedspa.run(
        cpsgd(tmp_path / "summed", {**plain, "trials": 60}, **sections, privacy=sums, run=dict(shared))
    ).summary
    between = (summed["epsilon"] + summed["epsilon_floor"]) / 2
    quiet, many = {"noise": "secure"}, {**plain, "trials": 10**6}
    capped = {**shared, "policy": str(tmp_path / "policy.toml")}
    (tmp_path / "policy.toml").write_text(POLICY.format(epsilon=between))
    with pytest.raises(BudgetError):
        fedspa.run(cpsgd(tmp_path / "refused", many, **sections, privacy=dict(quiet), run=capped))
    floor = 4 * summed["epsilon_floor"]  # the filter, by which all but a first plan is priced, has its own
    (tmp_path / "policy.toml").write_text(POLICY.format(epsilon=between) + f"min_honest = 11\nmax_floor = {floor}\n")
    with pytest.raises(BudgetError):
        fedspa.run(cpsgd(tmp_path / "refused", many, **sections, privacy=dict(quiet), run=capped))
    (tmp_path / "policy.toml").write_text(POLICY.format(epsilon=between) + f"min_honest = 10\nmax_floor = {floor}\n")
    assert fedspa.run(cpsgd(tmp_path / "allowed", many, **sections, privacy=dict(quiet), run=capped)).summary["private"]
    (tmp_path / "policy.toml").write_text(POLICY.format(epsilon=floor) + f"min_honest = 10\nmax_floor = {floor}\n")
    with pytest.raises(BudgetError, match="against all others together"):
        fedspa.run(cpsgd(tmp_path / "more", {**plain, "trials": 20}, **sections, privacy=sums, run=capped))
