"""Faults tried on whole runs: each ends in one clear line, loses nothing, and the run goes on once it is mended."""

from __future__ import annotations

import ctypes
import json
import os
import re
import resource
import shutil
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
from fedspa.errors import ConfigError, FedspaError, LedgerError, PayloadError
from fedspa.running import Stopped, simulate
from fedspa.runs import rundir as folder_module
from fedspa.runs.checkpoint import CheckpointError, load_latest
from fedspa.runs.config import load, to_toml
from fedspa.runs.simulate import Simulation
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

        with pytest.raises(FedspaError, match=r"No space left|no room") as caught:
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

    @pytest.mark.parametrize("step", ["add_round", "save", "finish"])
    def test_no_room_at_each_kind_of_write(
        self, tmp_path: Path, step: str, whole: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*arguments: object, **options: object) -> None:
            raise OSError(28, "No space left on device")

        begun: list[object] = []
        with monkeypatch.context() as patched:
            original = getattr(folder_module.RunFolder, step)

            def failing(self: folder_module.RunFolder, *arguments: Any) -> None:
                if begun or step == "finish":  # the second write of its kind
                    with self._writing():
                        full()
                begun.append(step)
                original(self, *arguments)

            patched.setattr(folder_module.RunFolder, step, failing)
            with pytest.raises(FedspaError, match=r"No space left on device.*--resume") as caught:
                simulate(small(tmp_path / "run"))
            one_line(caught.value)
        simulate(resume=tmp_path / "run")
        assert outcome(tmp_path / "run") == whole


class TestReadOnlyFolder:
    def test_at_the_start(self, disk: Path) -> None:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with pytest.raises(ConfigError, match=r"run\.out.*Read-only") as caught:
            simulate(small(disk / "run"))
        one_line(caught.value)

    def test_while_running(self, disk: Path, whole: dict[str, Any]) -> None:
        """The disk itself cannot be made read-only under open files, so the run is stopped in between."""
        seen: list[object] = []
        with pytest.raises(Stopped):
            simulate(small(disk / "run"), on_round=seen.append, stop=lambda: len(seen) == 1)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with pytest.raises(FedspaError, match=r"cannot be written|[Rr]ead-only") as caught:
            simulate(resume=disk / "run")
        one_line(caught.value)
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        simulate(resume=disk / "run")
        assert outcome(disk / "run") == whole


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

    def test_a_finished_or_stopped_run_is_not_overwritten(self, stopped: Path) -> None:
        with pytest.raises(ConfigError, match=r"not empty.*--resume"):
            simulate(small(stopped))


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
    def test_metrics_beyond_the_checkpoint(self, stopped: Path, whole: dict[str, Any]) -> None:
        """What a kill leaves after the lines of the checkpoint: a torn line, or lines of later rounds."""
        file = stopped / "metrics.jsonl"
        before = file.read_bytes()
        for more in (b'{"round": 2, "accu', before):
            file.write_bytes(before + more)
            copy = Path(shutil.copytree(stopped, stopped.with_name(f"copy-{len(more)}")))
            simulate(resume=copy)
            assert outcome(copy) == whole

    @pytest.mark.parametrize(
        "damage",
        [
            lambda content: content[:-1],
            lambda content: b"\0" * len(content),
            lambda content: None,
        ],
        ids=["unended", "zeros", "gone"],
    )
    def test_metrics(self, stopped: Path, damage: Callable[[bytes], bytes | None]) -> None:
        file = stopped / "metrics.jsonl"
        left = damage(file.read_bytes())
        file.unlink() if left is None else file.write_bytes(left)
        with pytest.raises(FedspaError, match=r"damaged: it does not hold the 2 rounds.*backup") as caught:
            simulate(resume=stopped)
        one_line(caught.value)
        assert (file.read_bytes() if file.exists() else None) == left

    def test_the_newest_checkpoint(
        self, stopped: Path, whole: dict[str, Any], caplog: pytest.LogCaptureFixture
    ) -> None:
        newest = stopped / "checkpoint" / "round-000002.safetensors"
        flipped = bytearray(newest.read_bytes())
        flipped[-1] ^= 1
        newest.write_bytes(flipped)
        simulate(resume=stopped)
        assert "round-000002" in caplog.text
        assert "going on from the checkpoint before it" in caplog.text
        assert outcome(stopped) == whole

    def test_all_checkpoints(self, stopped: Path) -> None:
        for path in (stopped / "checkpoint").iterdir():
            path.write_bytes(b"nothing")
        with pytest.raises(CheckpointError, match=r"no whole checkpoint.*backup") as caught:
            simulate(resume=stopped)
        one_line(caught.value)
        assert len((stopped / "metrics.jsonl").read_text().splitlines()) == 2

    def test_the_ledger(self, stopped: Path) -> None:
        (stopped / "ledger.sqlite").write_bytes(b"nothing" * 1000)
        with pytest.raises(LedgerError, match="not a ledger") as caught:
            simulate(resume=stopped)
        one_line(caught.value)


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
        assert kept is not None
        assert bool(kept.state.theta.isfinite().all())
        metrics = tmp_path / "run" / "metrics.jsonl"
        assert kept.state.round == (len(metrics.read_text().splitlines()) if metrics.exists() else 0)

    def test_a_simulation_does_not_take_it_for_an_update(self) -> None:
        """A deployed agent's encoding would make 0 of NaN, which no server could tell from an honest 0."""
        with pytest.raises(PayloadError) as caught:
            finite(Update(0, 2, bytes(16), np.array([1.0, np.nan], dtype=np.float32), 0.0))
        assert caught.value.code == "not-finite"


