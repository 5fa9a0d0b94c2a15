"""All that a ledger holds, for other programs. Nothing in the file is changed."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedspa.agent.ledger import witness as ledger_witness
from fedspa.agent.ledger.content import COLUMNS, ENTRIES, first_plans, noise, parsed, reading
from fedspa.agent.ledger.errors import damaged
from fedspa.agent.ledger.loss import losses
from fedspa.agent.ledger.schema import SCHEMA_VERSION
from fedspa.errors import LedgerError


def export(path: str | Path) -> dict[str, Any]:
    """Everything in the ledger, as JSON's own types: entries in the order of writing, totals and head."""
    with reading(path) as (path, connection):
        content = {
            "kind": "fedspa-ledger",
            "version": SCHEMA_VERSION,
            "head": asdict(ledger_witness.head(connection)),
            "noise": noise(path, connection),
            "losses": [asdict(loss) for loss in losses(connection)],
            "totals": [
                {"agent": agent, "event": _json(path, text), "count": count}
                for agent, text, count in connection.execute(
                    "SELECT agent, text, count FROM total JOIN event ON event.id = total.event ORDER BY agent, event"
                )
            ],
            "plans": [
                {"agent": agent, "sequence": sequence, "participations": participations}
                for agent, sequence, participations in first_plans(connection)
            ],
            "entries": [
                {**dict(zip(COLUMNS, row, strict=True)), "event": _json(path, row[COLUMNS.index("event")])}
                for row in connection.execute(ENTRIES)
            ],
        }
    try:
        json.dumps(content)
    except TypeError:  # a column was edited into bytes
        raise LedgerError(damaged(path, "bytes that are no text where text belongs")) from None
    return content


def lines(path: str | Path) -> tuple[str, list[tuple[Any, ...]]]:
    """The head's hash, and the entries as they are stored (`COLUMNS`). For who reads many: nothing is parsed."""
    with reading(path) as (path, connection):
        head = ledger_witness.head(connection).hash
        found = connection.execute(ENTRIES).fetchall()
    if not all(isinstance(text, str) or (text is None and i > 5) for line in found for i, text in enumerate(line[1:])):
        raise LedgerError(damaged(path, "no text where text belongs"))
    return head, found


def _json(path: Path, text: str) -> Any:
    return json.loads(parsed(path, text).to_json())
