"""Runs whose agents train in workers: the same bits, whoever trains whom, and whatever becomes of a worker."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import ALGORITHMS, outcome, small
from worker_threads import ThreadHand, ThreadPool, played

import fedspa
from fedspa.agent.ledger.ledger import Ledger
from fedspa.errors import ConfigError, DataError
from fedspa.running import Stopped, simulate
from fedspa.runs import simulate as simulation
from fedspa.runs.config import load
from fedspa.runs.setup import prepare
from fedspa.runs.workers import hired, worker
from fedspa.runs.workers.crew import MOST_LOSSES, Crew, WorkersLost
from fedspa.runs.workers.deal import MOST
from fedspa.runs.workers.messages import Share, Turn, packed
from fedspa.runs.workers.pool import LARGEST_SHARE

__all__ = ["played"]
Play = Callable[..., ThreadPool]
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


@pytest.mark.parametrize("noise", ["seeded", "secure", "exact"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_same_bits_as_one_process(
    tmp_path: Path, played: Play, monkeypatch: pytest.MonkeyPatch, name: str, noise: str
) -> None:
    """`secure` and `exact` draw a key of their own for each run; here both runs have the same."""
    monkeypatch.setattr(simulation, "root_of", lambda config: bytes(range(32)))
    played()
    sections = {**ALGORITHMS[name], "privacy": {**ALGORITHMS[name].get("privacy", {}), "noise": noise}}
    sections["federation"] = {**sections.get("federation", {}), "rounds": 2}
    alone, spread = both(tmp_path, **sections)
    assert spread == alone


@pytest.mark.parametrize(
    "sections",
    [
        {"run": {"engine": "native", "threads": 2}},
        {"run": {"engine": "stacked"}},
        {"run": {"engine": "reference"}},
        {"privacy": {"clip_rule": "quantile"}},
        {"algorithm": {"mask": "shared"}},
        {"data": {"partition": "dirichlet", "alpha": 0.5}, "algorithm": {"batch": 2}},
        {"data": {"name": "small_records:visits", "person": "patient", "person_records": 2}},
        {
            "data": {"name": "small_records:tokens"},
            "model": {"name": "small_records:Tagger"},
            "task": {"name": "next-token"},
        },
    ],
    ids=str,
)
def test_same_bits_whatever_is_trained(tmp_path: Path, played: Play, sections: dict[str, Any]) -> None:
    played()
    alone, spread = both(tmp_path, 2, **sections)
    assert spread == alone


def test_more_workers_than_agents(tmp_path: Path, played: Play) -> None:
    played()
    alone, spread = both(tmp_path, 5)
    assert spread == alone


def test_the_ledger_has_paid_before_a_share_is_sent(
    tmp_path: Path, played: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    reserve, work = Ledger.reserve_many, ThreadHand.work

    def reserving(self: Ledger, *arguments: Any, **options: Any) -> Any:
        found = reserve(self, *arguments, **options)
        order.append("paid")
        return found

    def working(self: ThreadHand, *arguments: Any) -> Any:
        order.append("sent")
        return work(self, *arguments)

    played()
    monkeypatch.setattr(Ledger, "reserve_many", reserving)
    monkeypatch.setattr(ThreadHand, "work", working)
    fedspa.run(with_workers(small(tmp_path / "run", federation={"rounds": 1})))
    assert order[0] == "paid"
    assert order.count("paid") == 1
    assert "sent" in order


def test_records_travel_once_and_theta_once_per_worker_and_round(
    tmp_path: Path, played: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four rounds in which everybody takes part, and no clock moves anybody: nobody holds another's records."""
    crews: list[Crew] = []

    def steady(pool: ThreadPool, workers: int, made: bytes, at_once: int, fits: Any) -> Crew:
        crews.append(Crew(pool, workers, made, None, fits))
        return crews[0]

    monkeypatch.setattr(hired, "Crew", steady)
    monkeypatch.setattr("fedspa.runs.workers.deal.SLACK", 1e9)
    pool = played()
    result = fedspa.run(with_workers(small(tmp_path / "run", **EVERYONE), 2))
    traffic, held = crews[0].traffic, [hand.worker._held for hand in pool.hands]
    assert sorted([*held[0], *held[1]]) == [f"agent-{number}" for number in range(6)]
    once = sum(x.nbytes + y.nbytes for each in held for x, y in each.values())
    assert once < traffic.records < once + 6 * 2000
    assert 0 < traffic.shares < 6 * 4 * 500
    assert all(len(hand.rounds) == len(set(hand.rounds)) == 4 for hand in pool.hands)
    assert traffic.rounds == sum(len(content) for hand in pool.hands for content in hand.rounds)
    theta = 4 * result.summary["dimension"]
    assert theta < len(pool.hands[0].rounds[0]) < theta + 4000
    assert 0 < traffic.answers < 6 * 4 * 2000


