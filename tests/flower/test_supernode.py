"""A pinned node takes reviewed apps and no other."""

from __future__ import annotations

import hashlib
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.supercore.fab import Fab
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode import start_client_internal as internal
from packaging.requirements import Requirement

from fedspa.errors import ConfigError
from fedspa.flower import check
from fedspa.flower.start import digest_of, pin, send_leftovers_first

REVIEWED = b"the app that was reviewed"
DIGEST = hashlib.sha256(REVIEWED).hexdigest()


@pytest.mark.parametrize("version", ["1.40.0", "1.41.0", "1.42.0", "1.42.1.dev20261101", "1.99.0", "2.0.0"])
def test_a_site_is_ready_with_every_flower_that_the_package_allows(monkeypatch, version):
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8")
    (extra,) = tomllib.loads(text)["project"]["optional-dependencies"]["flower"]
    monkeypatch.setattr(check.metadata, "version", lambda _: version)
    (found,) = [finding for finding in check.versions() if finding.subject == "flwr"]
    assert found.passed is Requirement(extra).specifier.contains(version, prereleases=True)


def test_the_digest_of_an_app_is_that_of_its_bundle(tmp_path):
    from flwr.cli.build import build_fab_from_disk

    app = Path(__file__).parents[2] / "examples/flower-quickstart"
    bundle = tmp_path / "quickstart.fab"
    bundle.write_bytes(build_fab_from_disk(app))
    assert digest_of(app) == digest_of(bundle) == hashlib.sha256(bundle.read_bytes()).hexdigest()


class Unpacked(Exception):
    """Flower went on with the app."""


@pytest.mark.parametrize(("content", "taken"), [(REVIEWED, True), (REVIEWED + b"\n", False)])
def test_only_the_reviewed_app_gets_through_flowers_own_check(monkeypatch, content, taken):
    """Through Flower's function up to where it opens the app: the server's word for the digest does not count."""
    for name in ("_pull_and_store_message", "_verify_fab"):
        monkeypatch.setattr(internal, name, getattr(internal, name))  # put back afterwards
    pin(frozenset({DIGEST}))
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
    message = Message(RecordDict({"c": ConfigRecord({"a": 1})}), 7, "train")
    answers: list[Message] = []

    def unpack(*_: object) -> None:
        raise Unpacked

    monkeypatch.setattr(internal, "get_fused_config_from_fab", unpack)
    monkeypatch.setattr(internal, "_insert_message", lambda reply, *_: answers.append(reply))
    state = SimpleNamespace(get_run=lambda _: None, get_node_id=lambda: 7, store_run=lambda *_: None)
    arguments = {
        "state": state,
        "object_store": SimpleNamespace(),
        "node_config": {},
        "receive": lambda: (message, SimpleNamespace()),
        "get_run": lambda _: SimpleNamespace(fab_hash=DIGEST),
        "get_fab": lambda *_: Fab(DIGEST, content, {}),
        "pull_object": lambda *_: b"",
        "confirm_message_received": lambda *_: None,
        "trusted_entities": None,
    }
    if taken:
        with pytest.raises(Unpacked):
            internal._pull_and_store_message(**arguments)
        assert answers == []
    else:
        internal._pull_and_store_message(**arguments)
        assert [answer.error.reason for answer in answers] == ["The FAB could not be verified."]


def unchecked(state: object, get_fab: object, trusted_entities: object) -> None:
    """A Flower that takes both and asks nobody."""


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("_pull_and_store_message", unchecked),
        ("_pull_and_store_message", lambda state, receive: internal._verify_fab(None, None)),
        ("_verify_fab", lambda fab, keys, signatures: True),
        ("_verify_fab", None),
    ],
)
def test_a_flower_that_checks_apps_in_another_way_is_refused(monkeypatch, name, other):
    """A site never starts with a check that is not made."""
    for each in ("_pull_and_store_message", "_verify_fab"):
        monkeypatch.setattr(internal, each, getattr(internal, each))
    if other is None:
        monkeypatch.delattr(internal, name)
    else:
        monkeypatch.setattr(internal, name, other)
    before = internal._pull_and_store_message
    with pytest.raises(ConfigError, match="a site runs no app unchecked"):
        pin(frozenset({DIGEST}))
    assert internal._pull_and_store_message is before


def test_a_reply_that_is_left_over_is_sent_before_the_next_message_is_taken(monkeypatch):
    """With Flower's own memory of messages: the loop must send, then receive, then have nothing to send."""
    from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState

    received: list[object] = []
    monkeypatch.setattr(internal, "_pull_and_store_message", lambda **_: received.append(1))
    send_leftovers_first()
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
    state = InMemoryNodeState(SimpleNamespace())
    question = Message(RecordDict({"c": ConfigRecord({"a": 1})}), 7, "train")
    question.metadata.__dict__["_message_id"] = "question"
    answer = Message(RecordDict({"c": ConfigRecord({"a": 2})}), reply_to=question)
    answer.metadata.__dict__["_message_id"] = "answer"

    state.store_message(question)
    assert internal._pull_and_store_message(state=state) is None  # a question is no reply
    state.store_message(answer)
    assert internal._pull_and_store_message(state=state) == 0
    assert len(received) == 1
    assert len(state.get_messages_legacy(is_reply=True)) == 1  # still there for Flower to send
    assert internal._pull_and_store_message(state=state) is None
    assert len(received) == 2
