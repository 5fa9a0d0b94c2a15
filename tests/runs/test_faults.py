"""Faults tried on whole runs: each ends in one clear line, loses nothing, and the run goes on once it is mended."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_runs import ended, outcome, small, start

import fedspa
from fedspa.agent.ledger import ledger as ledger_module
from fedspa.agent.ledger.report import verify
from fedspa.algorithms.base import finite
from fedspa.cli import main
from fedspa.errors import ConfigError, FedspaError, PayloadError
from fedspa.running import run as simulate
from fedspa.runs import loop
from fedspa.runs.checkpoint import load_latest
from fedspa.runs.config import load, to_toml
from fedspa.runs.rundir import Stopped
from fedspa.server.coordinator import Diverged
from fedspa.wire.payload import Update


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the run of `small` gives when nothing happens to it."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    fedspa.run(small(folder))
    return outcome(folder)


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    """The folder of a run that was stopped after two of its four rounds."""
    seen: list[object] = []
    with pytest.raises(Stopped):
        simulate(small(tmp_path / "run"), on_round=seen.append, stop=lambda: len(seen) == 1)
    return tmp_path / "run"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 256 kB that is its own file system."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(path)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a small disk needs root")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def one_line(error: BaseException) -> str:
    assert "\n" not in str(error)
    return str(error)


class TestDiskFull:
    def test_a_disk_that_fills_up_while_running(self, disk: Path, whole: dict[str, Any]) -> None:
        """Filled by others after the first round; once there is room, the run goes on."""
        ballast = disk / "ballast"

        def fill(metrics: object) -> None:
            with suppress(OSError), ballast.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(512))

        with pytest.raises(FedspaError, match=r"No space left|no disk space") as caught:
            simulate(small(disk / "run"), on_round=fill)
        one_line(caught.value)
        ballast.unlink()
        simulate(resume=disk / "run")
        assert outcome(disk / "run") == whole

    @pytest.mark.parametrize("limit", [4_500, 60_000])
    def test_a_quota_on_the_size_of_a_file(self, tmp_path: Path, limit: int, whole: dict[str, Any]) -> None:
        """No root needed: the kernel refuses what would grow beyond the limit (config, checkpoint, ledger, …)."""

        def limited() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            try:
                simulate(small(tmp_path / "run"))
            except FedspaError as error:
                one_line(error)
                sys.exit(2)

        assert ended(start(limited)) == 2
        simulate(resume=tmp_path / "run")
        assert outcome(tmp_path / "run") == whole


class TestReadOnlyFolder:
    def test_at_the_start(self, disk: Path) -> None:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with pytest.raises(ConfigError, match=r"run\.out.*Read-only") as caught:
            simulate(small(disk / "run"))
        one_line(caught.value)


class TestTwoRunsInOneFolder:
    def test_the_second_is_refused_and_a_killed_first_leaves_no_lock(
        self, tmp_path: Path, whole: dict[str, Any]
    ) -> None:
        config = load(small(tmp_path / "run"))
        child = start(lambda: simulate(config, on_round=lambda metrics: time.sleep(60)))
        try:
            wait_for(lambda: (tmp_path / "run" / "metrics.jsonl").exists())
            with pytest.raises(ConfigError, match="in use by another run"):
                simulate(resume=tmp_path / "run")
            with pytest.raises(ConfigError, match="in use by another run"):
                simulate(config)
        finally:
            os.kill(child, signal.SIGKILL)
        assert ended(child) == -signal.SIGKILL
        simulate(resume=tmp_path / "run")
        assert outcome(tmp_path / "run") == whole


def test_a_clock_that_jumps_back(tmp_path: Path, whole: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock finds it a day earlier; after the resume it says 1990."""
    now = datetime(2030, 1, 1, tzinfo=UTC)

    def earlier() -> str:
        nonlocal now
        now -= timedelta(days=1)
        return now.isoformat(timespec="milliseconds")

    monkeypatch.setattr(ledger_module, "now", earlier)
    with pytest.raises(Stopped):
        simulate(small(tmp_path / "run"), stop=lambda: True)
    now = datetime(1990, 1, 1, tzinfo=UTC)
    for path in (tmp_path / "run").rglob("*"):
        os.utime(path, (2e9, 2e9))
    simulate(resume=tmp_path / "run")
    assert outcome(tmp_path / "run") == whole
    assert verify(tmp_path / "run" / "ledger.sqlite") == []


class TestDamagedFiles:
    def test_the_newest_checkpoint(
        self, stopped: Path, whole: dict[str, Any], caplog: pytest.LogCaptureFixture
    ) -> None:
        newest = stopped / "checkpoint" / "round-000002.safetensors"
        flipped = bytearray(newest.read_bytes())
        flipped[-1] ^= 1
        newest.write_bytes(flipped)
        simulate(resume=stopped)
        assert "round-000002" in caplog.text
        assert "resuming from the checkpoint before it" in caplog.text
        assert outcome(stopped) == whole


