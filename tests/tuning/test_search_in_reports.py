"""The report's section on the search for settings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from test_trials import searching

import fedspa
from fedspa.report.record import read


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fedspa.run(searching(tmp_path_factory.mktemp("search") / "run")).folder


def test_the_best_round_is_one_of_the_model_that_was_chosen(folder: Path) -> None:
    """What a dropped trial scored is no score of what the run hands over."""
    record = read(folder)
    tuning = record.summary["tuning"]
    own = tuning["trials"][tuning["choice"]]["rounds"]
    lost = next(t for t in range(tuning["rounds"]) if t not in own)
    stated = [
        replace(line, accuracy=value, scores={**line.scores, "accuracy": value})
        for line in record.metrics
        for value in [0.99 if line.round == lost else 0.5 if line.round == own[-1] else 0.3]
    ]
    assert replace(record, metrics=tuple(stated)).best == own[-1]
    assert replace(record, metrics=tuple(stated), summary=None).best == lost
    mine = [value for t, value in enumerate(record.scores) if t in own or t >= tuning["rounds"]]
    assert record.summary["accuracy_best"] == max(value for value in mine if value is not None)
