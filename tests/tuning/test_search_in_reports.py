"""The report's section on the search for settings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_trials import CANDIDATES, searching

import fedspa
from fedspa.report.record import read
from fedspa.report.tables import chosen_config, search
from fedspa.runs.halving import Halving
from fedspa.runs.metrics import RoundMetrics
from fedspa.runs.trials import Trials

ROUND = RoundMetrics(
    round=0, accuracy=0.5, loss=1.0, agents=3, uplink_bytes=9, epsilon=1.0, private=False, clip_value=0.1
)

PROXY = {"score": 0.5, "settings": {}}
STUDY = {"about": {"data": "wards"}, "guarantee": "ε = 1"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fedspa.run(searching(tmp_path_factory.mktemp("search") / "run")).folder


def test_trials_spend_and_choice_are_shown(folder: Path) -> None:
    found = search(read(folder))
    assert found is not None
    assert [row[0] for row in found.trials].count("chosen") == 1
    assert sum(int(row[-1]) for row in found.trials) == 6 * 3
    assert "took 6 of 9 rounds" in found.spent
    assert "in the ledger before it ran" in found.spent


def test_seeded_trials_are_no_guarantee(folder: Path) -> None:
    found = search(read(folder))
    assert found is not None
    assert "(no guarantee: see the top)" in found.spent


@pytest.mark.parametrize(
    ("proxy", "wanted"),
    [
        ({"public": "digits", "found": [PROXY]}, "the records digits, which the user declared public"),
        ({"public": "holdout", "found": [PROXY]}, "held-out records, which belong to no agent"),
        ({"found": [], "study": STUDY}, "on wards were tried first. This run's ε does not include what that search"),
    ],
)
def test_where_settings_came_from_is_said(folder: Path, proxy: Any, wanted: str) -> None:
    """What cost nothing in this run may have cost something elsewhere."""
    record = read(folder)
    assert record.summary is not None
    summary = {**record.summary, "tuning": {**record.summary["tuning"], "proxy": proxy}}
    found = search(replace(record, summary=summary))
    assert found is not None
    assert wanted in found.free


def test_the_best_round_is_one_of_the_model_that_was_chosen(folder: Path) -> None:
    """What a dropped trial scored is no score of what the run hands over."""
    record = read(folder)
    assert record.summary is not None
    tuning = record.summary["tuning"]
    own = tuning["trials"][tuning["choice"]]["rounds"]
    lost = next(t for t in range(tuning["rounds"]) if t not in own)
    told = [
        replace(line, accuracy=value, scores={**line.scores, "accuracy": value})
        for line in record.metrics
        for value in [0.99 if line.round == lost else 0.5 if line.round == own[-1] else 0.3]
    ]
    assert replace(record, metrics=tuple(told)).best == own[-1]
    assert replace(record, metrics=tuple(told), summary=None).best == lost
    mine = [value for t, value in enumerate(record.scores) if t in own or t >= tuning["rounds"]]
    assert record.summary["accuracy_best"] == max(value for value in mine if value is not None)


def test_rounds_of_scores_and_of_dropped_trials_made_no_model() -> None:
    trials = object.__new__(Trials)
    trials.halving, trials._round = Halving(2, 2, scoring=1), 6
    lines = [replace(ROUND, round=t) for t in range(4)]
    trials.history = [*lines, replace(ROUND, round=4, trials={0: 0.1, 1: 0.9}), replace(ROUND, round=5)]
    assert [line.round for line in trials.own] == [2, 3, 5]


def test_the_plan_is_shown_with_the_chosen_settings(folder: Path) -> None:
    record = read(folder)
    settled = chosen_config(record.config, record.summary)
    assert record.summary is not None
    assert settled.tuning.candidates == CANDIDATES
    choice = CANDIDATES[record.summary["tuning"]["choice"]]
    assert settled.algorithm.compression == choice.get("algorithm.compression", 0.2)
