"""The page on data does what it says: its table is checked by its schema, and its code runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedspa.cli import app
from fedspa.data.columns import load_schema
from fedspa.runs.config import load

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text("utf-8")
BLOCKS = re.findall(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", PAGE, flags=re.M | re.S)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the files of the page lie."""
    for language, title, text in BLOCKS:
        if language in ("csv", "toml"):
            (tmp_path / title).write_text(text, "utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_check_prints_what_the_page_shows(folder: Path) -> None:
    (shown,) = [text for _, title, text in BLOCKS if title == "printed"]
    (command,) = [text for language, _, text in BLOCKS if language == "sh"]
    ended = CliRunner().invoke(app, command.split()[1:])
    assert ended.exit_code == 0
    assert ended.output == shown


def test_its_code_runs(folder: Path) -> None:
    code = "\n".join(text for language, _, text in BLOCKS if language == "python")
    ended = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == [
        "torch.Size([6, 6]) [0 0 0 1 1 2] [0 0 1 2 3 4]",
        "(200.0,) (200.0,)",
        "torch.Size([50, 8]) 20 labels",
        "torch.float32",
    ]


def test_its_config_says_what_its_schema_does(folder: Path) -> None:
    config = load(folder / "run.toml")
    assert config.task.name == "regression"
    assert config.data.schema_of_table == load_schema(folder / "schema.toml")
