"""Simulated sums: what the server reads is what the agents' numbers add up to, with pads and without."""

from __future__ import annotations

import logging
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_sums
from interruptions import crash
from numpy.typing import NDArray
from small_runs import ledger_content, outcome, small

import fedspa
from fedspa.agent import participate
from fedspa.algorithms import Agent
from fedspa.algorithms.base import Answer
from fedspa.errors import PrivacyError
from fedspa.running import run as simulate
from fedspa.runs import local
from fedspa.runs import run_ledger as books
from fedspa.runs.config import load
from fedspa.runs.setup import prepare
from fedspa.secagg.keys import SecretKey
from fedspa.secagg.masking import MaskedSum
from fedspa.secagg.session import Session
from fedspa.server.coordinator import Coordinator

Key = tuple[str, int, int]  # run, round, attempt
# Every record has a part in a sum: by the fastest engine.
SUMS: dict[str, dict[str, dict[str, Any]]] = {
    name: {**sections, "run": {"engine": "auto"}} for name, sections in small_sums.SUMS.items()
}


class Wire:
    """Everything that is sent and everything that is read of it, by run, round and attempt. A pair's keystream would
    follow from the session's binding: under one of them, a member has one message."""

    def __init__(self) -> None:
        self.values: dict[Key, dict[str, NDArray[np.int64]]] = defaultdict(dict)
        self.messages: dict[tuple[bytes, str], set[bytes]] = defaultdict(set)
        self.sums: dict[Key, NDArray[np.int64]] = {}

    def require_no_pad_twice(self) -> None:
        assert self.messages
        assert all(len(made) == 1 for made in self.messages.values())


def key_of(session: Session) -> Key:
    return session.run, session.round, session.attempt


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    found, unmasked, values = Wire(), local._encode_unmasked, MaskedSum.values

    def sent(request: participate.Request, name: str, agent: Agent, answer: Answer) -> bytes:
        payload, session = unmasked(request, name, agent, answer), request.session
        found.values[key_of(session)][name] = answer.values
        found.messages[session.binding, name].add(payload)
        return payload

    def reading(self: MaskedSum) -> NDArray[np.int64]:
        total = values(self)
        found.sums[key_of(self.session)] = total
        return total

    monkeypatch.setattr(local, "_encode_unmasked", sent)
    monkeypatch.setattr(MaskedSum, "values", reading)
    return found


@pytest.fixture
def one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages are bound to the run's drawn name: runs that are compared to the bit have the same one."""
    monkeypatch.setattr(books, "draw_run_name", lambda folder: "run")


@pytest.mark.parametrize("name", SUMS)
def test_the_server_reads_what_the_numbers_add_up_to(tmp_path: Path, wire: Wire, name: str) -> None:
    fedspa.run(small(tmp_path / "run", **SUMS[name]))
    assert len(wire.sums) == 4
    for key, total in wire.sums.items():
        assert len(wire.values[key]) in (3, 6)
        assert np.array_equal(total, sum(wire.values[key].values()))
    wire.require_no_pad_twice()


@pytest.mark.parametrize("name", SUMS)
def test_with_pads_it_is_the_same_run(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, one_name: None
) -> None:
    """Masked as deployed agents mask, message by message as long as without, the run ends in the same bits."""
    fedspa.run(small(tmp_path / "unpadded", **SUMS[name]))
    padded, unmasked, agents = [], local._encode_unmasked, local.LocalTransport.agents

    def keyed(self: local.LocalTransport, *request: Any) -> dict[str, Agent]:
        found = agents(self, *request)
        return {name: replace(agent, secret=self._secret(agent.number)) for name, agent in found.items()}

    def masked(*sent: Any) -> bytes:
        payload, other = participate.encode_answer(*sent), unmasked(*sent)
        assert len(payload) == len(other)
        padded.append(payload != other)
        return payload

    monkeypatch.setattr(local.LocalTransport, "agents", keyed)
    monkeypatch.setattr(local, "_encode_unmasked", masked)
    fedspa.run(small(tmp_path / "padded", **SUMS[name]))
    assert len(padded) >= 12
    assert all(padded)
    for what in ("model", "metrics", "summary"):  # a ledger has the digests of messages
        assert outcome(tmp_path / "unpadded")[what] == outcome(tmp_path / "padded")[what]


