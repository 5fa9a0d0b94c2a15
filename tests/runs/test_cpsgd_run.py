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
from fedspa.engine.native import library
from fedspa.errors import BudgetError, PrivacyError
from fedspa.mechanisms.binomial.bound import composed_epsilon
from fedspa.mechanisms.binomial.event import BinomialEvent
from fedspa.privacy.cap import BY_FILTER
from fedspa.report.promise import promise
from fedspa.report.read import read
from fedspa.report.tables import epsilons
from fedspa.runs.config import load
from fedspa.runs.setup import prepare
from fedspa.runs.statement import statement


def cpsgd(out: Path, **sections: dict[str, Any]) -> dict[str, dict[str, Any]]:
    base = ALGORITHMS["cpsgd"]
    return small(out, **{name: {**base.get(name, {}), **sections.get(name, {})} for name in {*base, *sections}})


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
    assert summary["epsilon_published"] > summary["epsilon"]
    assert (summary["accountant"], summary["adversary"], summary["private"]) == ("binomial", "local", True)
    assert (summary["bits"], summary["trials"], summary["neighbours"]) == (4, 9000, "replace-one")
    assert "against the server and all others" in statement(summary)
    assert "accountant binomial" in statement(summary)
    assert result.metrics[-1].private


def test_outside_the_theorem_it_runs_and_promises_nothing(tmp_path: Path) -> None:
    sections: dict[str, dict[str, Any]] = {"algorithm": {"compression": 0.1, "bits": 1}, "privacy": {"trials": None}}
    result = fedspa.run(cpsgd(tmp_path / "run", **sections))
    summary = result.summary
    assert summary["trials"] == 7
    assert summary["compression"] == pytest.approx(0.1, abs=2e-3)
    assert summary["epsilon"] is None
    assert summary["epsilon_published"] is None
    assert not summary["private"]
    assert summary["warnings"][0].startswith("no guarantee")
    assert statement(summary).startswith("NONE")
    assert "ε" not in statement(summary)
    for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines():
        assert json.loads(line)["epsilon"] is None
        assert json.loads(line)["private"] is False


def test_secure_aggregation_is_labelled_everywhere(tmp_path: Path) -> None:
    alone = fedspa.run(cpsgd(tmp_path / "alone")).summary
    result = fedspa.run(cpsgd(tmp_path / "summed", privacy={"adversary": "secure-aggregation"}))
    summary = result.summary
    assert summary["epsilon"] < alone["epsilon"]
    assert summary["adversary"] == "secure-aggregation"
    assert not summary["private"]
    assert not any(metrics.private for metrics in result.metrics)
    assert "secure aggregation" in summary["warnings"][0]
    assert "NOT PRIVATE against the server" in statement(summary)
    # The same noise: only what is claimed differs.
    assert summary["accuracy_last"] == alone["accuracy_last"]


def test_epsilon_sets_the_trials(tmp_path: Path) -> None:
    config = load(cpsgd(tmp_path / "run", privacy={"trials": None, "epsilon": 3.0}))
    plan = prepare(config).plan
    assert plan is not None
    assert isinstance(plan.event, BinomialEvent)
    assert 2.99 < composed_epsilon({plan.event: 4}, 1e-3) <= 3.0


def test_a_ledger_that_holds_a_run_without_a_guarantee_says_so(tmp_path: Path) -> None:
    shared = {"run": {"ledger": str(tmp_path / "ledger.sqlite"), "engine": "generic"}}
    fedspa.run(cpsgd(tmp_path / "weak", privacy={"trials": 7}, **shared))
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
    older = {key: value for key, value in rounded.items() if key != "accountant_total"}
    (tmp_path / "rounded/summary.json").write_text(json.dumps(older))
    assert total_priced_by(tmp_path / "rounded") == "–"
    assert "with all runs in the ledger (accountant not recorded)" in statement(older)


def total_priced_by(folder: Path) -> str:
    """As the report's table has it."""
    (accountant,) = (row[3] for row in epsilons(promise(read(folder))) if "all runs" in row[-1])
    return accountant


@pytest.mark.parametrize(
    ("sections", "code"),
    [({"privacy": {"trials": 7}}, "not-private"), ({"privacy": {"adversary": "secure-aggregation"}}, "not-private")],
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
        fedspa.run(cpsgd(tmp_path / "run", algorithm={"compression": 0.1}, privacy={"trials": None}))


@pytest.mark.skipif(library.library() is None, reason="the native engine was not built")
def test_it_takes_the_fastest_engine(tmp_path: Path) -> None:
    fast = fedspa.run(cpsgd(tmp_path / "native", run={"engine": "auto"})).summary
    slow = fedspa.run(cpsgd(tmp_path / "generic", run={"engine": "generic"})).summary
    assert (fast["engine"], slow["engine"]) == ("native", "generic")
    assert fast["accuracy_last"] == pytest.approx(slow["accuracy_last"], abs=0.02)
    assert prepare(load(cpsgd(tmp_path / "run", privacy={"noise": "exact"}))).engine.name == "generic"


def test_secure_aggregation_does_not_make_later_totals_private(tmp_path: Path) -> None:
    """Ten agents, m = 60: the run's own ε counts all their noise; the ledger, a cap and a later run do not."""
    shared: dict[str, Any] = {"ledger": str(tmp_path / "ledger.sqlite"), "engine": "generic"}
    sections: dict[str, dict[str, Any]] = {
        "federation": {"agents": 10, "rounds": 2, "per_round": 10},
        "algorithm": {"bits": 1, "rotation": False},
    }
    local = {"adversary": "local"}
    alone = fedspa.run(cpsgd(tmp_path / "alone", **sections, privacy={"trials": 60, **local})).summary
    summed = fedspa.run(
        cpsgd(
            tmp_path / "summed", **sections, privacy={"trials": 60, "adversary": "secure-aggregation"}, run=dict(shared)
        )
    ).summary
    assert summed["epsilon"] < alone["epsilon"] / 2
    assert summed["epsilon_total"] == alone["epsilon"]
    assert "against the server with all runs" in statement(summed)
    between = (summed["epsilon"] + alone["epsilon"]) / 2
    (tmp_path / "policy.toml").write_text(
        f'epsilon = {between}\ndelta = 1e-3\nneighbours = "replace-one"\nmin_noise_multiplier = 0.01\n'
        'max_local_steps = 1\nmax_rounds = 10\nmax_compression = 1.0\nclippings = ["coordinate"]\n'
    )
    quiet = {"trials": 10**6, "noise": "secure", **local}
    capped = {**shared, "policy": str(tmp_path / "policy.toml")}
    with pytest.raises(BudgetError):
        fedspa.run(cpsgd(tmp_path / "refused", **sections, privacy=dict(quiet), run=capped))
    later = fedspa.run(cpsgd(tmp_path / "later", **sections, privacy=dict(quiet), run=dict(shared))).summary
    assert later["private"]
    assert "THE NOISE OF 20 OF 40 PARTICIPATIONS WAS SEEDED" in statement(later)  # in the run before it
    assert later["epsilon_total"] >= alone["epsilon"]
