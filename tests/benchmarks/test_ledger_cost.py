"""The benchmark of the ledger runs, and adds up what the books cost of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

import ledger
from fedspa.agent.ledger.ledger import Ledger
from fedspa.runs.books import Books


def test_calls_are_timed(tmp_path: Path) -> None:
    result = ledger.measure(tmp_path, entries=50, repeats=3)
    assert all(value > 0 for value in result.values())


def test_share_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, names in ((Books, ("__init__", "settle")), (Ledger, ("reserve_many", "release_many"))):
        for name in names:
            monkeypatch.setattr(owner, name, getattr(owner, name))  # put back what `one_run` wraps
    run = ledger.one_run("quickstart", "data", 2)
    assert run["rounds"] == 2
    assert 0 < run["ledger_s"] < run["run_s"]
    assert run["share"] == pytest.approx(run["ledger_s"] / run["run_s"])
