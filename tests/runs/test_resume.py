"""Interrupted and resumed: the same run where noise repeats, an honest double count where it must not."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from interruptions import Crash, counted, crash
from small_runs import ALGORITHMS, ended, ledger_content, outcome, small, start
from tiny_files import mnist

import fedspa
from fedspa.agent.ledger.ledger import Ledger
from fedspa.agent.ledger.report import verify
from fedspa.agent.policy import PolicyRefusal
from fedspa.algorithms.cpsgd.plan import BinomialPlan
from fedspa.errors import LedgerError
from fedspa.mechanisms import Plan
from fedspa.privacy.event import Unit
from fedspa.randomness import streams
from fedspa.running import run as simulate
from fedspa.runs import local, setup
from fedspa.runs.checkpoint import CheckpointError
from fedspa.runs.config import Config, calibrated_plan, load, to_toml
from fedspa.runs.loop import RunState
from fedspa.runs.rundir import RoundMetrics, Stopped


def stop_after(config: dict[str, Any], rounds: int) -> None:
    seen: list[RoundMetrics] = []
    with pytest.raises(Stopped, match=rf"round {rounds} of 4.*--resume"):
        simulate(config, on_round=seen.append, stop=lambda: len(seen) == rounds - 1)
    assert len(seen) == rounds


def test_a_damaged_summary_of_a_finished_run_is_computed_again(tmp_path: Path) -> None:
    """Nothing of the file is believed: each number in it, off by a factor as after a flipped bit, is as before."""
    fedspa.run(small(tmp_path / "run"))
    before, file = outcome(tmp_path / "run"), tmp_path / "run" / "summary.json"
    summary = json.loads(file.read_text("utf-8"))
    changed = {key: value / 8 for key, value in summary.items() if isinstance(value, float) and value}
    assert changed.keys() >= {"epsilon", "uplink_bytes"}
    file.write_text(json.dumps(summary | changed))
    result = simulate(resume=tmp_path / "run")
    assert result.summary["epsilon"] == summary["epsilon"]
    assert outcome(tmp_path / "run") == before
    assert json.loads(file.read_text("utf-8"))["seconds"] == summary["seconds"]


def test_a_finished_run_asks_nothing_of_a_ledger_that_moved_on(tmp_path: Path) -> None:
    """Its cap has room for one run, which the next one used: to write a summary again is no spend."""
    (tmp_path / "policy.toml").write_text(
        'epsilon = 1.0\ndelta = 1e-3\nneighbours = "add-remove"\nmin_noise_multiplier = 0.1\nmax_local_steps = 10\n'
        'max_rounds = 10\nmax_compression = 1.0\nclippings = ["l2"]\n'
    )
    settings = {"ledger": str(tmp_path / "l.sqlite"), "policy": str(tmp_path / "policy.toml")}
    uneven = {"rounds": 3, "participation": "uniform", "cap": 3}  # some agents have turns left that nobody takes
    sections = {"privacy": {"epsilon": 0.6}, "federation": uneven, "run": settings}

    def config(name: str) -> dict[str, Any]:
        made = small(tmp_path / name, **sections)
        del made["privacy"]["noise_multiplier"]
        return made

    fedspa.run(config("first"))
    before = outcome(tmp_path / "first")

    def use_up() -> None:
        for number in range(9):
            fedspa.run(config(f"after-{number}"))

    with pytest.raises(fedspa.errors.BudgetError):
        use_up()
    (tmp_path / "first" / "summary.json").unlink()  # as if it was killed before
    result = simulate(resume=tmp_path / "first")
    assert result.summary["rounds"] == 3
    assert outcome(tmp_path / "first") == before


class TestNoiseThatMustNotRepeat:
    """`secure` and `exact`: no key is stored, so the interrupted round is drawn anew, and counted both times."""

    @pytest.mark.parametrize("noise", ["secure", "exact"])
    def test_both_attempts_are_in_the_ledger(self, tmp_path: Path, noise: str, monkeypatch: pytest.MonkeyPatch) -> None:
        sections = {"privacy": {"noise": noise}, "federation": {"participation": "uniform"}}
        config = small(tmp_path / "run", **sections)
        crash(config, 1, monkeypatch)
        crash(config, 1, monkeypatch, resume=tmp_path / "run")
        result = simulate(resume=tmp_path / "run")
        entries = ledger_content(tmp_path / "run" / "ledger.sqlite")
        names = [f"round-{t}" for t in (0, 1, "1-attempt-2", "1-attempt-3", 2, 3)]
        assert list(dict.fromkeys(entry["message"] for entry in entries)) == names
        by_agent: dict[str, list[str]] = {}
        for entry in entries[3:12]:
            by_agent.setdefault(entry["agent"], []).append(entry["digest"])
        assert len(by_agent) == 3  # the same agents in all three attempts at round 1 …
        for digests in by_agent.values():
            assert len(set(digests)) == 3  # … with other noise each time
        self.reports_what_the_ledger_holds(tmp_path / "run", result.summary)

    def test_agents_whose_turns_are_used_up_sit_out(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """All six in each of three rounds: the attempt in vain takes the place of the last round."""
        sections = {
            "privacy": {"noise": "secure", "epsilon": 2.0, "noise_multiplier": None},
            "federation": {"per_round": 6, "rounds": 3},
        }
        config = small(tmp_path / "run", **sections)
        del config["privacy"]["noise_multiplier"]
        crash(config, 1, monkeypatch)
        result = simulate(resume=tmp_path / "run")
        assert [metrics.agents for metrics in result.metrics] == [6, 6, 0]
        assert "round 3: 6 of 6 agents sit out" in caplog.text
        assert result.summary["rounds_empty"] == 1
        for words in (
            "6 participations were skipped: interrupted rounds had already used the agents' participation cap",
            "1 of 3 rounds had no update",
        ):
            assert any(words in line for line in result.summary["warnings"])
        assert result.summary["participations_max"] == 3
        assert result.summary["epsilon"] <= 2.0
        self.reports_what_the_ledger_holds(tmp_path / "run", result.summary)

    def test_no_key_is_on_the_disk(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        keys: list[bytes] = []
        urandom = streams.os.urandom

        def recorded(count: int) -> bytes:
            keys.append(urandom(count))
            return keys[-1]

        monkeypatch.setattr(streams.os, "urandom", recorded)
        config = small(tmp_path / "run", privacy={"noise": "secure"})
        crash(config, 2, monkeypatch)
        private = [key for key in keys if len(key) == streams.KEY_BYTES]
        assert private
        files = [path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()]
        assert len(files) > 3
        for key in private:
            assert not any(key in content or key.hex().encode() in content for content in files)

    @staticmethod
    def reports_what_the_ledger_holds(folder: Path, summary: dict[str, Any]) -> None:
        with Ledger.open(folder / "ledger.sqlite", create=False) as ledger:
            largest = max(ledger.epsilon(f"agent-{i}", summary["delta"], "add-remove") for i in range(6))
            most = max(sum(ledger.spent(f"agent-{i}").values()) for i in range(6))
        assert summary["epsilon"] == pytest.approx(largest, rel=1e-9)
        assert summary["participations_max"] == most


def test_the_files_may_have_moved(tmp_path: Path) -> None:
    """Their records are held against digests, wherever they lie."""
    here, there, other = (tmp_path / name for name in ("here", "there", "other"))
    mnist(here, records=(120, 20))
    sections = {"data": {"name": "mnist", "dir": str(here)}, "model": {"name": "logistic"}, "algorithm": {"batch": 10}}
    fedspa.run(small(tmp_path / "whole", **sections))
    stop_after(small(tmp_path / "stopped", **sections), 2)
    here.rename(there)
    mnist(other, records=(130, 20))
    with pytest.raises(CheckpointError, match="number of training records was 120 and is 130"):
        simulate(load(tmp_path / "stopped/config.toml", [f'data.dir="{other}"']), resume=tmp_path / "stopped")
    moved = load(tmp_path / "stopped/config.toml", [f'data.dir="{there}"'])
    with pytest.raises(Stopped) as told:
        simulate(moved, resume=tmp_path / "stopped", stop=lambda: True)
    assert str(told.value).endswith(f"fedspa run --resume {tmp_path / 'stopped'} --set 'data.dir=\"{there}\"'")
    simulate(moved, resume=tmp_path / "stopped")
    assert outcome(tmp_path / "stopped")["model"] == outcome(tmp_path / "whole")["model"]


class TestRefusals:
    """One line that says what is wrong; the folder stays as it was."""

    @pytest.fixture
    def stopped(self, tmp_path: Path) -> Path:
        stop_after(small(tmp_path / "run"), 2)
        return tmp_path / "run"

    def test_an_edited_config_file(self, stopped: Path) -> None:
        file = stopped / "config.toml"
        file.write_text(file.read_text().replace("delta = 0.001", "delta = 0.0001"))
        before = snapshot(stopped)
        with pytest.raises(CheckpointError, match=r"privacy\.delta was 0\.001 and is 0\.0001"):
            simulate(resume=stopped)
        assert snapshot(stopped) == before

    def test_an_old_copy_of_the_ledger(self, tmp_path: Path) -> None:
        config = small(tmp_path / "run", privacy={"noise": "secure"})
        stop_after(config, 1)
        for end in ("", ".anchor"):
            shutil.copy(tmp_path / f"run/ledger.sqlite{end}", tmp_path / f"old.sqlite{end}")
        seen: list[RoundMetrics] = []
        with pytest.raises(Stopped):
            simulate(resume=tmp_path / "run", on_round=seen.append, stop=lambda: len(seen) == 1)
        for end in ("", ".anchor"):
            shutil.copy(tmp_path / f"old.sqlite{end}", tmp_path / f"run/ledger.sqlite{end}")
        with pytest.raises(LedgerError, match="3 entries of this run, whose checkpoint counts 9"):
            simulate(resume=tmp_path / "run")

    @pytest.mark.parametrize(("kind", "noise"), [("fedspa", "seeded"), ("fedspa", "secure"), ("cpsgd", "secure")])
    def test_noise_that_earlier_rounds_did_not_have(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, noise: str
    ) -> None:
        """An accountant is mended between start and resume: ε of the new noise is not that of the rounds before."""
        sections = ALGORITHMS[kind]
        run = {"ledger": str(tmp_path / "l.sqlite")} if noise == "secure" else {}
        config = small(tmp_path / "run", **sections, run=run)
        config["privacy"] |= {"epsilon": 8.0, "noise": noise, "noise_multiplier": None}
        config["algorithm"]["options"] = {}
        stop_after(config, 2)

        def mended(config: Config, dimension: int, active: int, records: int, unit: Unit) -> Plan:
            plan = calibrated_plan(config, dimension, active, records, unit)
            if isinstance(plan, BinomialPlan):
                return replace(plan, trials=2 * plan.trials)
            return replace(plan, noise_multiplier=2 * plan.noise_multiplier)

        with monkeypatch.context() as patched:
            patched.setattr(setup, "calibrated_plan", mended)
            with pytest.raises(LedgerError, match="finish it with the version that began it") as caught:
                simulate(resume=tmp_path / "run")
        assert "\n" not in str(caught.value)
        assert simulate(resume=tmp_path / "run").summary["rounds"] == 4

    def test_a_policy_counts_before_the_first_checkpoint_too(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        policy = tmp_path / "policy.toml"
        limits = 'epsilon = 1000.0\ndelta = 1e-3\nneighbours = "add-remove"\nmin_noise_multiplier = {}\n'
        limits += 'max_local_steps = 10\nmax_rounds = 10\nmax_compression = 1.0\nclippings = ["l2"]\n'
        policy.write_text(limits.format(0.1))

        def dying(*_: object) -> None:
            raise Crash

        with monkeypatch.context() as patched:
            patched.setattr(RunState, "save", dying)
            with pytest.raises(Crash):
                simulate(small(tmp_path / "run", run={"policy": str(policy)}))
        policy.write_text(limits.format(50.0))
        with pytest.raises(PolicyRefusal, match="50"):
            simulate(resume=tmp_path / "run")
        policy.write_text(limits.format(0.1))
        assert simulate(resume=tmp_path / "run").summary["rounds"] == 4

    def test_checkpoints_that_are_gone(self, stopped: Path) -> None:
        shutil.rmtree(stopped / "checkpoint")
        with pytest.raises(CheckpointError, match="no checkpoint"):
            simulate(resume=stopped)


def test_a_resumed_run_needs_room_for_its_rest_only(tmp_path: Path) -> None:
    """The policy's cap has room for this run once: what the run itself spent is not held against it."""
    (tmp_path / "policy.toml").write_text(
        'epsilon = 1.0\ndelta = 1e-3\nneighbours = "add-remove"\nmin_noise_multiplier = 0.1\nmax_local_steps = 10\n'
        'max_rounds = 10\nmax_compression = 1.0\nclippings = ["l2"]\n'
    )
    settings = {"ledger": str(tmp_path / "l.sqlite"), "policy": str(tmp_path / "policy.toml")}
    sections = {"privacy": {"epsilon": 1.0, "clip_value": 0.3}, "federation": {"per_round": 6}}
    config = small(tmp_path / "run", **sections, run=settings)
    del config["privacy"]["noise_multiplier"]
    stop_after(config, 3)
    assert simulate(resume=tmp_path / "run").summary["rounds"] == 4
    with pytest.raises(fedspa.errors.BudgetError):
        simulate({**config, "run": {**config["run"], "out": str(tmp_path / "second")}})


def snapshot(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith("ledger.sqlite-")
    }


def test_agents_pay_before_they_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(local, "respond", fail)
    with pytest.raises(MemoryError):
        simulate(small(tmp_path / "run"))
    with Ledger.open(tmp_path / "run/ledger.sqlite", create=False) as ledger:
        entries, releases = ledger.position().entries, ledger.position().releases
    assert entries > 0
    assert releases == 0


# Killed by kill -9 at any instant and resumed until done, a run ends as one that was never killed: to the bit.


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
    while kills < wanted_kills or resumed < 2:  # some kills must hit runs that were under way
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


# A project's folder is not taken for a run's, though both have a config.toml.


def test_a_run_that_was_killed_before_its_first_checkpoint_is_one(tmp_path: Path) -> None:
    config = load(small(tmp_path / "run"))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text(to_toml(config), "utf-8")
    (tmp_path / "run" / "ledger.sqlite-half").touch()  # whatever it left half made
    assert simulate(resume=tmp_path / "run").summary["rounds"] == config.federation.rounds
