"""A project's folder is not taken for a run's, though both have a config.toml."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from small_runs import small

from fedspa.cli import main
from fedspa.running import run as simulate
from fedspa.runs.config import load, to_toml


@pytest.mark.parametrize("words", ["run --resume study", "report study", "export study card.md"])
def test_a_project_is_no_run(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was called killed after round 0, and resuming it trained among the project's files."""
    monkeypatch.chdir(tmp_path)
    for line, code in (("new study", 0), (words, 2)):
        monkeypatch.setattr(sys, "argv", ["fedspa", *line.split()])
        with pytest.raises(SystemExit) as stop:
            main()
        said = capsys.readouterr()
        assert int(stop.value.code or 0) == code, said.err
    wanted = "fedspa: study holds a config and no run yet; `fedspa run study/config.toml` starts one, under runs/\n"
    assert (said.out, said.err) == ("", wanted)
    there = {file.name for file in Path("study").iterdir()} - {"__pycache__"}  # of the code that the config names
    assert there == {"config.toml", "my_data.py", "my_model.py", "README.md"}


def test_a_run_that_was_killed_before_its_first_checkpoint_is_one(tmp_path: Path) -> None:
    config = load(small(tmp_path / "run"))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text(to_toml(config), "utf-8")
    (tmp_path / "run" / "ledger.sqlite-half").touch()  # whatever it left half made
    assert simulate(resume=tmp_path / "run").summary["rounds"] == config.federation.rounds
