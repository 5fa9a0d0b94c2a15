"""Sweeps keep what ended, go on with what did not, and refuse to mix settings; killed at any instant, too."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import small_table
from tiny_files import mnist
from typer.testing import CliRunner

from fedspa.errors import ConfigError, DataError, FedspaError
from fedspa.runs.config import load
from reproduction import sweep as sweeps
from reproduction.__main__ import app
from reproduction.sweep import Interrupted, Outcome, Planned, sweep

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


def test_a_stopped_run_goes_on_where_the_files_lie_now(tmp_path: Path) -> None:
    mnist(tmp_path / "here", records=(120, 20))
    where = ["data.name=mnist", "model.name=logistic", f"data.dir={json.dumps(str(tmp_path / 'here'))}"]
    with pytest.raises(Interrupted):
        list(sweep([planned(tmp_path, "a", *where)], 1, iter([False, True]).__next__))
    (tmp_path / "here").rename(tmp_path / "there")
    where[-1] = f"data.dir={json.dumps(str(tmp_path / 'there'))}"
    ((_, outcome),) = sweep([planned(tmp_path, "a", *where)], 1, never)
    assert outcome.status == "done"


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
    names = ["a", "b", "c"]
    runs = {jobs: [planned(tmp_path / str(jobs), n, f"run.seed={i}") for i, n in enumerate(names)] for jobs in (1, 2)}
    found = {jobs: {run.name: outcome for run, outcome in sweep(runs[jobs], jobs, never)} for jobs in (1, 2)}
    for name in names:
        one, two = found[1][name].summary, found[2][name].summary
        assert one is not None
        assert two is not None
        assert {**one, "seconds": 0} == {**two, "seconds": 0}


def test_an_error_in_a_process_comes_back_in_words(tmp_path: Path) -> None:
    """Errors with arguments of their own do not survive pickling, and would hang the pool."""
    told = sweeps._work(planned(tmp_path, "a", "data.name=none.npz"))
    assert isinstance(told, sweeps.Failure)
    assert "none.npz" in (told.sentence or "")


SUMMARY = {
    **dict.fromkeys(("accuracy_best", "accuracy_last", "payload_bytes", "uplink_bytes", "seconds"), 0.5),
    **dict.fromkeys(("epsilon", "epsilon_replace_one")),
    "private": False,
}


@pytest.mark.parametrize(
    ("lines", "commits", "hardware"),
    [
        ('{"commit": "a", "hardware": "x"}\n{"commit": nu', ("a",), ("x",)),
        ('{"commit": "a", "hardware": "x"}\n{"comm{"commit": "b", "hardware": "x"}\n', ("a", None), ("x", "unknown")),
        ('[]\n{}\n{"commit": 3, "hardware": "x"}\n\xff', (None,), ("unknown",)),
    ],
    ids=["torn", "gone on after a tear", "damaged"],
)
def test_outcomes_of_damaged_attempts(
    tmp_path: Path, lines: str, commits: tuple[str | None, ...], hardware: tuple[str, ...]
) -> None:
    (tmp_path / "summary.json").write_text(json.dumps(SUMMARY))
    (tmp_path / "attempts.jsonl").write_text(lines)
    assert sweeps.ended(tmp_path) == Outcome("done", "", SUMMARY, commits, hardware)


@pytest.mark.parametrize("file", ["summary.json", "diverged.json"])
def test_a_damaged_result_is_one_line_that_names_the_file(tmp_path: Path, file: str) -> None:
    whole = json.dumps(SUMMARY | {"reason": "loss"})
    damaged = [whole[:length] for length in range(0, len(whole), 7)]
    damaged += ["[]", "3", "null", "[" * 5000, whole.replace("0.5", '"x"').replace('"loss"', "3"), "\xff", "{}"]
    for text in damaged:
        (tmp_path / file).write_text(text)
        with pytest.raises(FedspaError) as caught:
            sweeps.ended(tmp_path)
        assert file in str(caught.value)
        assert "\n" not in str(caught.value)


def _processes_of(session: int) -> list[int]:
    """Living processes of a session, zombies not counted."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def _words(table: Path, out: Path, jobs: int) -> list[str]:
    return [
        "table",
        str(table),
        "--rows",
        "fedspa",
        "--jobs",
        str(jobs),
        "--device",
        "cpu",
        "--out",
        str(out),
        "--json",
    ]


def _made(table: Path, out: Path) -> dict[str, Any]:
    """The table as this process makes it, its times left out."""
    made: dict[str, Any] = json.loads(CliRunner().invoke(app, _words(table, out, 1), catch_exceptions=False).stdout)
    for setting in ("published", "verified"):
        del made["rows"][0][setting]["seconds"]
    return made


def _begin_and_end(table: Path, out: Path, sign: signal.Signals) -> tuple[int, str]:
    """Start the table with two processes, send `sign` once both train, and wait until all processes are gone."""
    command = [sys.executable, "-m", "reproduction", *_words(table, out, 2)]
    child = subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    saved = len(_rounds(out))
    until = time.monotonic() + 120
    while len(_rounds(out)) < saved + 4 and child.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
    os.kill(child.pid, sign)
    _, told = child.communicate(timeout=60)
    until = time.monotonic() + 30
    while _processes_of(child.pid) and time.monotonic() < until:
        time.sleep(0.1)
    assert _processes_of(child.pid) == []
    return child.returncode, told


def _rounds(out: Path) -> list[str]:
    return [line for file in out.glob("runs/*/metrics.jsonl") for line in file.read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
def test_interrupted_then_killed_and_called_again_the_table_is_the_same(tmp_path: Path) -> None:
    table, out = small_table.write(tmp_path, rounds=40), tmp_path / "out"
    code, told = _begin_and_end(table, out, signal.SIGINT)
    assert code == 130
    assert "to resume: python -m reproduction table" in told
    code, _ = _begin_and_end(table, out, signal.SIGKILL)
    assert code == -signal.SIGKILL
    assert 8 <= len(_rounds(out)) < 80  # both times some rounds were done, and neither time all
    assert _made(table, out) == _made(table, tmp_path / "whole")


@pytest.mark.parametrize(
    "words", [["table", "mnist", "--rows", "fedspa"], ["tradeoff", "mnist-best", "--epsilon", "1"]]
)
def test_what_is_told_after_a_stop_plans_the_same_runs(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[list[Planned], int]] = []

    def files(name: str, folder: Path) -> None:
        if folder != tmp_path / "the data":
            raise DataError("there is none")

    def stopped(planned: list[Planned], jobs: int, stop: Any) -> Any:
        asked.append((planned, jobs))
        raise Interrupted("stopped")

    monkeypatch.setattr("fedspa.data.datasets.files", files)
    monkeypatch.setattr(sweeps, "sweep", stopped)
    given = ["--data", str(tmp_path / "the data"), "--jobs", "2", "--out", str(tmp_path / "the runs")]
    told = CliRunner().invoke(app, [*words, "--set", "run.engine=generic", *given])
    assert told.exit_code == 130
    again = shlex.split(told.stderr.strip().partition("to resume: python -m reproduction ")[2])
    assert CliRunner().invoke(app, again).exit_code == 130
    assert asked[0] == asked[1]


def test_workers_are_born_deaf_to_ctrl_c() -> None:
    """One during their imports, before they could ignore it, ended in a traceback of each."""
    program = "import signal; print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    with sweeps._signals_held():
        born = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert born.stdout == "True\n"
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
