"""Trackers: what they log is the metrics' own, and none of them can cost a run."""

from __future__ import annotations

import json
import logging
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from small_runs import small

from fedspa import track
from fedspa.errors import ConfigError
from fedspa.running import run as simulate
from fedspa.runs.rundir import Stopped
from fedspa.track import figures

needs_tensorboard = pytest.mark.skipif(find_spec("tensorboard") is None, reason="the extra tensorboard is missing")
needs_mlflow = pytest.mark.skipif(find_spec("mlflow") is None, reason="the extra mlflow is missing")


def tracked(out: Path, name: str, rounds: int = 4) -> dict[str, Any]:
    return small(
        out,
        federation={"agents": 6, "rounds": rounds, "per_round": 3},
        run={"engine": "generic", "threads": 1, "track": name},
    )


def written(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]


def stop_and_resume(folder: Path, name: str) -> None:
    asked = iter([False, True])
    with pytest.raises(Stopped):
        simulate(tracked(folder, name), stop=lambda: next(asked))
    simulate(resume=folder)


def test_numbers_are_drawn_and_nothing_else() -> None:
    line = {"round": 3, "accuracy": 0.5, "agents": 2, "epsilon": None, "private": True, "clip_value": 0.1}
    assert figures(line) == {"accuracy": 0.5, "agents": 2.0, "clip_value": 0.1}


def test_an_epsilon_that_is_no_guarantee_is_not_drawn_as_one() -> None:
    line = {"round": 3, "epsilon": 0.7}
    assert figures({**line, "private": True}) == {"epsilon": 0.7}
    assert figures({**line, "private": False}) == {"epsilon_not_private": 0.7}


def test_a_tracker_that_is_missing_stops_the_run_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(track, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'fedspa\[tensorboard\]'"):
        simulate(tracked(tmp_path / "run", "tensorboard"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("at", ["open_tracker", "add_round", "finish", "close"])
def test_a_tracker_that_fails_does_not_cost_the_run(
    at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing:
        def __init__(self, *arguments: object) -> None:
            self.fail_in("open_tracker")

        def fail_in(self, place: str) -> None:
            if place == at:
                raise RuntimeError("the server is gone\nand more")

        def add_round(self, metrics: object) -> None:
            self.fail_in("add_round")

        def finish(self, summary: object) -> None:
            self.fail_in("finish")

        def close(self) -> None:
            self.fail_in("close")

    module = type("module", (), {"open_tracker": Failing})
    monkeypatch.setattr(track, "find_spec", lambda name: module)
    monkeypatch.setattr(track, "import_module", lambda name: module)
    with caplog.at_level(logging.WARNING):
        result = simulate(tracked(tmp_path / "run", "mlflow"))
    assert result.summary["rounds"] == 4
    warnings = [record.getMessage() for record in caplog.records if "no longer logged" in record.getMessage()]
    assert warnings == ["mlflow failed and is no longer logged to: the server is gone"]


@needs_tensorboard
@pytest.mark.slow
def test_tensorboard_has_every_round_once_after_a_resume(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    stop_and_resume(tmp_path / "run", "tensorboard")
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    for key in ("accuracy", "loss", "epsilon", "uplink_bytes"):
        drawn = "epsilon_not_private" if key == "epsilon" else key  # the run is a seeded simulation
        found = [(event.step, event.value) for event in events.Scalars(drawn)]
        wanted = [(line["round"] + 1, pytest.approx(line[key], rel=1e-6)) for line in written(tmp_path / "run")]
        assert found == wanted
    assert "guarantee/text_summary" in events.Tags()["tensors"]


@needs_mlflow
@pytest.mark.slow
def test_mlflow_has_one_run_with_every_round_after_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    folder = tmp_path / "run"
    stop_and_resume(folder, "mlflow")
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    experiment = client.get_experiment_by_name("fedspa")
    (run,) = client.search_runs([experiment.experiment_id])
    for key in ("accuracy", "epsilon"):
        drawn = "epsilon_not_private" if key == "epsilon" else key
        found = [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, drawn)]
        assert sorted(found) == [(line["round"] + 1, line[key]) for line in written(folder)]
    assert run.data.params["algorithm.compression"] == "0.2"
    assert run.info.status == "FINISHED"
    assert run.data.tags["fedspa.guarantee"].startswith("NOT PRIVATE: THE NOISE WAS SEEDED")
