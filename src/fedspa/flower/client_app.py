"""The agent's app: `clientapp = "fedspa.flower.client_app:app"`.

A reply holds one record with one value: the payload's bytes, or a refusal's code. No metric, no count and no text ever
leaves; what went wrong is told in the agent's own log.
"""

from __future__ import annotations

import logging
import time

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor

from fedspa.agent.participate import Refusal
from fedspa.flower.agent import participate
from fedspa.flower.site import read_site
from fedspa.flower.terms import Announcement, TermsError, from_record

logger = logging.getLogger("fedspa.agent")

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Answer a round, whatever it holds."""
    try:
        record = ConfigRecord({"payload": _payload(message, context)})
    except Refusal as refusal:
        logger.warning("refused (%s): %s", refusal.code, refusal)
        record = ConfigRecord({"refusal": refusal.code})
    except KeyboardInterrupt:
        raise
    except BaseException:  # one that escaped, a SystemExit too, would carry its text to the server
        logger.exception("the round failed")
        record = ConfigRecord({"refusal": "internal"})
    return Message(RecordDict({"update": record}), reply_to=message)


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
    try:
        announcement = from_record(terms)
    except TermsError as error:
        raise Refusal("terms", str(error)) from error
    array = arrays["theta"]
    if len(array.data) > 4 * announcement.terms.dimension + 1024:
        raise Refusal("terms", f"θ comes as {len(array.data)} bytes; 4 per parameter were expected")
    try:
        theta = array.numpy()
    except Exception as error:  # whatever numpy makes of foreign bytes
        raise Refusal("terms", f"θ cannot be read: {error}") from error
    if theta.dtype != np.float32 or theta.shape != (announcement.terms.dimension,) or not np.isfinite(theta).all():
        raise Refusal("terms", f"θ is {theta.dtype} of shape {theta.shape}; d finite float32 values were expected")
    return announcement, torch.from_numpy(theta.copy())
