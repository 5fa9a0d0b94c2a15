"""An agent's participation: what it pays, what it refuses, what it sends again."""

from __future__ import annotations

import logging
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from fedspa.agent.ledger.ledger import Ledger
from fedspa.agent.participate import Outbox, Refusal, Sent
from fedspa.algorithms import ALGORITHMS
from fedspa.algorithms.algorithm import FED_SPA
from fedspa.algorithms.cpsgd.plan import BinomialPlan
from fedspa.data.features import transform
from fedspa.errors import ConfigError, DataError, LedgerError, PayloadError, PrivacyError
from fedspa.flower import check, site
from fedspa.flower.client_app import answer_round, app
from fedspa.flower.site import Site, read_site
from fedspa.flower.terms import to_record
from fedspa.mechanisms.base import NoPlan
from fedspa.privacy import accounting
from fedspa.randomness import streams
from fedspa.runs import checkpoint

from .local_grid import POLICY, SIMULATION
from .test_terms import GIVEN, PLAN, TERMS

ASKED = replace(GIVEN, terms=replace(TERMS, round=0))
FREE = NoPlan(650, 130, "poisson", 20, 4)
THETA = torch.zeros(650)


@pytest.fixture
def node(tmp_path: Path) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "records.npz", x=rng.normal(size=(200, 1, 8, 8)), y=rng.integers(0, 10, 200))
    (tmp_path / "policy.toml").write_text(POLICY.format(epsilon=8.0))
    Ledger.open(tmp_path / "ledger.sqlite").close()
    names = {key: str(tmp_path / file) for key, file in (("data", "records.npz"), ("policy", "policy.toml"))}
    return {"agent": "clinic", "classes": 10, "ledger": str(tmp_path / "ledger.sqlite"), **names}


@pytest.fixture
def clinic(node: dict[str, Any]) -> Site:
    return read_site(node, {})


def spent(clinic: Site) -> int:
    assert clinic.ledger is not None
    with Ledger.open(clinic.ledger, create=False) as ledger:
        return sum(ledger.spent("clinic").values())


def at_round(t: int):
    return replace(ASKED, terms=replace(TERMS, round=t))


def refusal(clinic: Site, announcement=ASKED, theta=THETA) -> str:
    with pytest.raises(Refusal) as caught:
        answer_round(clinic, announcement, theta)
    return caught.value.code


def test_a_round_is_paid_for_once(clinic):
    payload = answer_round(clinic, ASKED, THETA)
    assert payload.startswith(b"FSPA")
    with Ledger.open(clinic.ledger, create=False) as ledger:
        entry = ledger.find("clinic", ASKED.run, "round-0")
        assert entry.event == replace(PLAN.event, noise="secure")
        assert entry.digest is not None


def _not_again(*_: object) -> Any:
    pytest.fail("it trained again")


def test_asked_again_the_same_bytes_leave_and_nothing_is_paid(clinic, monkeypatch):
    """What a server that was restored from its checkpoint does."""
    first = answer_round(clinic, ASKED, THETA)
    monkeypatch.setitem(ALGORITHMS, "fedspa", replace(FED_SPA, respond=_not_again))
    assert answer_round(clinic, ASKED, THETA + 1) == first
    assert spent(clinic) == 1


PERSONS = replace(ASKED, terms=replace(ASKED.terms, steps=replace(PLAN, unit="person")))


def test_a_run_that_protects_persons_finds_none_at_a_site_of_records(clinic):
    """It would train on records and state ε for persons."""
    assert refusal(clinic, PERSONS) == "terms"
    assert spent(clinic) == 0


@pytest.fixture
def ward(node: dict[str, Any], tmp_path: Path) -> Site:
    """A site of 150 patients: the first has fifty records, and one more without an id."""
    rng = np.random.default_rng(0)
    ids = np.array([*["p0"] * 50, "", *(f"p{n}" for n in range(1, 150))])
    x, y = rng.normal(size=(200, 1, 8, 8)), rng.integers(0, 10, 200)
    np.savez(tmp_path / "records.npz", x=x, y=y, patient=ids)
    return read_site({**node, "person": "patient", "person-records": 4}, {})