def test_keys_travel_in_calls_and_records_beside_them(tmp_path: Path, played: Play, monkeypatch: Any) -> None:
    """What is large may lie on a worker's disk for a while: no key is in it."""
    keys, large, small_ones = set[bytes](), [], []
    key_of, work = simulation.agent_key, ThreadHand.work

    def keyed(*of: Any) -> bytes:
        keys.add(key_of(*of))
        return key_of(*of)

    def working(self: ThreadHand, announced: bytes | None, share: bytes, records: bytes) -> Any:
        large.extend([announced or b"", records])
        small_ones.append(share)
        return work(self, announced, share, records)

    monkeypatch.setattr(simulation, "agent_key", keyed)
    monkeypatch.setattr(ThreadHand, "work", working)
    played()
    fedspa.run(with_workers(small(tmp_path / "run", privacy={"noise": "secure"})))
    assert len(keys) == 12
    assert all(any(key in share for share in small_ones) for key in keys)
    assert not any(key in content for key in keys for content in large)


def test_the_largest_share_is_small() -> None:
    key = bytes(range(32))
    names = {f"agent-{10**6 + number}": Turn(10**6, key, key, False) for number in range(MOST)}
    forgotten = tuple(f"agent-{number}" for number in range(10**6, 10**6 + MOST))
    assert len(packed(Share(names, forgotten))) < LARGEST_SHARE


def test_records_that_moved_are_kept_by_one_worker(tmp_path: Path, played: Play) -> None:
    """The one that they left forgets them with its next share."""
    pool = played(slow={0: 0.2})
    fedspa.run(with_workers(small(tmp_path / "run", federation={"agents": 12, "per_round": 12, "rounds": 3}), 2))
    slow, fast = (set(hand.worker._held) for hand in pool.hands)
    assert slow | fast == {f"agent-{number}" for number in range(12)}
    assert len(slow & fast) <= 3  # of its last share, after which it was sent nothing


def test_agents_that_move_from_a_slow_worker_have_the_same_bits(tmp_path: Path, played: Play) -> None:
    sections = {"federation": {"agents": 12, "per_round": 12, "rounds": 2}}
    pool = played(slow={0: 0.4})
    alone, spread = both(tmp_path, 2, **sections)
    assert spread == alone
    slow, fast = (len(hand.worker._held) for hand in pool.hands)
    assert slow < fast


@pytest.mark.parametrize("fatal", [1, 4, 9])
def test_a_lost_workers_share_is_trained_again(
    tmp_path: Path, played: Play, fatal: int, caplog: pytest.LogCaptureFixture
) -> None:
    pool = played(dies=lambda hand, what: what == "work" and hand.pool.calls["work"] == fatal)
    alone, spread = both(tmp_path, 2, **EVERYONE)
    assert spread == alone
    assert len(pool.hands) == 3
    assert pool.closed == 1
    assert "a worker was lost with" in caplog.text


def test_a_place_that_stays_empty_is_done_without(tmp_path: Path, played: Play) -> None:
    """Its machine is gone: the others train what waits there."""
    pool = played(dies=lambda hand, what: hand.number in (1, 2, 3) and (what == "work" or hand.number > 1))
    alone, spread = both(tmp_path, 2, **EVERYONE)
    assert spread == alone
    assert len(pool.hands) == 4


def test_an_agent_that_ends_every_worker_ends_the_run(tmp_path: Path, played: Play) -> None:
    pool = played(dies=lambda hand, what: what == "work")
    with pytest.raises(WorkersLost, match=rf"^{MOST_LOSSES} workers were lost while they trained agent-\d.*--resume$"):
        fedspa.run(with_workers(small(tmp_path / "run")))
    assert pool.closed == 1


def test_workers_that_never_come_up_are_an_error_before_anything_is_written(tmp_path: Path, played: Play) -> None:
    pool = played(dies=lambda hand, what: True)
    with pytest.raises(WorkersLost, match="ended as it was started"):
        fedspa.run(with_workers(small(tmp_path / "run")))
    assert not (tmp_path / "run").exists()
    assert pool.closed == 1


def test_a_users_error_reads_as_from_one_process(tmp_path: Path, played: Play) -> None:
    """FedAvg hides nothing: a label that the model has no output for is told."""
    pool = played()
    found = []
    for workers in (1, 3):
        config = small(tmp_path / str(workers), algorithm={"name": "fedavg", "compression": 1.0})
        with pytest.raises(DataError) as caught:
            simulate(with_workers(config, workers), module=Fragile())
        found.append(str(caught.value))
    assert found[0] == found[1]
    assert re.fullmatch(r"the model fails on these records \(\w+: not these, at .*\.py:\d+\)", found[0])
    assert pool.closed == 1


class Fragile(torch.nn.Module):
    """Fails on records that no trial has: those of more than zeros and ones, in a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and len(x) > 4:
            raise ValueError("not these")
        return self.layer(x.flatten(1))


class Choosy(torch.nn.Module):
    """Has no gradient for some records, taken alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) == 1 and int(16 * x.sum()) % 5 == 1:
            raise ValueError("not this")
        return self.layer(x.flatten(1))