def test_nothing_leaves_unmasked_and_nothing_masked_is_read_alone(tmp_path: Path) -> None:
    job = prepare(load(small(tmp_path / "run", **SUMS["fedspa"])))
    server = Coordinator(job.server)
    with pytest.raises(PrivacyError, match="of sums"):
        server.intake(server.terms(), 3)
    members = {f"agent-{n}": SecretKey(bytes([n + 1]) * 32).public for n in range(3)}
    with pytest.raises(PrivacyError, match="holds from 3 on"):
        server.session("run", 1, dict(list(members.items())[:2]), server.terms(), "secure")
    made = participate.Request(
        "run", job.server.algorithm, server.terms(), server.state.theta, job.server.coding, "secure"
    )
    agents = local.LocalTransport(job).agents(made, {0: bytes(16)})
    with pytest.raises(PrivacyError, match="masked"):
        participate.payloads(made, agents, job.engine)
    session = server.session("run", 1, members, server.terms(), "secure")
    with pytest.raises(PrivacyError, match="no key"):
        participate.payloads(replace(made, session=session), agents, job.engine)


def test_a_session_is_bound_to_all_that_its_members_were_told(tmp_path: Path) -> None:
    job = prepare(load(small(tmp_path / "run", **SUMS["fedspa"])))
    server = Coordinator(job.server)
    terms, members = server.terms(), {f"agent-{n}": SecretKey(bytes([n + 1]) * 32).public for n in range(4)}
    fewer = dict(list(members.items())[:3])
    plan = terms.plan
    assert plan is not None
    others = [
        server.session("run", 1, members, terms, "secure"),
        server.session("other", 1, members, terms, "secure"),
        server.session("run", 2, members, terms, "secure"),
        server.session("run", 1, fewer, terms, "secure"),
        server.session("run", 1, {**fewer, "agent-3": SecretKey(bytes([9]) * 32).public}, terms, "secure"),
        server.session("run", 1, members, terms, "exact"),
        server.session("run", 1, members, replace(terms, round=1), "secure"),
        server.session("run", 1, members, replace(terms, local_lr=terms.local_lr * (1 + 2**-52)), "secure"),
        server.session("run", 1, members, replace(terms, mask_seed=bytes(16)), "secure"),
        server.session("run", 1, members, replace(terms, steps=plan.with_clip_value(0.31)), "secure"),
    ]
    server.state.theta[7] += 2**-20
    others.append(server.session("run", 1, members, terms, "secure"))
    assert len({session.binding for session in others}) == len(others)


@pytest.mark.parametrize(("name", "noise"), [("fedspa", "exact"), ("cpsgd", "secure")])
def test_with_noise_that_must_not_repeat_an_interrupted_sum_is_a_new_attempt(
    tmp_path: Path, name: str, noise: str, monkeypatch: pytest.MonkeyPatch, wire: Wire
) -> None:
    """Everyone pays twice; a turn that is used up so is missed at the end, where too few are left for a sum."""
    sections = {**SUMS[name], "privacy": {**SUMS[name]["privacy"], "noise": noise}}
    folder = crash(small(tmp_path / "run", **sections), 1, monkeypatch)
    result = simulate(resume=folder)
    wire.require_no_pad_twice()
    assert {key[1:] for key in wire.values} >= {(0, 1), (1, 1), (1, 2)}
    (run,) = {key[0] for key in wire.values}
    first, second = wire.values[run, 1, 1], wire.values[run, 1, 2]
    assert all(not np.array_equal(first[member], second[member]) for member in first)  # each with noise of its own
    attempts = [entry["message"] for entry in ledger_content(folder / "ledger.sqlite")]
    assert attempts.count("round-1") == attempts.count("round-1-attempt-2") > 0
    if name == "cpsgd":  # everybody's four turns are over after the third round
        assert [metrics.agents for metrics in result.metrics] == [6, 6, 6, 0]
        assert any(warning.startswith("6 participations were skipped") for warning in result.summary["warnings"])


def test_too_few_for_a_sum_are_not_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(books.RunLedger, "turns", lambda self, t, cohort: (1, cohort[: 2 if t == 1 else 6]))
    with caplog.at_level(logging.WARNING):
        result = fedspa.run(small(tmp_path / "run", **SUMS["cpsgd"]))
    assert [metrics.agents for metrics in result.metrics] == [6, 0, 6, 6]
    assert "no sum: 2 agents are left, and 3 are needed" in caplog.text
    assert len(ledger_content(tmp_path / "run/ledger.sqlite")) == 18
