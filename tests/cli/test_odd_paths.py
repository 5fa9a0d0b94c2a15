"""Paths and numbers that no sane user types, and disks that fail: one line and exit code 2, at once, and no bug."""

from __future__ import annotations

import os
import shutil
import sqlite3
import sys
import time
from pathlib import Path

import pytest
from small_runs import small

import fedspa
from fedspa.cli import main

# Every command that is given a folder or a file by name.
OF_A_PATH = [
    "new {}",
    "new {} --flower",
    "site new {}",
    "site new deep/{} --agent north",
    "server new {} --name localhost",
    "site check {}",
    "server run {}",
    "site pin {} {}",
    "site status {}",
    "server status {}",
    "run --out {}",
    "run --resume {}",
    "run {}",
    "tune --resume {}",
    "tune --set data.holdout=0.2 --epsilon 2 --out {}",
    "report {}",
    "watch {}",
    "export {} card.md",
    "export {} model.onnx",
    "ledger verify {}",
    "ledger show {}",
    "data check {} --schema {}",
]
MANY_DIGITS = "9" * 5000


def called(words: list[str], monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setattr(sys, "argv", ["fedspa", *words])
    with pytest.raises(SystemExit) as stop:
        main()
    return stop.value.code


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.mark.parametrize("words", OF_A_PATH)
def test_a_loop_of_links_is_a_path_that_cannot_be_used(
    words: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("loop").symlink_to("loop")
    Path("deep").symlink_to("deep")
    assert called(words.format("loop", "loop").split(), monkeypatch) in (1, 2)
    said = capsys.readouterr().err
    assert "bug" not in said
    assert len(said.splitlines()) <= 1
    assert sorted(path.name for path in folder.iterdir()) == ["deep", "loop"]


@pytest.mark.parametrize(
    "words",
    [
        f"suggest --agents 10 --records 100 --epsilon 1 --shape {MANY_DIGITS}",
        f"suggest --agents 10 --records 100 --epsilon 1 --shape 1,{MANY_DIGITS},28",
        "suggest --agents 10 --records 100 --epsilon 1 --shape 999999999,999999999,999999999",
        f"suggest --agents {MANY_DIGITS} --records 100 --epsilon 1 --shape 10",
        f"doctor --model logistic --shape {MANY_DIGITS}",
        f"run --set federation.agents={MANY_DIGITS}",
        f"privacy --batch {MANY_DIGITS} --records 9 --local-steps 1 --participations 1 --delta 1e-3 --noise 1",
    ],
    ids=lambda words: words[:60],
)
def test_a_number_of_any_length_is_bad_input(
    words: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert called(words.split(), monkeypatch) == 2
    said = capsys.readouterr().err
    assert "bug" not in said
    assert len(said.splitlines()) == 1


def test_tune_refuses_its_folders_before_any_work(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("file").write_text("mine")
    began = time.monotonic()
    words = ["tune", "--set", "data.holdout=0.2", "--epsilon", "2", "--out", "file"]
    assert called(words, monkeypatch) == 2
    assert "file: Not a directory; name a folder to write to" in capsys.readouterr().err
    assert [path.name for path in folder.iterdir()] == ["file"]
    assert time.monotonic() - began < 20  # and not after the proxy runs


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("finished") / "run"
    fedspa.run(small(path))
    return path


@pytest.mark.timeout(60)
@pytest.mark.parametrize("words", ["run --resume run", "report run", "watch run", "export run card.md"])
@pytest.mark.parametrize("replaced", ["summary.json", "metrics.jsonl", "ledger.sqlite", "ended.json", "checkpoint/x"])
def test_a_pipe_in_the_place_of_a_runs_file_is_not_waited_for(
    words: str,
    replaced: str,
    finished: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(finished, "run")
    Path("run", replaced).unlink(missing_ok=True)
    os.mkfifo(Path("run", replaced))
    assert called(words.split(), monkeypatch) == 2
    assert f"run/{replaced} is not a plain file" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["SQLITE_IOERR_SHMSIZE", "SQLITE_FULL", "SQLITE_CANTOPEN", "SQLITE_CORRUPT", ""])
@pytest.mark.parametrize("command", ["verify", "show"])
def test_no_message_of_a_ledger_command_asks_for_that_command(
    command: str, name: str, finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on a full disk, where SQLite cannot make the file that its readers share."""

    def fail(*_: object, **__: object) -> None:
        error = sqlite3.DatabaseError("disk I/O error")
        error.sqlite_errorname = name
        raise error

    monkeypatch.setattr(sqlite3, "connect", fail)
    assert called(["ledger", command, str(finished / "ledger.sqlite")], monkeypatch) == 2
    said = capsys.readouterr().err
    assert "disk I/O error" in said or "disk space" in said
    assert f"ledger {command}" not in said