class TestRecordsThatAreNotFinite:
    """Features so large that their gradients overflow: finite enough to be loaded, and zero to the mechanism."""

    def test_the_agents_log_tells_and_the_run_does_not(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.syspath_prepend(tmp_path)
        (tmp_path / "overflowing_records.py").write_text(
            "from dataclasses import replace\n"
            "from fedspa.data.datasets import load\n"
            "def sound():\n"
            "    return load('digits', None)\n"
            "def bad():\n"
            "    x = sound().train_x.clone()\n"
            "    x[::5] = 3e38\n"
            "    return replace(sound(), train_x=x)\n"
        )
        left: dict[str, tuple[object, ...]] = {}
        for kind in ("sound", "bad"):
            caplog.clear()
            folder = tmp_path / kind
            fedspa.run(small(folder, data={"name": f"overflowing_records:{kind}"}))
            told = [record.getMessage() for record in caplog.records if record.name == "fedspa.agent"]
            assert bool(told) == (kind == "bad")
            assert all("had a gradient that was not finite and counted as zero" in line for line in told)
            lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
            summary = json.loads((folder / "summary.json").read_text("utf-8"))
            left[kind] = ([names(line) for line in lines], names(summary))
            for file in filter(Path.is_file, folder.rglob("*")):
                assert not re.search(rb"zeroed|not finite", file.read_bytes()), file
        assert left["sound"] == left["bad"]


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
        found = re.search(r"stopped after round (\d) of 4; to go on: fedspa run --resume run\n", said)
        assert found is not None
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
            original = Simulation.round

            def slow(self: Simulation, *arguments: Any) -> Any:
                Path("begun").touch()
                until = time.monotonic() + busy
                while time.monotonic() < until:
                    ctypes.CDLL(None).usleep(int(busy * 1e6))
                return original(self, *arguments)

            Simulation.round = slow  # type: ignore[method-assign]
            main()

        return start(body)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_every_row_of_the_documented_table_is_a_test() -> None:
    root = Path(__file__).parents[2]
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (root / "docs" / "reliability.md").read_text("utf-8"))
    assert len(named) > 30
    for file, name in named:
        assert re.search(rf"^ *def {name}\(", (root / file).read_text("utf-8"), flags=re.M), f"{file}::{name}"


def names(value: Any) -> Any:
    """The keys of a JSON value, at every depth."""
    return {key: names(inner) for key, inner in value.items()} if isinstance(value, dict) else None
