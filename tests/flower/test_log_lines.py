"""A site's log is its own: what a server says is quoted in it, and writes no lines there."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="needs the extra: pip install 'fedspa[flower]'")

import logging
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from fedspa.flower import terms
from fedspa.flower.client_app import app
from fedspa.runs import identity

from .test_terms import GIVEN

FORGED = "x\nINFO :      answered\n\x1b[2K\u2028"
THETA = ArrayRecord({"theta": Array("float32", (1,), "numpy.ndarray", b"")})
TERMS: dict[str, Any] = dict(terms.to_record(GIVEN))
HOSTILE = {
    "a key": {"terms": ConfigRecord({**TERMS, FORGED: 1}), "theta": THETA},
    "a name": {"terms": ConfigRecord(TERMS), FORGED: THETA},
    "a version": {"terms": ConfigRecord({**TERMS, "version": "9" * 10**6}), "theta": THETA},
    "an edition": {
        "terms": ConfigRecord({**TERMS, "editions": f"{identity.written_editions()}, {FORGED} 1"}),
        "theta": THETA,
    },
    "a way to read θ": {
        "terms": ConfigRecord(TERMS),
        "theta": ArrayRecord({"theta": Array("float32", (1,), FORGED * 10**5, b"")}),
    },
}


@pytest.mark.parametrize("words", HOSTILE)
@pytest.mark.parametrize("kind", ["train", "query"])
def test_a_servers_words_make_one_short_line(words, kind, caplog):
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
    message = Message(RecordDict(HOSTILE[words]), 7, kind)
    with caplog.at_level(logging.INFO, logger="fedspa.agent"):
        reply = app(message, Context(1, 7, {}, RecordDict(), {}))
    [record] = reply.content.values()
    assert dict(record) == {"refusal": "terms"}
    [line] = [entry.getMessage() for entry in caplog.records if entry.name == "fedspa.agent"]
    assert line.isprintable()
    assert len(line) <= 2100, len(line)
