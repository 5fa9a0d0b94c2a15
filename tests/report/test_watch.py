"""A run seen from outside: running, finished, stopped, failed, killed, and not a run at all."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path

import pytest
from small_runs import small
from typer.testing import CliRunner

from fedspa.cli import app
from fedspa.cli.watch import snapshot
from fedspa.errors import ConfigError
from fedspa.running import run as simulate
from fedspa.runs.rundir import RoundMetrics, Stopped


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("watched") / "run"
    simulate(small(path))
    return path


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("watched") / "stopped"
    asked = iter([False, True])
    with pytest.raises(Stopped):
        simulate(small(path), stop=lambda: next(asked))
    return path


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def hook(metrics: RoundMetrics) -> None:
        raise ZeroDivisionError("of my own")

    path = tmp_path_factory.mktemp("watched") / "failed"
    with pytest.raises(ZeroDivisionError):
        simulate(small(path), on_round=hook)
    return path


@pytest.fixture
def killed(stopped: Path, tmp_path: Path) -> Path:
    """It has no time to leave word."""
    path = shutil.copytree(stopped, tmp_path / "killed")
    (path / "ended.json").unlink()
    return path


def test_every_state(folder: Path, stopped: Path, failed: Path, killed: Path) -> None:
    assert snapshot(folder).state == "finished"
    assert snapshot(failed).state == "failed"
    assert snapshot(killed).state == "killed"
    assert snapshot(stopped).state == "stopped"
    lock = os.open(stopped, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert snapshot(stopped).state == "running"
    finally:
        os.close(lock)


def test_looking_never_takes_the_lock(stopped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda *arguments: pytest.fail("a look must not lock"))
    snapshot(stopped)


def watched(folder: Path) -> tuple[int, list[str]]:
    found = CliRunner().invoke(app, ["watch", str(folder)])
    return found.exit_code, found.stdout.splitlines()


def test_not_in_a_terminal_it_prints_a_line_a_round_and_how_it_ended(folder: Path) -> None:
    code, (note, *lines) = watched(folder)
    assert code == 0
    assert note.startswith("Note: seeded noise, not private")
    assert "(NOT PRIVATE: SEEDED NOISE, for each record, δ = 0.001, add-remove, poisson sampling, pld)" in lines[0]
    assert [line.split(":")[0] for line in lines[:4]] == [f"round {t} of 4" for t in (1, 2, 3, 4)]
    assert lines[4:] == ["The run is over: finished, all 4 rounds.", f"report: {folder / 'report.html'}"]


def test_one_that_did_not_finish_says_how_it_ended_and_how_to_go_on(stopped: Path, failed: Path, killed: Path) -> None:
    for folder, words in (
        (stopped, "it was stopped after round 2 of 4."),
        (failed, "it failed after round 1 of 4: ZeroDivisionError at "),
        (killed, "it was killed after round 2 of 4: the process is gone and wrote no exit status."),
    ):
        code, lines = watched(folder)
        assert code == 1
        assert f"The run is over: {words}" in " ".join(" ".join(lines).split())
        assert (f"{Path(__file__).name}:" in "".join(lines)) is (folder == failed)
        assert lines[-1] == f"to resume: fedspa run --resume {folder}"


def test_what_foreign_code_says_stays_out_of_the_folder(failed: Path) -> None:
    """It may quote a record."""
    assert "ZeroDivisionError" in (failed / "ended.json").read_text()
    assert not any(b"of my own" in file.read_bytes() for file in failed.rglob("*") if file.is_file())


def test_a_run_that_goes_on_forgets_how_it_ended(stopped: Path, tmp_path: Path) -> None:
    path = shutil.copytree(stopped, tmp_path / "run")
    seen = []
    simulate(resume=path, on_round=lambda _: seen.append(snapshot(path).state))
    assert seen == ["running", "running"]
    assert not (path / "ended.json").exists()


def test_no_run_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run"):
        snapshot(tmp_path)
