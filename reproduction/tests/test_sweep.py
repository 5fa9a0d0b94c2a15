"""Sweeps keep what ended, go on with what did not, and refuse to mix settings; killed at any instant, too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedspa.errors import ConfigError
from fedspa.runs.config import load
from reproduction import sweep as sweeps
from reproduction.sweep import Interrupted, Planned, sweep

SMALL: dict[str, dict[str, Any]] = {
    "federation": {"agents": 6, "rounds": 3, "per_round": 3},
    "algorithm": {"compression": 0.2, "local_steps": 2, "batch": 10, "local_lr": 0.5},
    "privacy": {"noise_multiplier": 2.0, "clip_value": 0.3, "noise": "seeded"},
    "run": {"engine": "generic", "threads": 1},
}


def planned(folder: Path, name: str = "a", *overrides: str) -> Planned:
    return Planned(name, load(SMALL, [f"run.out={json.dumps(str(folder / name))}", *overrides]))


def never() -> bool:
    return False


def test_runs_that_ended_are_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [planned(tmp_path, "a"), planned(tmp_path, "b", "run.seed=1")]
    first = {run.name: outcome for run, outcome in sweep(runs, 1, never)}
    assert [outcome.status for outcome in first.values()] == ["done", "done"]
    monkeypatch.setattr(sweeps, "simulate", None)
    assert {run.name: outcome for run, outcome in sweep(runs, 1, never)} == first


def test_a_stopped_run_goes_on(tmp_path: Path) -> None:
    (untouched,) = sweep([planned(tmp_path / "whole")], 1, never)
    run = planned(tmp_path)
    with pytest.raises(Interrupted):
        list(sweep([run], 1, iter([False, True]).__next__))  # asked before the run, and after its first round
    assert sweeps.ended(run.folder) is None
    ((_, outcome),) = sweep([run], 1, never)
    assert outcome.summary is not None
    assert untouched[1].summary is not None
    assert {**outcome.summary, "seconds": 0} == {**untouched[1].summary, "seconds": 0}
    assert len((run.folder / "attempts.jsonl").read_text().splitlines()) == 2


def test_other_settings_in_the_same_folder_are_refused(tmp_path: Path) -> None:
    list(sweep([planned(tmp_path)], 1, never))
    with pytest.raises(ConfigError, match=r"other settings \(algorithm.local_lr\); name another --out"):
        list(sweep([planned(tmp_path, "a", "algorithm.local_lr=0.25")], 1, never))
    with pytest.raises(ConfigError, match=r"run.seed"):
        list(sweep([planned(tmp_path, "a", "run.seed=3")], 1, never))
    list(sweep([planned(tmp_path, "a", "run.threads=2", "data.dir=elsewhere")], 1, never))


def test_a_task_without_accuracy_is_refused_before_anything_trains(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"task.name is 'regression'; a sweep compares accuracies"):
        list(sweep([planned(tmp_path), planned(tmp_path, "b", "task.name=regression")], 1, never))
    assert not any(tmp_path.iterdir())


def test_a_run_that_diverges_is_an_outcome_and_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    huge = ["algorithm.local_lr=1e10", "algorithm.server_lr=1e10", "privacy.clip_value=1e10"]
    wild = planned(tmp_path, "wild", *huge, "privacy.noise_multiplier=1e8", "algorithm.server=average")
    ((_, first),) = sweep([wild], 1, never)
    assert first.status == "diverged"
    assert "round 1" in first.reason
    monkeypatch.setattr(sweeps, "simulate", None)
    ((_, second),) = sweep([wild], 1, never)
    assert second == first


def test_a_setting_without_a_guarantee_is_an_outcome(tmp_path: Path) -> None:
    """It takes more noise than the calibration goes up to."""
    run = planned(tmp_path, "a", "privacy.noise_multiplier=none", "privacy.epsilon=1e-6", "privacy.delta=1e-30")
    ((_, outcome),) = sweep([run], 1, never)
    assert outcome.status == "refused"
    assert outcome.reason


@pytest.mark.slow
def test_two_processes_do_what_one_does(tmp_path: Path) -> None:
    names = ["a", "b"]
    runs = {jobs: [planned(tmp_path / str(jobs), n, f"run.seed={i}") for i, n in enumerate(names)] for jobs in (1, 2)}
    found = {jobs: {run.name: outcome for run, outcome in sweep(runs[jobs], jobs, never)} for jobs in (1, 2)}
    for name in names:
        one, two = found[1][name].summary, found[2][name].summary
        assert one is not None
        assert two is not None
        assert {**one, "seconds": 0} == {**two, "seconds": 0}
