"""Whether a ledger can be trusted: all of it is read, and held against itself and its witness. Nothing is changed."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedspa.agent.ledger import schema as ledger_schema
from fedspa.agent.ledger import witness as ledger_witness
from fedspa.agent.ledger.content import ENTRIES, first_plans, noise, reading
from fedspa.agent.ledger.errors import explain
from fedspa.agent.ledger.loss import Loss, losses
from fedspa.agent.ledger.witness import GENESIS, Witness
from fedspa.errors import LedgerError, PrivacyError
from fedspa.mechanisms import event_of

MOST_PROBLEMS = 20  # a broken chain breaks at every later entry; nobody reads a million lines


class Remarks(NamedTuple):
    """What a reader of a ledger must know though nothing is wrong with the file."""

    noise: Mapping[str, int]
    losses: tuple[Loss, ...]


def remarks(path: str | Path) -> Remarks:
    with reading(path) as (path, connection):
        return Remarks(noise(path, connection), tuple(losses(connection)))


def verify(path: str | Path) -> list[str]:
    """Read the whole ledger and list what is wrong with it, at most `MOST_PROBLEMS`; empty means that it is sound.

    A file that cannot even be opened as a ledger is a LedgerError. The chain is not keyed: it shows damage and edits,
    not the work of someone who rebuilds the file from the first entry on.
    """
    problems: list[str] = []
    try:
        seen = ledger_witness.read(Path(path))  # before the view of the ledger that is held against it
    except LedgerError as error:
        seen = None
        problems.append(str(error))
    with reading(path, check=False) as (path, connection):
        try:
            for problem in _problems(path, connection, seen):
                problems.append(" ".join(problem.split()))  # what it quotes may have several lines
                if len(problems) == MOST_PROBLEMS:
                    problems.append("... and perhaps more")
                    break
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            problems.append(explain(path, error))
    return problems


def _problems(path: Path, connection: sqlite3.Connection, seen: Witness | None) -> Iterator[str]:
    yield from ledger_schema.alterations(connection)
    name = ledger_witness.name(connection)
    if (gone := ledger_witness.lost(path, connection, name, seen)) is not None:
        yield f"{gone}; {ledger_witness.REMEDY}"
    if name is None and ledger_witness.head(connection).entries:
        yield "it has lost its name"
    for (line,) in connection.execute(f"PRAGMA integrity_check({MOST_PROBLEMS})"):
        if line != "ok":
            yield f"SQLite: {line}"
    for table, row, other, _ in connection.execute("PRAGMA foreign_key_check"):
        yield f"{table} {row} refers to a missing {other}"
    of_persons: list[int] = []
    for number, text in connection.execute("SELECT id, text FROM event"):
        try:
            of_persons += [number] if event_of(text).unit == "person" else []
        except PrivacyError as error:
            yield f"event {number}: {error}"
    for (agent,) in connection.execute(
        "SELECT agent FROM total GROUP BY agent HAVING count(DISTINCT event IN (SELECT value FROM json_each(?))) > 1",
        (json.dumps(of_persons),),
    ):
        yield (
            f"agent {agent!r} has entries that protect each record and others that protect each person: their ε do not "
            "add up"
        )
    for agent, event, kept, counted in connection.execute(
        "SELECT agent, event, sum(kept), sum(counted) FROM "
        "(SELECT agent, event, count AS kept, 0 AS counted FROM total "
        "UNION ALL SELECT agent, event, 0, count(*) FROM entry GROUP BY agent, event) "
        "GROUP BY agent, event HAVING sum(kept) <> sum(counted)"
    ):
        yield f"total of agent {agent!r}, event {event} says {kept}, its entries are {counted}"
    announced = {sequence: participations for _, sequence, participations in first_plans(connection)}
    previous, last = GENESIS, 0
    for sequence, agent, run, message, text, reserved_at, link, _, _ in connection.execute(ENTRIES):
        if sequence != last + 1:
            yield f"entries {last + 1} to {sequence - 1} are missing"
        if link != _hash(previous, sequence, agent, run, message, text, reserved_at, announced.get(sequence)):
            yield f"entry {sequence}: its hash does not fit its content and the entry before it"
        previous, last = link, sequence
    entries, releases, head = connection.execute("SELECT entries, releases, hash FROM head").fetchone() or (0, 0, None)
    if (entries, head) != (last, previous):
        yield f"the head says {entries} entries ending in hash {head}, found {last} ending in {previous}"
    marked = connection.execute("SELECT count(*) FROM release").fetchone()[0]
    if releases != marked:
        yield f"the head says {releases} releases, found {marked}"


def _hash(previous: str, sequence: int, *content: Any) -> str | None:
    try:
        return ledger_schema.entry_hash(previous, sequence, *content)
    except TypeError:  # a column was edited into bytes
        return None
