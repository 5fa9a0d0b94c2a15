"""Workers as processes of Ray: two machines on loopback, kill -9 in mid-round, Ctrl-C, and nothing left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import outcome, small
from torch import Tensor, nn

import fedspa
from fedspa.errors import ConfigError, DataError
from fedspa.running import run as simulate
from fedspa.runs.rundir import Stopped

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
pytest.importorskip("ray", reason="needs the extra ray")
psutil = pytest.importorskip("psutil", reason="looks for processes that were left behind")


@pytest.fixture
def cluster() -> Iterator[str]:
    """The address of two nodes with a core each: a worker of one thread fills one. It takes seconds to start, so that
    one test has it for all that is to be seen there."""
    from ray.cluster_utils import Cluster

    before = set(psutil.Process().children(recursive=True))
    how = {"num_cpus": 1, "num_gpus": 0, "include_dashboard": False, "object_store_memory": 80 * 2**20}
    nodes = Cluster(initialize_head=True, head_node_args=how, shutdown_at_exit=False)
    try:
        nodes.add_node(num_cpus=1, num_gpus=0, object_store_memory=80 * 2**20)
        yield nodes.address
    finally:
        nodes.shutdown()
        left = [process for process in psutil.Process().children(recursive=True) if process not in before]
        for process in left:
            process.kill()


class Mortal(nn.Module):
    """Ends the worker process that first runs it after `flag` was made; in the driver it is a linear model."""

    def __init__(self, flag: Path, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.flag, self.how, self.driver = nn.Linear(64, 10), str(flag), how, os.getpid()

    def forward(self, x: Tensor) -> Tensor:
        if os.getpid() != self.driver and os.path.exists(self.flag):
            if self.how == "raise":
                raise ValueError("not these records")
            os.unlink(self.flag)
            os.kill(os.getpid(), signal.SIGKILL)
        return self.layer(x.flatten(1))


def spread(out: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    config = small(out, **sections)
    return {**config, "run": {**config["run"], "workers": 2}}


@pytest.mark.long
def test_a_worker_killed_in_mid_round_on_a_cluster_of_two(
    tmp_path: Path, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed by kill -9 in the second round, the run goes on with another worker, and ends with the bits of one
    process. On the same cluster: an error of the user's own, and workers that there is no room for."""
    monkeypatch.setenv("RAY_ADDRESS", cluster)
    everyone = {"federation": {"per_round": 6}}
    flag = tmp_path / "flag"
    simulate(small(tmp_path / "alone", **everyone), module=Mortal(flag, "die"))
    result = simulate(
        spread(tmp_path / "spread", **everyone),
        module=Mortal(flag, "die"),
        on_round=lambda metrics: flag.touch() if metrics.round == 0 else None,
    )
    assert not flag.exists()
    assert result.summary["workers"] == 2
    alone, two = outcome(tmp_path / "alone"), outcome(tmp_path / "spread")
    for each in (alone, two):  # the flag's name is part of neither, the number of workers is
        del each["summary"]["workers"]
    assert two == alone
    _users_error(tmp_path)
    _too_many(tmp_path)


def _users_error(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    sections = {"algorithm": {"name": "fedavg", "compression": 1.0}}
    with pytest.raises(DataError, match=r"^the model fails on these records \(\w+: not these records, at "):
        simulate(
            spread(tmp_path / "error", **sections),
            module=Mortal(flag, "raise"),
            on_start=lambda job, folder: flag.touch(),
        )


def _too_many(tmp_path: Path) -> None:
    config = spread(tmp_path / "many")
    config["run"]["workers"] = 3
    with pytest.raises(ConfigError, match=r"^run.workers is 3, each with 1 cores .* Ray has 2 cores and 0 GPUs in all"):
        fedspa.run(config)
    assert not (tmp_path / "many").exists()


def test_ctrl_c_leaves_no_process_behind_and_one_process_goes_on(tmp_path: Path) -> None:
    """The command line, with workers of this machine alone: pressed twice, the process ends at once."""
    words = ["federation.rounds=1000", "algorithm.name=fedavg", "algorithm.compression=1.0", "privacy.noise=seeded"]
    words += ["run.workers=2", "run.threads=1", "run.engine=generic", "algorithm.local_steps=200"]
    command = [sys.executable, "-m", "fedspa", "run", "--out", str(tmp_path / "run")]
    process = subprocess.Popen(
        [*command, *(part for word in words for part in ("--set", word))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    lines = tmp_path / "run" / "metrics.jsonl"
    try:
        end = time.monotonic() + 120
        while not (lines.exists() and lines.stat().st_size) and time.monotonic() < end and process.poll() is None:
            time.sleep(0.05)
        started = psutil.Process(process.pid).children(recursive=True)
        words = " ".join(word for each in started if "raylet" in each.name() for word in each.cmdline())
        folders = {*re.findall(r"/tmp/fedspa-\w+", words)}
        assert len(folders) == 1
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.05)  # two at once are one; and a round takes longer than this
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(30) == 130, process.communicate()
        _, alive = psutil.wait_procs(started, timeout=20)
        assert alive == []
        assert not os.path.exists(folders.pop())
    finally:
        for each in [process, *(started if process.poll() is None else [])]:
            each.kill()
        process.communicate()
    with pytest.raises(Stopped):
        simulate(
            fedspa.runs.config.load(tmp_path / "run" / "config.toml", ["run.workers=1"]),
            resume=tmp_path / "run",
            stop=lambda: True,
        )
