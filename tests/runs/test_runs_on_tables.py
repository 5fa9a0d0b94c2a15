"""Tables in a run: named in a config, scored in their own units, with their agents and persons, refused in a line."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedspa
from fedspa.running import run as simulate
from fedspa.runs.config import load, to_toml
from fedspa.runs.setup import holdings_of, prepare, records_of

COLUMNS: dict[str, dict[str, Any]] = {
    "age": {"kind": "number", "range": [0, 100]},
    "smoker": {"kind": "flag", "missing": False},
    "score": {"kind": "number", "range": [100, 300], "target": True},
}
HEADER = "clinic,patient,age,smoker,score"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three clinics with 20 patients each, who came once to three times."""
    monkeypatch.chdir(tmp_path)
    rng, lines = np.random.default_rng(0), [HEADER]
    for patient in range(60):
        for visit in range(1 + patient % 3):
            age = int(rng.integers(20, 80)) + visit
            smoker = ("yes", "no", "")[int(rng.integers(3))]
            lines.append(f"{'nsw'[patient % 3]},{patient},{age},{smoker},{150 + age + rng.normal():.1f}")
    (tmp_path / "visits.csv").write_text("\n".join(lines) + "\n", "utf-8")
    return tmp_path


def config(changes: dict[str, Any] | None = None, **sections: dict[str, Any]) -> dict[str, Any]:
    """`changes` are those of [data] and [data.table]; what is None there is left out."""
    data = {"name": "visits.csv", "columns": COLUMNS, "agent": "clinic", "person": "patient", "holdout": 0.2}
    data |= changes or {}
    table = {key: data.pop(key) for key in ("columns", "agent", "split", "test") if key in data}
    data["table"] = {key: value for key, value in table.items() if value is not None} or None
    return {
        "federation": {"agents": 3, "rounds": 2, "per_round": 3, **sections.get("federation", {})},
        "data": {key: value for key, value in data.items() if value is not None},
        "algorithm": {"local_steps": 2, "batch": 5},
        "privacy": {"noise_multiplier": 2.0, "noise": "seeded"},
        "run": {"threads": 1, "out": "out", **sections.get("run", {})},
        **{name: section for name, section in sections.items() if name in ("task", "model")},
    }


def test_a_run_on_a_table_ends_in_its_own_units(folder: Path) -> None:
    result = fedspa.run(config())
    summary = result.summary
    assert (summary["task"], summary["score"], summary["unit"]) == ("regression", "rmse", "person")
    data = records_of(load(config()))
    own = data.test_y.numpy() * 100 + 200  # type: ignore[union-attr]
    assert summary["baseline"] == pytest.approx(own.std(), rel=1e-5)
    found = result.module(data.test_x).detach().numpy().reshape(-1) * 100 + 200
    assert summary["scores"]["rmse"] == pytest.approx(np.sqrt(np.square(found - own).mean()), rel=1e-5)
    assert summary["scores"]["mae"] == pytest.approx(np.abs(found - own).mean(), rel=1e-5)
    assert summary["scores"]["r2"] == pytest.approx(1 - np.square(found - own).sum() / own.var() / len(own), rel=1e-4)
    assert (folder / "out" / "report.html").is_file()


def test_the_runs_own_config_names_the_task_and_loads_again(folder: Path) -> None:
    fedspa.run(config())
    written = load(folder / "out" / "config.toml")
    assert written.task.name == "regression"
    assert written == prepare(load(config())).config
    assert load(tomllib.loads(to_toml(written))) == written
    assert fedspa.Config.model_validate_json(written.model_dump_json()) == written
    again = simulate(folder / "out" / "config.toml", resume=folder / "out")
    assert again.summary == json.loads((folder / "out" / "summary.json").read_text("utf-8"))


FLAG, WARD = {"kind": "flag", "target": True}, {"kind": "category", "categories": ["a", "b"], "target": True}


@pytest.mark.parametrize(
    ("columns", "task", "name"),
    [
        ({"score": {"kind": "ignore"}, "smoker": FLAG}, {}, "classification"),
        ({"score": {"kind": "ignore"}, "ward": WARD}, {}, "classification"),
        ({"score": FLAG, "smoker": FLAG}, {}, "multi-label"),
        ({}, {}, "regression"),
        ({}, {"options": {"loss": "mae"}}, "regression"),
        ({"score": {"kind": "ignore"}, "smoker": FLAG}, {"name": "binary"}, "binary"),
    ],
)
def test_the_targets_say_what_the_task_is(columns: dict[str, Any], task: dict[str, Any], name: str) -> None:
    made = load(config({"columns": COLUMNS | columns}, task=task))
    assert made.task.name == name
    assert fedspa.Config(**config({"columns": COLUMNS | columns}, task=task)).task.name == name


def test_agents_are_those_of_the_table_and_persons_are_held_out_whole() -> None:
    made = load(config())
    data = records_of(made)
    assert len(holdings_of(made, data)) == 3
    assert data.persons is not None
    assert len(data.train_y) + len(data.test_y) == 120
    table = fedspa.from_table("visits.csv", {"columns": COLUMNS, "agent": "clinic", "person": "patient"})
    visits = np.bincount(table.persons)  # type: ignore[arg-type]
    kept = np.unique(data.persons)
    assert visits[kept].sum() == len(data.train_y)  # all of a person's visits, or none
    assert visits[np.setdiff1d(np.arange(60), kept)].sum() == len(data.test_y)


def refused(error: Exception, words: list[str], folder: Path) -> None:
    assert "\n" not in str(error)
    for word in words:
        assert word in str(error)
    assert not (folder / "out").exists()
