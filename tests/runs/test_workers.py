"""Runs whose agents train in workers: the same bits, whoever trains whom, and whatever becomes of a worker."""

from __future__ import annotations

import pickle
import re
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_ray import FakeRay, fake_ray
from small_runs import ALGORITHMS, outcome, small
from small_sums import SUMS

import fedspa
from fedspa.agent.ledger.ledger import Ledger
from fedspa.errors import ConfigError, DataError
from fedspa.running import run as simulate
from fedspa.runs import local, ray_workers
from fedspa.runs.ray_workers import LARGEST_BATCH, MOST_AGENTS, MOST_LOSSES, Turn, WorkerFailure
from fedspa.runs.rundir import Stopped

__all__ = ["fake_ray"]
Play = Callable[..., FakeRay]
EVERYONE = {"federation": {"per_round": 6}}


def with_workers(config: dict[str, Any], workers: int = 3) -> dict[str, Any]:
    return {**config, "run": {**config["run"], "workers": workers}}


def both(tmp_path: Path, workers: int = 3, **sections: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a run leaves behind in one process, and with workers, whose number it says."""
    fedspa.run(small(tmp_path / "alone", **sections))
    fedspa.run(with_workers(small(tmp_path / "spread", **sections), workers))
    alone, spread = outcome(tmp_path / "alone"), outcome(tmp_path / "spread")
    assert alone["summary"].pop("workers") == 1
    assert spread["summary"].pop("workers") == workers
    return alone, spread


NOISES = {"fedspa": "secure", "fedavg": "seeded", "dp-fed": "exact", "cpsgd": "secure"}


@pytest.mark.parametrize("name", NOISES)
def test_same_bits_as_one_process(tmp_path: Path, fake_ray: Play, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """`secure` and `exact` draw a key of their own for each run; here both runs have the same."""
    monkeypatch.setattr(local, "root_of", lambda config: bytes(range(32)))
    fake_ray()
    sections = {**ALGORITHMS[name], "privacy": {**ALGORITHMS[name].get("privacy", {}), "noise": NOISES[name]}}
    sections["federation"] = {**sections.get("federation", {}), "rounds": 2}
    alone, spread = both(tmp_path, 5 if name == "fedspa" else 3, **sections)
    assert spread == alone


@pytest.mark.parametrize(
    "sections",
    [
        {"run": {"engine": "native", "threads": 2}},
        {"privacy": {"clip_rule": "quantile"}},
        {"data": {"name": "small_records:visits", "person": "patient", "person_records": 2}},
        {
            "data": {"name": "small_records:tokens"},
            "model": {"name": "small_records:Tagger"},
            "task": {"name": "next-token"},
        },
    ],
    ids=str,
)
def test_same_bits_whatever_is_trained(tmp_path: Path, fake_ray: Play, sections: dict[str, Any]) -> None:
    fake_ray()
    alone, spread = both(tmp_path, 2, **sections)
    assert spread == alone


@pytest.mark.parametrize("name", ["fedspa", "cpsgd"])
def test_same_bits_of_sums(tmp_path: Path, fake_ray: Play, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedspa.runs.run_ledger.draw_run_name", lambda folder: "run")  # to which messages are bound
    fake_ray()
    alone, spread = both(tmp_path, **SUMS[name])
    assert spread == alone


def test_the_ledger_has_paid_before_a_batch_is_sent(
    tmp_path: Path, fake_ray: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray, reserve, paid = fake_ray(), Ledger.reserve_many, []

    def reserving(self: Ledger, *arguments: Any, **options: Any) -> Any:
        found = reserve(self, *arguments, **options)
        paid.append([name for name, _ in ray.calls].count("train"))
        return found

    monkeypatch.setattr(Ledger, "reserve_many", reserving)
    fedspa.run(with_workers(small(tmp_path / "run", federation={"rounds": 1})))
    assert paid == [0]
    assert "train" in [name for name, _ in ray.calls]


def test_keys_travel_in_calls_and_records_once_through_the_store(
    tmp_path: Path, fake_ray: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is in the store may lie on a disk for a while: no key is in it."""
    keys, key_of, ray = set[bytes](), local.agent_key, fake_ray()

    def keyed(*of: Any) -> bytes:
        keys.add(key_of(*of))
        return key_of(*of)

    monkeypatch.setattr(local, "agent_key", keyed)
    fedspa.run(with_workers(small(tmp_path / "run", privacy={"noise": "secure"})))
    batches = [arguments[1] for name, arguments in ray.calls if name == "train"]
    assert len(keys) == 12
    assert all(any(key in batch for batch in batches) for key in keys)
    assert not any(key in each.content for key in keys for each in ray.stored)
    made, rounds, agents = 3, 4, 6
    assert len(ray.stored) == made + rounds + agents


def test_the_largest_batch_is_small() -> None:
    key = bytes(range(32))
    turns = [Turn(f"agent-{10**6 + number}", 10**6, key, key, False) for number in range(MOST_AGENTS)]
    assert len(pickle.dumps(turns)) < LARGEST_BATCH


@pytest.mark.parametrize("fatal", [1, 9])
def test_a_lost_workers_batch_is_trained_again(tmp_path: Path, fake_ray: Play, fatal: int) -> None:
    ray = fake_ray(dies=lambda number, name, count: name == "train" and count == fatal)
    alone, spread = both(tmp_path, 2, **EVERYONE)
    assert spread == alone
    assert (len(ray.actors), ray.lost, ray.closed) == (2, 1, 1)


def test_an_agent_that_ends_every_worker_ends_the_run(tmp_path: Path, fake_ray: Play) -> None:
    ray = fake_ray(dies=lambda number, name, count: name == "train")
    with pytest.raises(WorkerFailure, match=r"^workers failed repeatedly while they trained .*--resume$"):
        fedspa.run(with_workers(small(tmp_path / "run")))
    assert ray.lost % MOST_LOSSES == 0
    assert ray.closed == 1


def test_workers_that_never_come_up_are_an_error_before_anything_is_written(tmp_path: Path, fake_ray: Play) -> None:
    ray = fake_ray(dies=lambda number, name, count: True)
    with pytest.raises(WorkerFailure, match="failed repeatedly as they started"):
        fedspa.run(with_workers(small(tmp_path / "run")))
    assert not (tmp_path / "run").exists()
    assert ray.closed == 1


def test_a_users_error_reads_as_from_one_process(tmp_path: Path, fake_ray: Play) -> None:
    """FedAvg hides nothing: a label that the model has no output for is told."""
    ray, found = fake_ray(), []
    for workers in (1, 3):
        config = small(tmp_path / str(workers), algorithm={"name": "fedavg", "compression": 1.0})
        with pytest.raises(DataError) as caught:
            simulate(with_workers(config, workers), module=Fragile())
        found.append(str(caught.value))
    assert found[0] == found[1]
    assert re.fullmatch(r"the model fails on these records \(\w+: not these, at .*\.py:\d+\)", found[0])
    assert ray.closed == 1
    assert all(actor.killed for actor in ray.actors)


class Fragile(torch.nn.Module):
    """Fails on records that no trial has: those of more than zeros and ones, in a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and len(x) > 4:
            raise ValueError("not these")
        return self.layer(x.flatten(1))


def test_another_number_of_workers_goes_on(tmp_path: Path, fake_ray: Play) -> None:
    fake_ray()
    fedspa.run(small(tmp_path / "whole"))
    with pytest.raises(Stopped):
        simulate(with_workers(small(tmp_path / "stopped"), 2), stop=lambda: True)
    simulate(with_workers(small(tmp_path / "stopped"), 3), resume=tmp_path / "stopped", stop=lambda: False)
    whole, stopped = outcome(tmp_path / "whole"), outcome(tmp_path / "stopped")
    assert (whole["summary"].pop("workers"), stopped["summary"].pop("workers")) == (1, 3)
    assert stopped == whole


def test_a_machine_that_computes_otherwise_is_refused(
    tmp_path: Path, fake_ray: Play, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    here, other = ray_workers.of_machine, dict[str, str]()
    known = ray_workers.Worker.facts

    def facts(self: ray_workers.Worker) -> Any:
        good, found = known(self)
        return good, found | other

    monkeypatch.setattr(ray_workers.Worker, "facts", facts)
    fake_ray()
    other["instruction set"] = "another"
    with pytest.raises(ConfigError, match=r"^the instruction set of a worker is 'another', and here it is"):
        fedspa.run(with_workers(small(tmp_path / "seeded")))
    fedspa.run(with_workers(small(tmp_path / "secure", privacy={"noise": "secure"}, federation={"rounds": 1})))
    assert sum("may round otherwise" in line for line in caplog.messages) == 1
    other |= {"instruction set": str(here("cpu")["instruction set"]), "fedspa version": "0.0"}
    with pytest.raises(ConfigError, match=r"^the fedspa version of a worker is"):
        fedspa.run(with_workers(small(tmp_path / "other", privacy={"noise": "secure"})))


def test_without_ray_an_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"^run.workers is 3, and workers are Ray's: pip install 'fedspa\[ray\]'"):
        fedspa.run(with_workers(small(tmp_path / "run")))
    assert not (tmp_path / "run").exists()


def test_an_address_where_nobody_listens_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="needs the extra ray")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    for address in (f"127.0.0.1:{port}", "ray://a:1", "nonsense"):
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(ConfigError, match=f"^RAY_ADDRESS is '{address}', and no cluster took .* must be 'auto'"):
            fedspa.run(with_workers(small(tmp_path / "run")))
    assert not (tmp_path / "run").exists()
