"""The agent without a transport: a list of agents pays in one write and trains as one piece of work; a deployed
agent trains for an entry once."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import ALGORITHMS, small
from torch import Tensor

from fedspa.agent.ledger.ledger import Ledger
from fedspa.agent.participate import Refusal, Request, check_terms, participate_once, pay, release
from fedspa.agent.policy import Policy, PolicyRefusal
from fedspa.algorithms import Agent
from fedspa.errors import PayloadError
from fedspa.runs.config import load
from fedspa.runs.local import simulate_uploads
from fedspa.runs.setup import Simulated, prepare
from fedspa.server.coordinator import Coordinator

POLICY = Policy(1000.0, 1e-3, "add-remove", 0.01, 1000, 1000, 1.0, ("l2", "coordinate"))


class Site:
    """Agents of a small job, with a ledger; `trained` lists who was handed to the engine at once."""

    def __init__(self, folder: Path, **sections: Any) -> None:
        self.job: Simulated = prepare(load(small(folder / "run", **sections)))
        self.server = Coordinator(self.job.server)
        self.path = folder / "ledger.sqlite"
        folder.mkdir(exist_ok=True)
        Ledger.open(self.path).close()
        self.trained: list[list[int]] = []

    def respond(self, theta: Tensor, terms: Any, agents: Sequence[Agent], engine: Any) -> Iterator[Any]:
        self.trained.append([agent.number for agent in agents])
        return self.job.server.algorithm.respond(theta, terms, agents, engine)

    def request(self, **changes: Any) -> Request:
        algorithm = replace(self.job.server.algorithm, respond=self.respond)
        theta, coding = self.server.state.theta, self.job.server.coding
        made = Request("run", algorithm, self.server.terms(), theta, coding, "secure")
        return replace(made, **changes)

    def agent(self, number: int) -> Agent:
        held = torch.from_numpy(self.job.holdings[number])
        x, y = self.job.data.train_x[held], self.job.data.train_y[held]
        return Agent(number, x, y, self.server.mask_seed(self.server.terms(), number), bytes([number]) * 32)

    def once(self, request: Request) -> bytes:
        return participate_once(request, "clinic", self.agent(0), self.job.engine, self.path, POLICY)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_a_list_pays_in_one_write_and_trains_as_one_piece(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[str] = []
    write = Ledger.transaction
    monkeypatch.setattr(Ledger, "transaction", lambda self: writes.append("write") or write(self))
    agents = {name: site.agent(number) for number, name in enumerate(("a", "b", "c"))}
    with Ledger.open(site.path) as ledger:
        request = site.request()
        pay(request, agents, ledger, POLICY.cap)
        payloads = simulate_uploads(request, agents, site.job.engine)
        release(request, payloads, ledger)
        entries = [ledger.find(name, "run", "round-0") for name in agents]
    assert site.trained == [[0, 1, 2]]
    assert writes == ["write", "write"]  # all entries, then all marks
    assert all(entry is not None and entry.digest and entry.event.noise == "secure" for entry in entries)
    intake = site.server.intake(site.server.terms(), 3)
    for name, agent in agents.items():
        intake.take(payloads[name], seed=agent.mask_seed)
    assert intake.count == 3


def test_an_update_that_is_not_finite_ends_a_simulation_and_no_deployment(site: Site) -> None:
    request = site.request()

    def broken(*arguments: Any) -> Iterator[Any]:
        for update in site.respond(*arguments):
            update.values[0] = float("nan")
            yield update

    request = replace(request, algorithm=replace(request.algorithm, respond=broken))
    with pytest.raises(PayloadError):
        simulate_uploads(request, {"a": site.agent(0)}, site.job.engine)
    assert site.once(request).startswith(b"FSPA")


def test_seeded_noise_and_no_plan_are_refused_before_a_record_is_looked_at(site: Site, tmp_path: Path) -> None:
    with pytest.raises(Refusal) as caught:
        check_terms(site.request(noise="seeded"), POLICY, simulated=False)
    assert caught.value.code == "noise"
    with pytest.raises(PolicyRefusal):
        check_terms(Site(tmp_path / "other", **ALGORITHMS["fedavg"]).request(noise=None), POLICY, simulated=False)
    check_terms(site.request(noise="seeded"), None, simulated=True)


@pytest.mark.parametrize("check", ["Ledger.find", "Policy.admit"])
def test_what_was_checked_still_holds_when_it_is_paid(check: str, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another tool, which takes no lock on the outbox, cannot spend between a check and the payment."""
    kind, name = {"Ledger": Ledger, "Policy": Policy}[check.partition(".")[0]], check.partition(".")[2]
    checked, locked = getattr(kind, name), []

    def watched(*arguments: Any) -> Any:
        found = checked(*arguments)
        with closing(sqlite3.connect(site.path, timeout=0, isolation_level=None)) as other:
            try:
                other.execute("BEGIN IMMEDIATE")
                locked.append(False)
            except sqlite3.OperationalError:
                locked.append(True)
        return found

    monkeypatch.setattr(kind, name, watched)
    site.once(site.request())
    assert locked
    assert all(locked)


def test_what_was_paid_for_and_failed_is_spent(site: Site) -> None:
    failing = site.request()

    def fail(*_: Any) -> Iterator[Any]:
        raise MemoryError

    for request in (replace(failing, algorithm=replace(failing.algorithm, respond=fail)), failing):
        with pytest.raises(Refusal) as caught:
            site.once(request)
        assert caught.value.code == "spent"
    assert site.trained == []
