"""Paths and numbers that no sane user types, and disks that fail: one line and exit code 2, at once, and no bug."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fedspa.cli import main

# What a command leaves where it could not do its work: a line, an exit code, nothing in the way of the next try.

PRIVACY = "privacy --batch 9 --records 9 --local-steps 1 --participations 1 --delta 1e-3 --noise 1 --json"


MAKERS = ["new {}", "new {} --flower", "site new {}", "server new {} --name localhost"]


@pytest.mark.parametrize(("closed", "said"), [(">&-", False), ("2>&-", True), ("<&- >&- 2>&-", False)])
def test_a_closed_stream_is_no_error(closed: str, said: bool) -> None:
    """As cron jobs and daemons have them."""
    python = [sys.executable, "-m", "fedspa", *PRIVACY.split()]
    done = subprocess.run(["sh", "-c", f'exec "$@" {closed}', "sh", *python], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert ("rows" in done.stdout) is said


@pytest.mark.parametrize("words", MAKERS)
def test_a_folder_with_something_in_it_is_not_touched(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").write_text("kept")
    monkeypatch.setattr(sys, "argv", ["fedspa", *words.format(tmp_path).split()])
    with pytest.raises(SystemExit) as stop:
        main()
    assert (stop.value.code, "is not empty" in capsys.readouterr().err) == (2, True)
    assert [file.name for file in tmp_path.iterdir()] == ["mine"]
