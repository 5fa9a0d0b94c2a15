"""Going on with a ledger that lost entries: only by an owner who says how many are left, and on record ever after."""

from __future__ import annotations

import secrets
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from fedspa.agent.ledger import file as ledger_file
from fedspa.agent.ledger import witness as ledger_witness
from fedspa.agent.ledger.errors import explained
from fedspa.agent.ledger.witness import Witness
from fedspa.errors import LedgerError


@dataclass(frozen=True, slots=True)
class Loss:
    """What an owner accepted: the entries that the witness knew of (None: the witness was lost) and those left."""

    accepted_at: str
    known_entries: int | None
    entries: int

    def __str__(self) -> str:
        if self.known_entries is None:
            gone = "an unknown number of entries"
        else:
            gone = f"{max(0, self.known_entries - self.entries)} entries"
        return (
            f"{gone} behind entry {self.entries} may be lost (accepted {self.accepted_at[:19]} UTC); no ε counts them"
        )


def losses(connection: sqlite3.Connection) -> list[Loss]:
    """What was ever accepted, oldest first."""
    return [
        Loss(*row) for row in connection.execute("SELECT accepted_at, known_entries, entries FROM loss ORDER BY id")
    ]


def accept(path: Path, entries: int) -> Loss:
    """Give the ledger a new witness at its present head, and write down in it what is gone.

    `entries` must be what the ledger holds now: who accepts has looked. Whatever else is wrong is still refused.
    """
    with explained(path), closing(ledger_file.connect(path, "rw", witnessed=False)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        if ledger_witness.name(connection) is None:
            ledger_file.set_name(connection, secrets.token_hex(16))
        name, head, seen = ledger_witness.name(connection), ledger_witness.head(connection), None
        assert name is not None
        try:
            seen = ledger_witness.read(path)
            problem = ledger_witness.lost(path, connection, name, seen)
        except LedgerError as error:
            problem = str(error)
        if problem is None:
            raise LedgerError(f"{path} has lost nothing that its witness knows of: there is nothing to accept")
        if entries != head.entries:
            raise LedgerError(f"{path} holds {head.entries} entries, not {entries}; look at it before you accept that")
        known = seen.head if seen is not None and seen.ledger == name else None
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        loss = Loss(now, None if known is None else known.entries, head.entries)
        connection.execute(
            "INSERT INTO loss (accepted_at, known_entries, known_releases, entries, releases) VALUES (?, ?, ?, ?, ?)",
            (now, loss.known_entries, None if known is None else known.releases, head.entries, head.releases),
        )
        # The record before the witness: killed in between, the ledger is still refused.
        connection.execute("COMMIT")
        ledger_witness.make(path, Witness(name, head))
    return loss
