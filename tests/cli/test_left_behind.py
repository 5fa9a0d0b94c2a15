"""What a command leaves where it could not do its work: a line, an exit code, nothing in the way of the next try."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedspa.agent.ledger.ledger import Ledger
from fedspa.cli import deployment, main, new

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
@pytest.mark.parametrize("there", [True, False])
def test_a_folder_is_made_whole_or_not_at_all(
    words: str, there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a disk that is full after the first file."""
    folder = tmp_path / "parent" / "made"
    if there:
        folder.mkdir(parents=True)

    def half(target: Path, *_: object) -> None:
        (target / "first").write_text("half")
        (target / "inner").mkdir()
        (target / "inner" / "second").touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for module in (new, deployment):
        monkeypatch.setattr(module, "fill", half)
    monkeypatch.setattr(sys, "argv", ["fedspa", *words.format(folder).split()])
    with pytest.raises(SystemExit) as stop:
        main()
    assert (stop.value.code, capsys.readouterr().err) == (
        2,
        f"fedspa: {folder}: No space left on device; name a folder that can be written\n",
    )
    assert list(tmp_path.rglob("*")) == ([folder.parent, folder] if there else [])


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


def test_a_runs_folder_in_place_of_its_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Ledger.open(tmp_path / "ledger.sqlite").close()
    for command in ("show", "verify"):
        monkeypatch.setattr(sys, "argv", ["fedspa", "ledger", command, str(tmp_path)])
        with pytest.raises(SystemExit) as stop:
            main()
        assert stop.value.code == 2
        assert capsys.readouterr().err.endswith(f"give the path of a ledger, as {tmp_path / 'ledger.sqlite'}\n")
