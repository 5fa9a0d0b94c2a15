"""Sums that are recovered over Flower: members that fall silent at any moment, a server that dies or lies, and what a
site refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Message, RecordDict

from fedspa.agent import participate
from fedspa.agent.ledger.ledger import Ledger
from fedspa.errors import ConfigError, FedspaError
from fedspa.secagg import recovery
from fedspa.secagg.recovery import RecoverableSum

from .local_grid import LocalGrid
from .test_cohorts import SUMS, TRUST, clinics, rounds, spent  # noqa: F401 (a fixture)
from .test_resume import Killed, honest
from .test_strategy import theta

RECOVERY = {"privacy.recovery": True}


@pytest.fixture
def recovering(clinics: LocalGrid, tmp_path: Path) -> LocalGrid:  # noqa: F811
    """Four clinics whose policies allow that three of them are added up when the fourth falls silent."""
    for i in range(4):
        with (tmp_path / f"site-{i}/policy.toml").open("a") as policy:
            policy.write("recovery = true\n")
    clinics.run_config |= RECOVERY
    return clinics


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> list[tuple[np.ndarray, dict[str, np.ndarray]]]:
    """What the server reads in each round, beside what each member masked for it."""
    found: list[tuple[np.ndarray, dict[str, np.ndarray]]] = []
    plain: dict[bytes, dict[str, np.ndarray]] = {}
    upload, values = recovery.upload, RecoverableSum.values

    def masking(numbers, session, name, secret, key):
        plain.setdefault(session.binding, {})[name] = numbers
        return upload(numbers, session, name, secret, key)

    def reading(self):
        total = values(self)
        found.append((total, {name: plain[self.session.binding][name] for name in self._survivors}))
        return total

    monkeypatch.setattr(recovery, "upload", masking)
    monkeypatch.setattr(RecoverableSum, "values", reading)
    return found


def step_of(question: Message) -> str:
    """The moment of a question: `upload`, a step of the exchange, or `name`."""
    kind = question.metadata.message_type
    if kind == "train":
        return "upload"
    return str(question.content["recovery"]["step"]) if kind == "query.recover" else "name"


def silent(node: int, *moments: str) -> Callable[..., list[Message]]:
    return lambda number, question, answer: [] if number == node and step_of(question) in moments else [answer()]


@pytest.mark.parametrize(
    ("moments", "members"),
    [((), 4), (("upload",), 3), (("commit",), 4), (("open",), 4)],
)
def test_every_round_gives_the_sum_of_those_who_answered(recovering, train, tmp_path, added, moments, members):
    recovering.fault = silent(102, *moments)
    summary = train(recovering, federation__rounds=1)
    assert len(added) == 1
    total, values = added[0]
    assert len(values) == members
    assert np.array_equal(total, sum(values.values()))
    assert rounds(tmp_path) == [len(values)]
    assert spent(tmp_path) == [1, 0 if "upload" in moments else 1, 1, 1]
    assert summary["dropped"] == ({"silent": 1} if "upload" in moments else {})


def test_too_few_members_void_the_round_and_nothing_is_opened(recovering, train, tmp_path):
    recovering.fault = lambda node, question, answer: (
        [] if node in (101, 102) and step_of(question) == "upload" else [answer()]
    )
    summary = train(recovering, federation__rounds=1)
    assert summary["dropped"] == {"silent": 2, "void-missing": 1}
    assert not [question for question in recovering.sent if step_of(question) in recovery.STEPS]


def test_too_few_who_agree_void_the_round(recovering, train, tmp_path):
    recovering.fault = lambda node, question, answer: (
        [] if node in (101, 102) and step_of(question) == "commit" else [answer()]
    )
    summary = train(recovering, federation__rounds=1)
    assert summary["dropped"] == {"void-agreement": 1}
    assert rounds(tmp_path) == [0]


def test_recovered_or_not_the_model_is_the_same(simulation, train, tmp_path):
    """Masks change no bit of a sum: with the same noise, a run with recovery ends where one without does."""
    simulation.run_config |= SUMS | {"algorithm.batch": 360}
    train(simulation)
    plain = theta(tmp_path / "run")
    train(simulation, run__out=str(tmp_path / "other"), privacy__recovery=True)
    assert torch.equal(theta(tmp_path / "other"), plain)


def test_a_site_whose_policy_does_not_allow_it_stays_away(clinics, train, tmp_path):  # noqa: F811
    clinics.run_config |= RECOVERY
    with pytest.raises(FedspaError, match=r"4 nodes are no members: aggregation"):
        train(clinics)
    assert spent(tmp_path) == [0] * 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"privacy__members": 4}, r"privacy.members 4; it must be from 3 to 3"),
        ({"privacy__members": 2, "privacy__colluders": 0}, r"privacy.members 2; it must be from 3 to 3"),
        ({"privacy__adversary": "local", "privacy__members": "", "privacy__colluders": 0}, "privacy.recovery is True"),
    ],
)
def test_settings_that_cannot_be_recovered(recovering, train, changes, message):
    with pytest.raises((ConfigError, FedspaError), match=message):
        train(recovering, **changes)


class TestExchange:
    """What a site answers after its upload, to a server that asks what it likes."""

    @pytest.fixture
    def asked(self, recovering, train) -> Callable[..., dict[str, Any]]:
        """Ask site-0 a question of the exchange, after a round in which 102 fell silent and nothing was opened yet."""
        recovering.fault = lambda node, question, answer: (
            [] if step_of(question) in recovery.STEPS or (node, step_of(question)) == (102, "upload") else [answer()]
        )
        train(recovering, federation__rounds=1)
        self.grid = recovering
        self.node = next(node for node, site in recovering.nodes.items() if site["agent"] == "site-0")
        self.question = next(m for m in recovering.sent if step_of(m) == "exclude")

        def ask(step: str, survivors: bytes, /, **changes: Any) -> dict[str, Any]:
            record = dict(self.question.content["recovery"]) | {"step": step, "body": survivors} | changes
            message = Message(
                RecordDict({"recovery": ConfigRecord(record)}), dst_node_id=self.node, message_type="query.recover"
            )
            return dict(recovering.answer(message).content["recovery"])

        return ask

    @pytest.mark.parametrize(
        "changes",
        [{"binding": bytes(32)}, {"run": "0" * 32}],
    )
    def test_another_session_is_stale(self, asked, changes):
        assert asked("exclude", bytes([0b1101]), **changes) == {"refusal": "stale"}

    @pytest.mark.parametrize(
        "changes",
        [{"binding": b"short"}, {"run": "x"}, {"step": "close"}, {"body": "text"}, {"number": -1}, {"extra": 1}],
    )
    def test_what_is_no_question(self, asked, changes):
        assert asked("exclude", bytes([0b1101]), **changes) == {"refusal": "terms"}

    @pytest.mark.parametrize("body", [b"", bytes([0b1101, 0]), bytes([0b11101]), bytes([0b1100]), bytes([0b0001])])
    def test_survivors_that_are_refused(self, asked, body):
        assert asked("exclude", body) == {"refusal": "aggregation"}

    def test_a_damaged_session_is_said_to_the_operator_only(self, asked):
        ledger = Path(self.grid.nodes[self.node]["ledger"])
        (kept,) = (ledger.parent / "ledger.sqlite.outbox").glob("*.session")
        kept.write_text("{")
        assert asked("exclude", bytes([0b1101])) == {"refusal": "ledger"}

    def test_one_set_of_survivors(self, asked):
        three, other = bytes([0b1101]), bytes([0b0111])
        first = asked("exclude", three)
        assert len(first["answer"]) == 32
        assert asked("exclude", three) == first
        assert asked("exclude", other) == {"refusal": "aggregation"}
        tags = asked("commit", three)
        assert asked("commit", three) == tags
        assert asked("commit", other) == {"refusal": "aggregation"}
        assert asked("exclude", three) == first

    def test_nothing_is_opened_without_tags(self, asked):
        asked("exclude", bytes([0b1101]))
        assert asked("open", bytes([0b1101]) + bytes(3 * 64)) == {"refusal": "aggregation"}

    def test_after_a_newer_round_it_is_over(self, asked, train):
        self.grid.fault = honest
        train(self.grid, federation__rounds=1, run__out=str(Path(self.grid.run_config["run.out"]).with_name("new")))
        assert "answer" in asked("exclude", bytes([0b1101]))  # another run's rounds are none of this one's
        other = dict(self.question.content["recovery"])
        ledger = Path(self.grid.nodes[self.node]["ledger"])
        sent = participate.Outbox(ledger, "site-0").last(other["run"])
        participate.Outbox(ledger, "site-0").put(other["run"], type(sent)(sent.round + 1, sent.payload))
        assert asked("exclude", bytes([0b1101])) == {"refusal": "stale"}

    def test_an_upload_that_is_not_the_released_one_answers_nothing(self, asked):
        outbox = participate.Outbox(Path(self.grid.nodes[self.node]["ledger"]), "site-0")
        run = dict(self.question.content["recovery"])["run"]
        sent = outbox.last(run)
        outbox.put(run, replace(sent, payload=sent.payload[:-1] + bytes([sent.payload[-1] ^ 1])))
        assert outbox.last(run).place == sent.place
        assert asked("exclude", bytes([0b1101])) == {"refusal": "stale"}

    def test_a_ledger_that_does_not_know_the_upload_answers_nothing(self, asked):
        ledger = Path(self.grid.nodes[self.node]["ledger"])
        for path in ledger.parent.glob("ledger.sqlite*"):
            if path.is_file():
                path.unlink()
        Ledger.open(ledger).close()
        assert asked("exclude", bytes([0b1101])) == {"refusal": "stale"}


def test_a_late_upload_is_dropped_and_never_opened(recovering, train, tmp_path, added):
    """The grid holds a message back until the sum of the others was opened."""
    held: list[Message] = []

    def late(node, question, answer):
        if node == 102 and step_of(question) == "upload":
            held.append(answer())
            return []
        return [answer()]

    recovering.fault = late
    train(recovering, federation__rounds=1)
    assert len(held) == 1
    assert spent(tmp_path) == [1, 1, 1, 1]
    (total, values) = added[0]
    assert "site-1" not in values
    assert np.array_equal(total, sum(values.values()))
    shares = [
        reply.content["recovery"]["answer"]
        for reply in recovering.replies
        if reply.has_content() and "recovery" in reply.content
    ]
    assert max(len(answer) for answer in shares) <= 3 * 32  # of three seeds, and none of the fourth


@pytest.mark.parametrize("returns", [False, True])
@pytest.mark.parametrize("step", recovery.STEPS)
def test_a_server_that_dies_in_the_exchange_pays_nobody_twice(recovering, train, tmp_path, step, returns):
    """Also where the silent member is back when the server is: the others have answered for a set without it."""

    def dying(node, question, answer):
        if step_of(question) == step and node == 103:
            raise Killed
        return [] if (node, step_of(question)) == (102, "upload") else [answer()]

    recovering.fault = dying
    with pytest.raises(Killed):
        train(recovering, federation__rounds=1)
    recovering.fault = honest if returns else silent(102, "upload")
    summary = train(recovering, federation__rounds=1, flower__resume=True)
    assert summary["rounds"] == 1
    assert rounds(tmp_path) == [3]
    assert spent(tmp_path) == [1, int(returns), 1, 1]


def test_both_epsilons_are_those_of_members(recovering, train):
    plain = train(recovering, privacy__recovery=False, run__out=recovering.run_config["run.out"] + "-plain")
    recovered = train(recovering, privacy__recovery=True, run__out=recovering.run_config["run.out"] + "-other")
    for key in ("epsilon", "epsilon_worst_case", "noise_multiplier"):
        assert recovered[key] == plain[key]


def test_one_silent_member_no_longer_voids_rounds(recovering, train, tmp_path):
    recovering.fault = silent(102, "upload")
    summary = train(recovering)
    assert rounds(tmp_path) == [3, 3, 3]  # left out of the second round
    assert not any(key.startswith("void") for key in summary["dropped"])


def test_a_simulation_on_flower_recovers_too(simulation, train, tmp_path):
    simulation.run_config |= SUMS | RECOVERY | {"algorithm.batch": 360}
    simulation.fault = silent(102, "upload")
    assert train(simulation)["rounds"] == 3
    assert rounds(tmp_path)[0] == 3
