"""Killed by kill -9 at any instant and resumed until done, a run ends as one that was never killed: to the bit."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from interruptions import counted
from small_runs import ALGORITHMS, ended, outcome, small, start

import fedspa
from fedspa.agent.ledger.report import verify
from fedspa.running import run as simulate


def sections_of(name: str, rounds: int) -> dict[str, dict[str, Any]]:
    """By the fastest engine: nothing that is written depends on which it is."""
    federation = {**ALGORITHMS[name].get("federation", {}), "rounds": rounds}
    return {**ALGORITHMS[name], "federation": federation, "run": {"engine": "auto"}}


def go_on(config: dict[str, Any], every: int = 1) -> None:
    """What an operator does: resume where there is a run, else start it."""
    folder = Path(config["run"]["out"])
    overridden = {**config, "run": {**config["run"], "checkpoint_every": every}}
    simulate(overridden, resume=folder if (folder / "config.toml").exists() else None)


# All write the same files at the same moments; the others differ in what they train and encode.
each = pytest.mark.parametrize(
    "name", [name if name == "fedspa" else pytest.param(name, marks=pytest.mark.long) for name in ALGORITHMS]
)


@pytest.mark.slow
@each
def test_killed_at_random_instants(tmp_path: Path, name: str) -> None:
    """At least so many kills an algorithm, at instants drawn over the whole life of a process."""
    sections = sections_of(name, rounds=6)
    fedspa.run(small(tmp_path / "unkilled", **sections))
    wanted = outcome(tmp_path / "unkilled")
    started = time.monotonic()
    assert ended(start(lambda: simulate(small(tmp_path / "timed", **sections)))) == 0
    life = time.monotonic() - started
    chance = random.Random(20261115)
    kills = runs = resumed = 0
    wanted_kills = 10 if name == "fedspa" else 20
    while kills < wanted_kills:
        runs += 1
        config = small(tmp_path / f"run-{runs}", **sections)
        while True:
            resumed += (tmp_path / f"run-{runs}" / "metrics.jsonl").exists()
            every = chance.choice((1, 1, 2, 5))
            child = start(lambda: go_on(config, every))  # noqa: B023
            time.sleep(chance.uniform(0.0, life))
            os.kill(child, signal.SIGKILL)
            code = ended(child)
            if code == 0:
                break
            assert code == -signal.SIGKILL
            kills += 1
        assert outcome(tmp_path / f"run-{runs}") == wanted
    assert resumed >= 2  # some kills hit runs that were under way


@pytest.mark.slow
@each
def test_killed_before_every_durable_step(tmp_path: Path, name: str) -> None:
    """Die before each fsync, rename, reservation and release in turn, from the first to the last of a run."""
    sections = sections_of(name, rounds=2)
    steps = counted(lambda: simulate(small(tmp_path / "unkilled", **sections)))
    wanted = outcome(tmp_path / "unkilled")
    assert steps > 15  # a round alone takes three
    for fatal in range(1, steps + 1):
        config = small(tmp_path / f"run-{fatal}", **sections)
        child = start(lambda config=config, fatal=fatal: counted(lambda: go_on(config), fatal))
        assert ended(child) == -signal.SIGKILL
        go_on(config)
        assert outcome(tmp_path / f"run-{fatal}") == wanted
        if wanted["ledger"] is not None:
            assert verify(tmp_path / f"run-{fatal}" / "ledger.sqlite") == []
