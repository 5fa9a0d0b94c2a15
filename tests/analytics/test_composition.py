"""Statistics, training and evaluation in one ledger: their total beside an independent composition by dp_accounting."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant
from dp_accounting.privacy_accountant import NeighboringRelation

import fedspa
from fedspa.agent.ledger.report import export

DELTA = 1e-5


def composed(entries: list[dict[str, Any]], agent: str) -> float:
    """ε of all that an agent released, from the ledger's lines alone: no accountant of ours is in this."""
    accountant = PLDAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE)
    for text, times in Counter(json.dumps(line["event"]) for line in entries if line["agent"] == agent).items():
        event = json.loads(text)
        assert event["sampling"] == "poisson"
        step = dp_event.GaussianDpEvent(event["noise_multiplier"])
        sampled = dp_event.PoissonSampledDpEvent(event["batch"] / event["records"], step)
        accountant.compose(sampled, times * event["steps"])
    return float(accountant.get_epsilon(DELTA))


def test_statistics_training_and_evaluation_add_up_as_dp_accounting_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    lines = ["site,age,weight,ill"]
    for row in range(900):
        age = rng.integers(20, 90)
        lines.append(f"{'abc'[row % 3]},{age},{rng.integers(40, 120)},{'yes' if rng.random() < age / 100 else 'no'}")
    Path("table.csv").write_text("\n".join(lines) + "\n")
    columns = {
        "age": {"kind": "number", "range": [0, 100]},
        "weight": {"kind": "number", "range": [30, 150]},
        "ill": {"kind": "flag", "target": True},
    }
    config: dict[str, Any] = {
        "federation": {"agents": 3, "rounds": 4},
        "data": {
            "name": "table.csv",
            "dir": ".",
            "holdout": 0.1,
            "agent_holdout": 0.3,
            "table": {"agent": "site", "columns": columns},
        },
        "algorithm": {"batch": 60},
        "privacy": {"epsilon": 2.0, "delta": DELTA},
        "run": {"out": "runs/trained"},
    }
    numbers = fedspa.statistics(config, epsilon=0.5, out="runs/numbers").summary
    trained = fedspa.run(config).summary
    scores = fedspa.evaluate("runs/trained", epsilon=0.7, out="runs/scores").summary
    entries = export(tmp_path / "runs" / "ledger.sqlite")["entries"]
    assert len(entries) == 3 * (1 + 4 + 1)
    by_run: dict[str, list[dict[str, Any]]] = {}
    for line in entries:
        by_run.setdefault(line["run"], []).append(line)
    for summary, one in zip((numbers, trained, scores), by_run.values()):
        assert summary["epsilon"] == pytest.approx(composed(one, one[0]["agent"]), rel=1e-3)
    for agent in "abc":
        exact = composed(entries, agent)
        # The ledger composes plans that were chosen after releases, by a filter: never less, and little more.
        assert exact <= scores["epsilon_total"] * (1 + 1e-4)
        assert scores["epsilon_total"] < 1.25 * exact
    sheet = (tmp_path / "runs/scores/report.html").read_text("utf-8")
    assert "with 2 other runs in the ledger" in sheet
