"""How a site's messages were answered, counted beside its ledger: for its own monitoring, which the ledger is not for.

Every number here is one that the server has seen: an answer's code, or a payload and its length. A count that cannot
be written is not written, and no answer depends on it. Nothing is forced to the disk: a counter that starts anew is no
harm where a lost spend would be.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

logger = logging.getLogger("fedspa.agent")
_LARGEST = 100_000


@dataclass
class Tally:
    """`last` is when the last payload was answered, in seconds since 1970; 0 for never."""

    payloads: int = 0
    payload_bytes: int = 0
    last: float = 0.0
    refusals: dict[str, int] = field(default_factory=dict)


def path_of(ledger: Path) -> Path:
    return ledger.with_name(f"{ledger.name}.answers")


def read(ledger: Path) -> Tally:
    """What was counted; nothing where the file is missing or is none."""
    with suppress(OSError):
        return _parsed(path_of(ledger).read_text("utf-8")[:_LARGEST])
    return Tally()


def note(node: Mapping[str, Any], answer: bytes | str) -> None:
    """Count an answer of the site with this node-config: a payload, or a refusal's code."""
    ledger = node.get("ledger")
    if os.name != "posix" or not isinstance(ledger, str) or not ledger or node.get("simulation") is True:
        return
    import fcntl

    try:
        with open(os.open(path_of(Path(ledger)), os.O_RDWR | os.O_CREAT, 0o600), "r+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # ends with the file
            tally = _parsed(file.read(_LARGEST))
            if isinstance(answer, bytes):
                tally.payloads += 1
                tally.payload_bytes += len(answer)
                tally.last = time.time()
            else:
                tally.refusals[answer] = tally.refusals.get(answer, 0) + 1
            file.seek(0)
            file.truncate()
            file.write(json.dumps(asdict(tally)))
    except Exception as error:  # whatever it is, the answer must not depend on it
        logger.info("an answer was not counted: %s", error)


def _parsed(text: str) -> Tally:
    with suppress(ValueError, TypeError, KeyError, AttributeError):
        found = json.loads(text)
        refusals = {str(code): int(times) for code, times in found["refusals"].items()}
        return Tally(int(found["payloads"]), int(found["payload_bytes"]), float(found["last"]), refusals)
    return Tally()