def test_what_an_agent_logs_is_logged_here(tmp_path: Path, played: Play, caplog: pytest.LogCaptureFixture) -> None:
    played()
    found = []
    for workers in (1, 2):
        caplog.clear()
        config = with_workers(small(tmp_path / str(workers), federation={"rounds": 1}), workers)
        torch.manual_seed(0)
        simulate(config, module=Choosy())
        found.append({line for line in caplog.messages if "counted as zero" in line})
    assert found[0] == found[1]
    assert found[0]


def test_another_number_of_workers_goes_on(tmp_path: Path, played: Play) -> None:
    played()
    fedspa.run(small(tmp_path / "whole"))
    with pytest.raises(Stopped):
        simulate(with_workers(small(tmp_path / "stopped"), 2), stop=lambda: True)
    simulate(with_workers(small(tmp_path / "stopped"), 3), resume=tmp_path / "stopped", stop=lambda: False)
    whole, stopped = outcome(tmp_path / "whole"), outcome(tmp_path / "stopped")
    assert (whole["summary"].pop("workers"), stopped["summary"].pop("workers")) == (1, 3)
    assert stopped == whole


def test_the_report_and_the_summary_say_how_many(tmp_path: Path, played: Play) -> None:
    played()
    assert fedspa.run(with_workers(small(tmp_path / "run"), 2)).summary["workers"] == 2
    assert "<td>2</td>" in (tmp_path / "run" / "report.html").read_text("utf-8").partition("workers")[2][:200]


def test_a_machine_that_computes_otherwise_is_refused(
    tmp_path: Path, played: Play, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hired, "of_machine", lambda device: {**_here(device), "instruction set": "another"})
    played()
    with pytest.raises(ConfigError, match=r"^the instruction set of a worker is .* and here it is 'another'"):
        fedspa.run(with_workers(small(tmp_path / "seeded")))
    played()
    fedspa.run(with_workers(small(tmp_path / "secure", privacy={"noise": "secure"})))
    assert sum("may round otherwise" in line for line in caplog.messages) == 1
    monkeypatch.setattr(hired, "of_machine", lambda device: {**_here(device), "fedspa version": "0.0"})
    played()
    with pytest.raises(ConfigError, match=r"^the fedspa version of a worker is"):
        fedspa.run(with_workers(small(tmp_path / "other", privacy={"noise": "secure"})))


_here = hired.of_machine


def test_without_ray_an_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"^run.workers is 3, and workers are Ray's: pip install 'fedspa\[ray\]'"):
        fedspa.run(with_workers(small(tmp_path / "run")))
    assert not (tmp_path / "run").exists()


def test_nothing_imports_ray_before_workers_are_asked_for() -> None:
    code = "import sys, fedspa.cli, fedspa.running; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_on_a_gpu_each_worker_has_one_and_trains_all_that_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = prepare(load(with_workers(small(tmp_path / "run"), 2)))
    on_gpu = job.config.model_copy(update={"run": job.config.run.model_copy(update={"device": "cuda"})})
    asked: list[tuple[Any, ...]] = []
    sizes: list[int | None] = []

    def pool(*how: Any) -> ThreadPool:
        asked.append(how)
        return ThreadPool()

    def crew(pool: ThreadPool, workers: int, made: bytes, at_once: int | None, fits: Any) -> Crew:
        sizes.append(at_once)
        return Crew(pool, workers, made, at_once, fits)

    monkeypatch.setattr(hired, "RayPool", pool)
    monkeypatch.setattr(hired, "Crew", crew)
    for module in (hired, worker):
        monkeypatch.setattr(module, "of_machine", lambda device: {"device": device})
    for each in (job, replace(job, config=on_gpu)):
        with hired.hired(each):
            pass
    assert asked == [(None, 2, 1, 0), (None, 2, 1, 1)]  # address, workers, cores and GPUs of each
    assert sizes == [1, None]


def test_an_address_where_nobody_listens_is_told_at_once(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs the extra ray")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    config = with_workers(small(tmp_path / "run"))
    config["run"]["cluster"] = f"127.0.0.1:{port}"
    with pytest.raises(ConfigError, match=rf"^run.cluster is '127.0.0.1:{port}', and no cluster took .*refused; start"):
        fedspa.run(config)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["run.cluster=auto"], "run.cluster is 'auto' and run.workers is 1, which is this process"),
        (
            ["run.workers=2", "run.device='cuda:1'"],
            "run.device is 'cuda:1'; each of run.workers = 2 has a GPU of its own",
        ),
        (["run.workers=2", "run.cluster='ray://a:1'"], "run.cluster is 'ray://a:1'; it must be 'auto', or host:port"),
        (["run.workers=0"], "run.workers is 0"),
    ],
)
def test_what_does_not_go_together_is_refused(overrides: list[str], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, overrides)
    assert str(caught.value).startswith(line)