def test_a_site_protects_its_persons(ward):
    assert ward.unit == "person"
    assert refusal(ward) == "terms"  # a run of records, whose ε is no person's
    people = ward.held(0).examples
    assert (people.x["count"] == 4).sum() == 1
    assert len(people.x["count"]) == 150
    assert answer_round(ward, PERSONS, THETA).startswith(b"FSPA")
    with Ledger.open(ward.ledger, create=False) as ledger:
        assert {event.unit for event in ledger.spent("clinic")} == {"person"}


def test_asked_again_with_what_was_sent_gone(clinic, tmp_path):
    answer_round(clinic, ASKED, THETA)
    for file in (tmp_path / "ledger.sqlite.outbox").iterdir():
        file.unlink()
    assert refusal(clinic) == "spent"
    assert spent(clinic) == 1


def test_a_ledger_that_went_missing_is_no_fresh_budget(clinic):
    clinic.ledger.unlink()
    assert refusal(clinic) == "ledger"
    assert not clinic.ledger.exists()


class Killed(KeyboardInterrupt):
    """Nothing of the agent's runs any more: what its own handlers let through."""


STEPS = {"put": (Outbox, "put"), "release": (Ledger, "release_many")}


def broken(patch: pytest.MonkeyPatch, where: str, error: BaseException, *, after: bool = False) -> None:
    """Have that step of a participation raise, before it does its work or after."""

    def fail(*arguments: Any, **named: Any) -> None:
        if after:
            honest(*arguments, **named)
        raise error

    if where == "respond":
        honest = FED_SPA.respond
        patch.setitem(ALGORITHMS, "fedspa", replace(FED_SPA, respond=fail))
    else:
        honest = getattr(*STEPS[where])
        patch.setattr(*STEPS[where], fail)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("where", ["respond", "put", "release"])
def test_killed_anywhere_it_has_paid_and_trains_never_again(clinic, monkeypatch, where, after):
    """While training, before the outbox or before the release: it sits the round out. After the release: same bytes."""
    with monkeypatch.context() as patch:
        broken(patch, where, Killed(), after=after)
        with pytest.raises(Killed):
            answer_round(clinic, ASKED, THETA)
    monkeypatch.setitem(ALGORITHMS, "fedspa", replace(FED_SPA, respond=_not_again))
    if (where, after) == ("release", True):
        assert answer_round(clinic, ASKED, THETA) == answer_round(clinic, ASKED, THETA + 1)
    else:
        assert [refusal(clinic) for _ in range(3)] == ["spent"] * 3
    assert spent(clinic) == 1


ERRORS = [PayloadError("bound", "…"), PrivacyError("…"), DataError("…"), LedgerError("…"), MemoryError(), SystemExit(3)]