LOUD = {"noise_multiplier": 1e8, "clip_value": 1e10, "epsilon": None}


class TestDivergence:
    @pytest.mark.parametrize(
        ("sections", "sign"),
        [
            ({"algorithm": {"name": "fedavg", "compression": 1.0, "local_lr": 1e4}}, "update would be refused"),
            ({"algorithm": {"server": "adam", "local_lr": 1e10}, "privacy": LOUD}, "parameters are no longer finite"),
            (
                {"algorithm": {"server": "average", "server_lr": 1e10, "local_lr": 1e10}, "privacy": LOUD},
                "loss is no longer finite",
            ),
        ],
        ids=["far", "moments", "loss"],
    )
    def test_stops_with_advice_and_the_last_good_checkpoint(
        self, tmp_path: Path, sections: dict[str, Any], sign: str
    ) -> None:
        with pytest.raises(Diverged, match=sign) as caught:
            simulate(small(tmp_path / "run", **sections))
        message = one_line(caught.value)
        for words in ("algorithm.local_lr", "privacy.clip_value", str(tmp_path / "run" / "checkpoint")):
            assert words in message
        kept = load_latest(tmp_path / "run" / "checkpoint")
        assert bool(kept.state.theta.isfinite().all())
        metrics = tmp_path / "run" / "metrics.jsonl"
        assert kept.state.round == (len(metrics.read_text().splitlines()) if metrics.exists() else 0)

    def test_a_simulation_does_not_take_it_for_an_update(self) -> None:
        """A deployed agent's encoding would make 0 of NaN, which no server could tell from an honest 0."""
        with pytest.raises(PayloadError) as caught:
            finite(Update(0, 2, bytes(16), np.array([1.0, np.nan], dtype=np.float32)))
        assert caught.value.code == "not-finite"


class TestInterrupt:
    """Ctrl-C, in a process that is in native code and cannot run Python's own handlers."""

    def test_once_finishes_the_round_and_tells_how_to_go_on(
        self, tmp_path: Path, whole: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        child = self.run(tmp_path, monkeypatch, busy=0.2)
        wait_for(lambda: (tmp_path / "run" / "metrics.jsonl").exists())
        os.kill(child, signal.SIGINT)
        assert ended(child) == 130
        said = (tmp_path / "err").read_text()
        assert "Stopping after this round" in said
        found = re.search(r"stopped after round (\d) of 4; to resume: fedspa run --resume run\n", said)
        lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
        assert len(lines) == int(found[1]) < 4
        assert (tmp_path / "run" / "checkpoint" / f"round-{len(lines):06d}.safetensors").exists()
        simulate(resume=tmp_path / "run")
        assert outcome(tmp_path / "run") == whole

    def test_twice_stops_at_once(self, tmp_path: Path, whole: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        child = self.run(tmp_path, monkeypatch, busy=60)
        wait_for(lambda: (tmp_path / "begun").exists())
        os.kill(child, signal.SIGINT)
        wait_for(lambda: "Stopping after this round" in (tmp_path / "err").read_text())
        pressed = time.monotonic()
        os.kill(child, signal.SIGINT)
        assert ended(child) == 130
        assert time.monotonic() - pressed < 10
        simulate(resume=tmp_path / "run")
        assert outcome(tmp_path / "run") == whole

    @staticmethod
    def run(folder: Path, monkeypatch: pytest.MonkeyPatch, busy: float) -> int:
        monkeypatch.chdir(folder)
        Path("small.toml").write_text(to_toml(load(small(Path("run")))))
        Path("err").touch()

        def body() -> None:
            os.dup2(os.open("err", os.O_WRONLY), 2)
            sys.argv, sys.stderr = ["fedspa", "run", "small.toml"], os.fdopen(2, "w", buffering=1)
            original = loop.run_round

            def slow(*arguments: Any) -> Any:
                Path("begun").touch()
                until = time.monotonic() + busy
                while time.monotonic() < until:
                    ctypes.CDLL(None).usleep(int(busy * 1e6))
                return original(*arguments)

            loop.run_round = slow
            main()

        return start(body)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_every_row_of_the_documented_table_is_a_test() -> None:
    root = Path(__file__).parents[2]
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (root / "docs" / "ledger.md").read_text("utf-8"))
    assert len(named) > 30
    for file, name in named:
        assert re.search(rf"^ *def {name}\(", (root / file).read_text("utf-8"), flags=re.M), f"{file}::{name}"
