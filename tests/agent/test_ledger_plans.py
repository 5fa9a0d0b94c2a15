"""The first plan of an agent in its ledger: kept with the first entry, once, and guarded as the entries are."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from fedspa.agent.ledger.ledger import Ledger
from fedspa.agent.ledger.report import export, summary, verify
from fedspa.errors import BudgetError, LedgerError
from fedspa.mechanisms.gaussian.plan import GaussianEvent
from fedspa.privacy import accounting
from fedspa.privacy.budget import FirstPlan, PrivacyBudget

EVENT = GaussianEvent("poisson", 50, 500, 50, 8.2)
OTHER = GaussianEvent("poisson", 50, 500, 50, 12.0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


def test_what_is_announced_with_the_first_entry_is_kept_and_nothing_later(path: Path) -> None:
    with Ledger.open(path) as ledger:
        ledger.reserve_many({"a": EVENT, "b": OTHER}, "run", "0", announced=20)
        ledger.reserve_many({"a": OTHER, "b": OTHER, "c": EVENT}, "run", "1", announced=500)
        ledger.reserve("d", EVENT, "run", "0")
        ledger.reserve("d", EVENT, "run", "1", announced=7)  # it has released something by now, perhaps
    with Ledger.open(path, create=False) as ledger:
        plans = [ledger.first_plan(agent) for agent in ("a", "b", "c", "d", "nobody")]
    assert plans == [FirstPlan(EVENT, 20), FirstPlan(OTHER, 20), FirstPlan(EVENT, 500), None, None]
    assert [entry["announced"] for entry in export(path)["entries"]] == [20, 20, None, None, 500, None, None]
    assert verify(path) == []


@pytest.mark.parametrize("announced", [0, -1, 10**16])
def test_a_plan_has_a_plausible_number_of_participations(path: Path, announced: int) -> None:
    with Ledger.open(path) as ledger, pytest.raises(LedgerError, match="announced is"):
        ledger.reserve("a", EVENT, "run", "0", announced=announced)


def test_a_run_of_exactly_the_cap_takes_place_and_nothing_after_it(path: Path) -> None:
    cap = PrivacyBudget(accounting.epsilon({EVENT: 20}, 1e-3, neighbours="add-remove"), 1e-3, "add-remove")
    with Ledger.open(path) as ledger:
        ledger.require("a", EVENT, cap, participations=20)
        for message in range(20):
            ledger.require("a", EVENT, cap, participations=20 - message)
            ledger.reserve("a", EVENT, "run", str(message), cap=cap, announced=20)
        assert ledger.total("a", 1e-3, "add-remove") == (cap.epsilon, "pld (one plan)")
        with pytest.raises(BudgetError, match=r"ε = 0\.000 left"):
            ledger.reserve("a", EVENT, "run", "20", cap=cap, announced=21)
    told = summary(path, delta=1e-3, neighbours="add-remove", cap=cap).agents[0]
    assert (told.accountant, told.epsilon_left, told.participations_left) == ("pld (one plan)", 0.0, 0)


def test_a_server_that_changes_its_plan_within_the_run_leaves_the_plan(path: Path) -> None:
    """Other noise in the second round, even more of it; or more rounds than it said first."""
    cap = PrivacyBudget(accounting.epsilon({EVENT: 20}, 1e-3, neighbours="add-remove"), 1e-3, "add-remove")
    with Ledger.open(path) as ledger:
        for message in range(19):
            ledger.reserve("a", EVENT, "run", str(message), cap=cap, announced=20)
        with pytest.raises(BudgetError, match="rdp filter"):
            ledger.reserve("a", OTHER, "run", "19", cap=cap, announced=20)
        assert ledger.would_exceed("a", EVENT, cap, participations=2, announced=40)
        ledger.reserve("a", EVENT, "run", "19", cap=cap, announced=40)


@pytest.mark.parametrize("value", ["10000", "NULL", "'many'"])
def test_an_edited_plan_breaks_the_chain(path: Path, value: str) -> None:
    with Ledger.open(path) as ledger:
        ledger.reserve("a", EVENT, "run", "0", announced=2)
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute(f"UPDATE entry SET announced = {value}")
    connection.close()
    assert any("entry 1: its hash" in problem for problem in verify(path))
    if value == "'many'":
        with pytest.raises(LedgerError, match="damaged"), Ledger.open(path) as ledger:
            ledger.total("a", 1e-3, "add-remove")
