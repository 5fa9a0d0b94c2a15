"""The agent's app: `clientapp = "fedspa.flower.client_app:app"`.

A reply holds one record with one value: the payload's bytes, or a refusal's code. To a query it is the agent's name in
its roster, or a code. No metric, no count and no other text ever leaves; what went wrong is told in its own log.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor

from fedspa.agent.participate import Refusal
from fedspa.flower import tally
from fedspa.flower.agent import introduced, participate
from fedspa.flower.operate import logs
from fedspa.flower.site import read_site
from fedspa.flower.terms import Announcement, TermsError, from_record

logger = logging.getLogger("fedspa.agent")
logs.set_up()
_LONGEST = 2000  # letters of a refusal's text: it may quote the server, who could fill the disk with it

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Answer a round, whatever it holds."""
    return _answered(message, context, "update", "payload", lambda: _payload(message, context))


@app.query()
def query(message: Message, context: Context) -> Message:
    """Say which member of a cohort this is, to a server that offers a run in which updates are added up."""
    return _answered(message, context, "member", "name", lambda: _name(message, context))


def _answered(message: Message, context: Context, kind: str, key: str, answer: Callable[[], bytes | str]) -> Message:
    found: bytes | str = b""
    code: str | None = None
    try:
        found = answer()
        logger.info("answered", extra=logs.event("answered"))
    except Refusal as refusal:
        code = refusal.code
        words = str(refusal)[:_LONGEST]
        logger.warning("refused (%s): %s", code, words, extra=logs.event("refused", code))
    except KeyboardInterrupt:
        raise
    except BaseException:  # one that escaped, a SystemExit too, would carry its text to the server
        code = "internal"
        logger.exception("the round failed", extra=logs.event("refused", code))
    if kind == "update" or code is not None:
        tally.note(context.node_config, code or found)
    record = ConfigRecord({key: found} if code is None else {"refusal": code})
    return Message(RecordDict({kind: record}), reply_to=message)


def _name(message: Message, context: Context) -> str:
    record = message.content.get("terms")
    if set(message.content) != {"terms"} or not isinstance(record, ConfigRecord):
        raise Refusal("terms", "a query holds the terms of a run and nothing else")
    return introduced(read_site(context.node_config, context.run_config), _announced(record))


def _payload(message: Message, context: Context) -> bytes:
    metadata = message.metadata
    if time.time() > metadata.created_at + metadata.ttl:
        raise Refusal(
            "stale", f"the message of {metadata.created_at:.0f} was to be answered within {metadata.ttl:.0f} s"
        )
    announcement, theta = _read(message.content)
    return participate(read_site(context.node_config, context.run_config), announcement, theta)


def _read(content: RecordDict) -> tuple[Announcement, Tensor]:
    """Terms and θ, or a Refusal: the server's message is input like any other."""
    if set(content) != {"theta", "terms"}:
        raise Refusal(
            "terms", f"the message holds {', '.join(sorted(map(str, content)))[:100]}; theta and terms were expected"
        )
    terms, arrays = content["terms"], content["theta"]
    if not isinstance(terms, ConfigRecord) or not isinstance(arrays, ArrayRecord) or set(arrays) != {"theta"}:
        raise Refusal("terms", "the message's records are of other kinds than a round's")
    announcement = _announced(terms)
    array, dimension, scored = arrays["theta"], announcement.terms.dimension, announcement.scored
    if len(array.data) > 4 * dimension * max(1, scored) + 1024:
        raise Refusal("terms", f"θ comes as {len(array.data)} bytes; 4 per parameter were expected")
    try:
        theta = array.numpy()
    except Exception as error:  # whatever numpy makes of foreign bytes
        raise Refusal("terms", f"θ cannot be read: {error}") from error
    wanted = (scored, dimension) if scored else (dimension,)  # a model per row, where several are to be scored
    if theta.dtype != np.float32 or theta.shape != wanted or not np.isfinite(theta).all():
        raise Refusal("terms", f"θ is {theta.dtype} of shape {theta.shape}; {wanted} finite float32 were expected")
    return announcement, torch.from_numpy(theta.copy())


def _announced(record: ConfigRecord) -> Announcement:
    try:
        return from_record(record)
    except TermsError as error:
        raise Refusal("terms", str(error)) from error
