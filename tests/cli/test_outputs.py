"""`--out FILE` writes that file, whole or not at all, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import fedspa
from fedspa.cli import app
from fedspa.errors import ConfigError, FedspaError

SMALL: dict[str, dict[str, Any]] = {
    "federation": {"agents": 4, "rounds": 2, "per_round": 2},
    "algorithm": {"local_steps": 1},
    "privacy": {"noise_multiplier": 2.0, "noise": "seeded"},
    "run": {"engine": "generic", "threads": 1},
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    fedspa.run(SMALL | {"run": SMALL["run"] | {"out": str(tmp_path / "run")}})
    return tmp_path / "run"


@pytest.mark.parametrize("command", [["report"], ["model", "card"]])
def test_a_folder_is_not_replaced(run: Path, command: list[str]) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    ended = CliRunner().invoke(app, [*command, str(run), "--out", str(run / "checkpoint")])
    assert isinstance(ended.exception, FedspaError)
    assert "checkpoint cannot be written: it is not a plain file; name another file" in str(ended.exception)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_a_report_is_written_again(run: Path, tmp_path: Path) -> None:
    for out in (run / "report.html", tmp_path / "new.html", tmp_path / "new.html"):
        assert CliRunner().invoke(app, ["report", str(run), "--out", str(out)]).exit_code == 0
    beside = tmp_path / "new.html.new"  # the name of a draft once
    beside.write_text("mine")
    assert CliRunner().invoke(app, ["report", str(run), "--out", str(tmp_path / "new.html")]).exit_code == 0
    assert beside.read_text() == "mine"


def test_a_run_and_a_project_want_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    for command in (["run", "--out", str(tmp_path)], ["new", str(tmp_path)]):
        ended = CliRunner().invoke(app, command)
        assert isinstance(ended.exception, ConfigError)
        assert "not empty" in str(ended.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