@pytest.mark.parametrize("error", [*ERRORS, Refusal("internal", "…")], ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("where", ["respond", "put", "release"])
def test_whatever_fails_after_the_spend_is_one_answer_for_ever(clinic, monkeypatch, where, error):
    with monkeypatch.context() as patch:
        broken(patch, where, error)
        assert refusal(clinic) == "spent"
    monkeypatch.setitem(ALGORITHMS, "fedspa", replace(FED_SPA, respond=_not_again))
    assert [refusal(clinic) for _ in range(3)] == ["spent"] * 3
    assert spent(clinic) == 1
    monkeypatch.undo()
    assert answer_round(clinic, at_round(1), THETA).startswith(b"FSPA")  # the next round is another entry
    assert refusal(clinic) == "stale"


def test_two_at_once_train_once_and_answer_alike(clinic, monkeypatch):
    """Two messages for one round in two threads, each with a ledger of its own, as two processes have."""
    trainings: list[int] = []

    def slow(*arguments: Any) -> Any:
        trainings.append(1)
        time.sleep(0.3)
        return FED_SPA.respond(*arguments)

    monkeypatch.setitem(ALGORITHMS, "fedspa", replace(FED_SPA, respond=slow))
    with ThreadPoolExecutor(4) as pool:
        answers = set(pool.map(lambda _: answer_round(clinic, ASKED, THETA), range(4)))
    assert (len(answers), len(trainings), spent(clinic)) == (1, 1, 1)


def test_where_nothing_can_be_locked_one_trains_all_the_same(clinic, monkeypatch):
    """The reservation decides; who is too late has no answer, and does not touch the other's."""

    def meanwhile(*arguments: Any) -> Any:
        assert refusal(clinic) == "spent"
        return FED_SPA.respond(*arguments)

    monkeypatch.setattr(Outbox, "locked", lambda self: nullcontext(self._folder.mkdir(exist_ok=True)))
    monkeypatch.setitem(ALGORITHMS, "fedspa", replace(FED_SPA, respond=meanwhile))
    assert answer_round(clinic, ASKED, THETA) == answer_round(clinic, ASKED, THETA)
    assert spent(clinic) == 1


def test_nothing_is_spent_on_a_refusal(clinic):
    lax = replace(ASKED, terms=replace(TERMS, round=0, steps=replace(PLAN, noise_multiplier=0.5)))
    assert refusal(clinic, lax) == "noise-too-small"
    assert refusal(clinic, replace(ASKED, noise="seeded")) == "noise"
    assert (
        refusal(clinic, replace(ASKED, algorithm="fedavg", noise=None, terms=replace(TERMS, steps=FREE)))
        == "not-private"
    )
    assert refusal(clinic, replace(ASKED, classes=5)) == "terms"
    assert refusal(clinic, replace(ASKED, model="mlp")) == "terms"  # not 650 parameters
    assert refusal(clinic, theta=torch.zeros(651)) == "terms"
    fixed = replace(PLAN, sampling="fixed", neighbours="replace-one", records=201)
    few = replace(ASKED, terms=replace(TERMS, round=0, steps=fixed))
    assert refusal(replace(clinic, policy=replace(clinic.policy, neighbours="replace-one")), few) == "data"
    assert spent(clinic) == 0


def with_labels(node: dict[str, Any], y: np.ndarray) -> Site:
    np.savez(node["data"], x=np.zeros((len(y), 1, 8, 8)), y=y)
    site._own_records.cache_clear()
    return read_site(node, {})


@pytest.mark.parametrize("classes", [2, 4, 9, 10, 11, 1000])
def test_no_number_of_classes_makes_a_refusal_tell_of_a_label(node, classes):
    """A server that moves its number of classes gets the same answer, whatever the largest label is."""
    asked = replace(ASKED, classes=classes, model="mlp")  # not its 650 parameters: refused in any case
    labels = np.arange(200) % 3
    codes = {refusal(with_labels(node, np.append(labels, last)), asked) for last in (0, 5, 9)}
    assert codes == {"terms"}


def test_a_label_beyond_the_sites_own_number_costs_its_record_alone(node, caplog):
    """The server's number of classes must be the site's; what the labels are shows nowhere."""
    beyond = with_labels(node, np.append(np.arange(200) % 3, 10))
    assert answer_round(beyond, ASKED, THETA).startswith(b"FSPA")
    assert "1 of 201 records are bad" in caplog.text
    assert refusal(beyond, replace(ASKED, classes=11)) == "terms"
    x, y = beyond.held(0).examples
    assert x[200].isnan().all()
    assert (len(y), int(y[200])) == (201, torch.iinfo(torch.int64).min)


def test_a_delta_that_promises_nothing_serves_nobody(clinic):
    """The policy's own δ against the site's own records: the server's smaller δ does not change the answer."""
    lax = replace(clinic, policy=replace(clinic.policy, delta=6e-3))  # 1/200 is less
    for delta in (6e-3, 4e-3, 1e-5):
        assert refusal(lax, replace(ASKED, terms=replace(TERMS, steps=replace(PLAN, delta=delta)))) == "data"
    with pytest.raises(DataError, match="below 1/200"):
        lax.held(0)
    assert spent(clinic) == 0


def test_a_simulated_agent_with_a_policy_serves_nothing_that_is_not_private(node):
    plain = replace(ASKED, algorithm="fedavg", coding="f32", noise=None, terms=replace(ASKED.terms, steps=FREE))
    theirs = SIMULATION | {"algorithm.name": "fedavg", "algorithm.compression": 1.0}
    guarded = read_site({"simulation": True, "policy": node["policy"]}, theirs)
    assert refusal(guarded, plain) == "not-private"


def test_the_policy_speaks_before_any_record_is_looked_at(clinic, tmp_path):
    (tmp_path / "records.npz").unlink()
    lax = replace(ASKED, terms=replace(TERMS, round=0, steps=replace(PLAN, noise_multiplier=0.5)))
    assert refusal(clinic, lax) == "noise-too-small"
    assert refusal(clinic, ASKED) == "data"


def test_the_servers_own_model_is_not_run(clinic):
    assert refusal(clinic, replace(ASKED, model="os:getcwd")) == "terms"
    assert spent(clinic) == 0


def test_the_budget_is_the_agents(clinic, tmp_path):
    (tmp_path / "policy.toml").write_text(POLICY.format(epsilon=0.2))
    poor = read_site(clinic.node, {})
    assert refusal(poor) == "budget"
    assert spent(poor) == 0


def test_a_plan_of_exactly_the_budget_is_served_whole_and_no_other(clinic, tmp_path):
    """It was announced before anything was released. What the server thinks of later is held against what is left."""
    exact = accounting.epsilon({PLAN.event: 3}, 1e-3, neighbours="add-remove")
    (tmp_path / "policy.toml").write_text(POLICY.format(epsilon=exact))
    site = read_site(clinic.node, {})
    answer_round(site, at_round(0), THETA)
    noisier = replace(TERMS, round=1, steps=replace(PLAN, noise_multiplier=2 * PLAN.noise_multiplier))
    assert refusal(site, replace(ASKED, terms=noisier)) == "budget"
    longer = replace(TERMS, round=1, steps=replace(PLAN, participations=4))
    assert refusal(site, replace(ASKED, terms=longer)) == "budget"
    for t in (1, 2):
        answer_round(site, at_round(t), THETA)
    assert refusal(site, replace(at_round(0), run="another")) == "budget"
    assert spent(site) == 3
    with Ledger.open(site.ledger, create=False) as ledger:
        assert ledger.total("clinic", 1e-3, "add-remove") == (exact, "pld (one plan)")


def test_a_server_gets_no_more_rounds_than_its_plan_said(clinic):
    for t in range(3):
        answer_round(clinic, at_round(t), THETA)
    assert refusal(clinic, at_round(3)) == "too-many-rounds"
    assert spent(clinic) == 3


def answer(node: dict[str, Any], message: Message) -> dict[str, object]:
    context = Context(run_id=1, node_id=7, node_config=dict(node), state=RecordDict(), run_config={})
    reply = app(message, context)
    return dict(reply.content["update"])


def message(ttl: float = 60.0, **parts: object) -> Message:
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
    content = {"theta": ArrayRecord({"theta": Array(THETA.numpy())}), "terms": to_record(ASKED), **parts}
    return Message(RecordDict({k: v for k, v in content.items() if v is not None}), 7, "train", ttl=ttl)


HOSTILE = {
    "no θ": {"theta": None},
    "no terms": {"terms": None},
    "more": {"more": ConfigRecord({"a": 1})},
    "terms of another kind": {"terms": ArrayRecord({"theta": Array(THETA.numpy())})},
    "θ of another kind": {"theta": ConfigRecord({"theta": b"0"})},
    "θ by another name": {"theta": ArrayRecord({"weights": Array(THETA.numpy())})},
    "θ in float64": {"theta": ArrayRecord({"theta": Array(np.zeros(650))})},
    "θ in another shape": {"theta": ArrayRecord({"theta": Array(np.zeros((650, 1), np.float32))})},
    "θ not finite": {"theta": ArrayRecord({"theta": Array(np.full(650, np.nan, np.float32))})},
    "θ too long": {"theta": ArrayRecord({"theta": Array(np.zeros(10**6, np.float32))})},
    "θ no numpy": {"theta": ArrayRecord({"theta": Array("float32", (650,), "numpy.ndarray", b"\x80\x04garbage")})},
    "θ a pickle": {"theta": ArrayRecord({"theta": Array("float32", (650,), "pickle", b"\x80\x04.")})},
}


@pytest.mark.parametrize("parts", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_message_gets_a_code(node, parts):
    assert answer(node, message(**parts)) == {"refusal": "terms"}


def test_an_expired_message_is_stale(node):
    late = message(ttl=60.0)
    late.metadata.__dict__["_created_at"] = time.time() - 61
    with pytest.MonkeyPatch.context() as patch:
        # Flower itself refuses to build a reply to a message that old; the agent must have stopped before.
        patch.setattr("flwr.app.message.message._limit_reply_ttl", lambda *_: 1.0)
        assert answer(node, late) == {"refusal": "stale"}
    assert spent(read_site(node, {})) == 0


@pytest.mark.parametrize("key", ["agent", "data", "classes", "policy", "ledger"])
def test_a_node_config_without_a_key_serves_nobody(node, key):
    del node[key]
    with pytest.raises(ConfigError, match=key):
        read_site(node, {})
    assert answer(node, message()) == {"refusal": "internal"}


def test_an_agent_inside_a_simulation_engine_is_still_an_agent(node, monkeypatch):
    monkeypatch.setattr(site, "in_simulation_engine", lambda: True)
    assert not read_site(node, {}).simulated
    assert refusal(read_site(node, {}), replace(ASKED, noise="seeded")) == "noise"
    for key in node:
        with pytest.raises(ConfigError, match="missing"):
            read_site({key: node[key]}, {})
    theirs = SIMULATION
    assert read_site({"partition-id": 0, "num-partitions": 4}, theirs).simulated
    assert read_site({"simulation": True, "policy": node["policy"]}, theirs).simulated


@pytest.mark.parametrize("error", ["SystemExit('row 17')", "ValueError('row 17')", "GeneratorExit('row 17')"])
def test_a_data_function_that_exits_tells_the_server_nothing(node, tmp_path, monkeypatch, error):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "exiting_records.py").write_text(f"def mine(): raise {error}\n")
    assert answer(node | {"data": "exiting_records:mine"}, message()) == {"refusal": "data"}


def test_nothing_but_ctrl_c_gets_out_of_the_app(node, monkeypatch):
    def leave(*_: object) -> None:
        raise SystemExit("row 17")

    monkeypatch.setattr("fedspa.flower.client_app.answer_round", leave)
    assert answer(node, message()) == {"refusal": "internal"}


def test_outbox_keeps_the_last_of_each_run_and_agent(tmp_path):
    outbox = Outbox(tmp_path / "ledger.sqlite", "clinic")
    assert outbox.last("a") is None
    with outbox.locked():
        outbox.put("a", Sent(0, b"zero"))
        outbox.put("a", Sent(1, b"one"))
        outbox.put("b", Sent(5, b"five"))
    assert (outbox.last("a"), outbox.last("b")) == (Sent(1, b"one"), Sent(5, b"five"))
    outbox.put("b", Sent(5, b"again", 2))
    assert outbox.last("b") == Sent(5, b"again", 2)
    assert Sent(5, b"", 2).place > Sent(5, b"").place > Sent(4, b"", 9).place
    assert Outbox(tmp_path / "ledger.sqlite", "other").last("a") is None
    (torn,) = (tmp_path / "ledger.sqlite.outbox").glob("*-a.payload")
    torn.write_bytes(b"torn")
    assert outbox.last("a") is None


def test_agents_that_share_a_ledger_send_updates_of_their_own(clinic):
    """One is killed while it trains; it must not send what the other one made."""
    other = replace(clinic, agent="second clinic")
    answer_round(clinic, ASKED, THETA)
    with Ledger.open(clinic.ledger, create=False) as ledger:
        ledger.reserve("second clinic", PLAN.event, ASKED.run, "round-0")
    assert refusal(other) == "spent"
    assert answer_round(other, at_round(1), THETA) != answer_round(clinic, at_round(1), THETA)


def test_another_name_is_no_fresh_budget(clinic):
    """An operator who renames the site in its node-config: what was spent is still spent."""
    renamed = read_site({**clinic.node, "agent": "Clinic"}, {})
    answer_round(clinic, ASKED, THETA)
    assert refusal(renamed, at_round(1)) == "ledger"
    assert spent(clinic) == 1
    with pytest.raises(LedgerError, match="entries of 'clinic' and none of 'Clinic': another name would be a fresh"):
        check.check_node(renamed.node)


def test_a_site_makes_the_runs_features_from_its_own_records(clinic):
    plain, _ = clinic.held(0).examples
    mapped, _ = read_site({**clinic.node, "features": "orientations"}, {}).held(0).examples
    assert torch.equal(mapped, transform("orientations", plain, per_example=True))
    with pytest.raises(ConfigError, match="features is 'pixels'; it must be 'aligned'"):
        read_site({**clinic.node, "features": "pixels"}, {})


def test_other_features_than_the_runs_are_refused_before_anything_is_paid(clinic):
    """`aligned` records have the shape of plain ones: nothing else would tell them apart."""
    assert refusal(clinic, replace(ASKED, features="aligned")) == "terms"
    assert refusal(read_site({**clinic.node, "features": "aligned"}, {}), ASKED) == "terms"
    assert spent(clinic) == 0


@pytest.mark.parametrize("dimension", [651, 2**31 - 1])
def test_terms_of_another_dimension_are_not_priced(clinic, monkeypatch, dimension):
    """cpSGD's ε takes long, and memory, at a d that the server made up."""
    plan = BinomialPlan(dimension, 0.1, 1, 5000, "local", 4, 10, 200, 3, 1e-3)
    limits = replace(clinic.policy, neighbours="replace-one", clippings=("coordinate",), min_noise_multiplier=0.01)
    asked = replace(ASKED, algorithm="cpsgd", terms=replace(TERMS, round=0, steps=plan))
    monkeypatch.setattr(accounting, "epsilon", lambda *_, **__: pytest.fail("it was priced"))
    assert refusal(replace(clinic, policy=replace(limits, max_compression=1.0)), asked) == "terms"
    assert spent(clinic) == 0


@pytest.mark.parametrize("noise", ["secure", "exact"])
def test_a_model_that_keeps_state_is_refused_before_anything_is_paid(node, noise, tmp_path, monkeypatch):
    (tmp_path / "carrying.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "class Carry(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer = nn.Linear(64, 10)\n"
        "        self.register_buffer('seen', torch.zeros(64))\n"
        "    def forward(self, x):\n"
        "        with torch.no_grad():\n"
        "            self.seen.mul_(0.5).add_(x.flatten(1).mean(0))\n"
        "        return self.layer(x.flatten(1) - self.seen)\n"
        "def build(shape, classes):\n"
        "    return Carry()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    clinic = read_site({**node, "model": "carrying:build"}, {})
    assert refusal(clinic, replace(ASKED, noise=noise)) == "terms"
    assert spent(clinic) == 0


ANNOUNCED: dict[str, Any] = dict(to_record(GIVEN))
FORGED = "x\nINFO :      answered\n\x1b[2K\u2028"
EMPTY = ArrayRecord({"theta": Array("float32", (1,), "numpy.ndarray", b"")})
QUOTED = {
    "a key": {"terms": ConfigRecord({**ANNOUNCED, FORGED: 1}), "theta": EMPTY},
    "a name": {"terms": ConfigRecord(ANNOUNCED), FORGED: EMPTY},
    "a version": {"terms": ConfigRecord({**ANNOUNCED, "version": "9" * 10**4}), "theta": EMPTY},
    "an edition": {
        "terms": ConfigRecord({**ANNOUNCED, "editions": f"{checkpoint.written_editions()}, {FORGED} 1"}),
        "theta": EMPTY,
    },
    "a way to read θ": {
        "terms": ConfigRecord(ANNOUNCED),
        "theta": ArrayRecord({"theta": Array("float32", (1,), FORGED * 10**3, b"")}),
    },
}


@pytest.mark.parametrize("words", QUOTED)
@pytest.mark.parametrize("kind", ["train", "query"])
def test_a_servers_words_make_one_short_line(words, kind, caplog):
    """A site's log is its own: what a server says is quoted in it, and writes no lines there."""
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
    message = Message(RecordDict(QUOTED[words]), 7, kind)
    with caplog.at_level(logging.INFO, logger="fedspa.agent"):
        reply = app(message, Context(1, 7, {}, RecordDict(), {}))
    [record] = reply.content.values()
    assert dict(record) == {"refusal": "terms"}
    [line] = [entry.getMessage() for entry in caplog.records if entry.name == "fedspa.agent"]
    assert line.isprintable()
    assert len(line) <= 2100, len(line)


# What a thief of a site's disk, or of the server's, finds there beside the records themselves (SECURITY.md).


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_no_key_of_the_noise_is_on_a_sites_disk(deployment, train, tmp_path, monkeypatch):
    drawn: list[bytes] = []
    urandom = streams.os.urandom

    def recorded(count: int) -> bytes:
        drawn.append(urandom(count))
        return drawn[-1]

    monkeypatch.setattr(streams.os, "urandom", recorded)
    train(deployment, federation__rounds=2)
    keys = [key for key in drawn if len(key) == streams.KEY_BYTES]
    keys += [streams.derive_key(key, label) for key in keys for label in ("noise", "sampling")]
    found = files(tmp_path)
    assert len(keys) >= 4 * 2
    assert {"site-0/ledger.sqlite", "run/summary.json"} <= found.keys()
    assert any("outbox" in name for name in found)
    for name, content in found.items():
        assert not any(key in content or key.hex().encode() in content for key in keys), name


def test_a_ledger_holds_no_data_gradient_or_model(deployment, train, tmp_path):
    """It has columns for names, events, counts, times and digests, and for nothing else."""
    train(deployment, federation__rounds=2)
    columns: set[str] = set()
    connection = sqlite3.connect(tmp_path / "site-0/ledger.sqlite")
    tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    for table in tables:
        columns |= {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}
        for row in connection.execute(f"SELECT * FROM {table}"):
            assert all(value is None or isinstance(value, int) or len(value) < 500 for value in row), table
    connection.close()
    counts = {"id", "sequence", "number", "count", "entries", "known_entries", "announced", "first", "last"}
    names = {"agent", "run", "message", "event", "text", "name"}
    assert columns == {*counts, *names, "hash", "digest", "reserved_at", "released_at", "accepted_at"}
    with np.load(tmp_path / "site-0/records.npz") as held:
        rows = [row.tobytes() for row in held["x"] if np.any(row)]
    for name, content in files(tmp_path / "site-0").items():
        if not name.endswith(".npz"):
            assert not any(row in content for row in rows), name


def test_a_deployments_server_keeps_nothing_of_the_agents_records(deployment, train, tmp_path):
    """No digest of theirs either: a run after which every record of a site was replaced has the same facts."""
    from fedspa.runs.checkpoint import load_latest

    train(deployment, federation__rounds=2)
    with np.load(deployment.nodes[100]["data"]) as held:
        x, y = held["x"], held["y"]
    np.savez(deployment.nodes[100]["data"], x=1 - x, y=y[::-1])
    train(deployment, run__out=str(tmp_path / "other"))
    first, second = (load_latest(tmp_path / name / "checkpoint") for name in ("run", "other"))
    assert first.facts == second.facts
    assert first.extra.keys() == second.extra.keys()


def test_a_site_may_ask_for_persons(clinic):
    strict = replace(clinic, policy=replace(clinic.policy, unit="person"))
    assert refusal(strict) == "unit"
    assert spent(clinic) == 0


def test_rounds_that_are_over_are_stale(clinic):
    answer_round(clinic, at_round(1), THETA)
    assert refusal(clinic, at_round(0)) == "stale"
    assert spent(clinic) == 1


def test_a_ledger_with_an_event_of_a_newer_fedspa_is_refused(clinic):
    assert clinic.ledger is not None
    with sqlite3.connect(clinic.ledger) as connection:
        connection.execute("""INSERT INTO event (text) VALUES ('{"kind":"laplace"}')""")
    assert refusal(clinic) == "ledger"


def test_the_servers_run_config_decides_nothing(node):
    """`run.ledger`, `run.policy`, noise and data of the server's config are for simulations."""
    theirs = {"run.ledger": "/tmp/x", "run.policy": "/tmp/y", "privacy.noise": "seeded", "simulation": True}
    mine = read_site(node, theirs)
    assert not mine.simulated
    assert str(mine.ledger) == node["ledger"]
