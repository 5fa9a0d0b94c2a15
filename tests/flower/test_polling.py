"""Whatever a node stores as its reply, the others' replies are read, and nobody answers for another."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import httpx
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message
from flwr.proto.recorddict_pb2 import ConfigRecord as ProtoConfigRecord
from flwr.supercore.constant import HEAD_BODY_DIVIDER
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_id
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

from .local_grid import LocalGrid

Stored = tuple[str, dict[str, bytes]]  # the name of the reply among the objects that make it up


class StoringGrid(LocalGrid):
    """Replies pass through bytes: of node 101 they are its own making, and Flower makes messages of them here."""

    spoil: Callable[[Message], Stored]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        found = []
        for reply in super().pull_messages(message_ids):
            name, objects = stored(reply) if reply.metadata.src_node_id != 101 else self.spoil(reply)
            message: Any = inflate_object_from_contents(name, objects)
            message.metadata.__dict__["_message_id"] = name
            found.append(message)
        return found


def stored(reply: Message) -> Stored:
    return reply.object_id, {name: each.deflate() for name, each in get_all_nested_objects(reply).items()}


def made(kind: str, children: str, body: bytes) -> bytes:
    return f"{kind} {children} {len(body)}".encode() + HEAD_BODY_DIVIDER + body


def body(content: bytes) -> bytes:
    return content.partition(HEAD_BODY_DIVIDER)[2]


def above(reply: Message, child: str, objects: dict[str, bytes]) -> Stored:
    """A message whose content is the object `child`."""
    message = made("Message", child, body(reply.deflate()))
    return get_object_id(message), objects | {get_object_id(message): message}


def no_message(reply: Message) -> Stored:
    record = ConfigRecord({"payload": b""})
    return record.object_id, {record.object_id: record.deflate()}


def bytes_of_nothing(reply: Message) -> Stored:
    content = made("Message", "", b"\xff" * 20)
    return get_object_id(content), {get_object_id(content): content}


def content_of_another_kind(reply: Message) -> Stored:
    record = ArrayRecord({"theta": Array("float32", (1,), "numpy.ndarray", b"")})
    return above(
        reply, record.object_id, {name: each.deflate() for name, each in get_all_nested_objects(record).items()}
    )


def value_without_a_kind(reply: Message) -> Stored:
    proto = ProtoConfigRecord()
    proto.items.add().key = "payload"
    record = made("ConfigRecord", "", proto.SerializeToString())
    honest = next(content for content in stored(reply)[1].values() if content.startswith(b"RecordDict"))
    old = next(content for content in stored(reply)[1].values() if content.startswith(b"ConfigRecord"))
    swapped = body(honest).replace(get_object_id(old).encode(), get_object_id(record).encode())
    records = made("RecordDict", get_object_id(record), swapped)
    return above(reply, get_object_id(records), {get_object_id(each): each for each in (record, records)})


HOSTILE = [no_message, bytes_of_nothing, content_of_another_kind, value_without_a_kind]


@pytest.fixture
def storing(simulation: LocalGrid) -> StoringGrid:
    return StoringGrid(simulation.nodes, simulation.run_config | {"federation.per_round": 4, "federation.rounds": 2})


@pytest.mark.parametrize("spoil", HOSTILE)
def test_a_reply_that_cannot_be_read_costs_nobody_else(storing, train, spoil):
    storing.spoil = spoil
    summary = train(storing)
    assert summary["rounds"] == 2
    assert summary["dropped"] == {"silent": 1, "unreadable": 1}  # it is as good as silent, and rests


@pytest.mark.parametrize("error", [False, True])
def test_nobody_answers_for_another(storing, train, error):
    """Who sent a reply stands in its bytes: a node that names its victim there takes nothing from it."""

    def forged(reply: Message) -> Stored:
        reply.metadata.__dict__["_src_node_id"] = 103
        return stored(reply)

    def failing(node: int, question: Message, answer: Callable[[], Message]) -> list[Message]:
        return [Message(Error(0, "none"), reply_to=question) if error and node == 101 else answer()]

    storing.spoil, storing.fault = forged, failing
    summary = train(storing)
    assert summary["dropped"] == {"silent": 1, "stranger": 1}


def test_a_superlink_that_is_gone_is_no_nodes_fault(simulation, train, monkeypatch):
    def gone(ids: Iterable[str]) -> Iterable[Message]:
        raise httpx.ConnectError("refused")

    monkeypatch.setattr(simulation, "pull_messages", gone)
    with pytest.raises(httpx.ConnectError):
        train(simulation)
