"""What a ledger's tables say, read by whoever has it open: entries, totals, first plans.

Opening checks totals, events and head. What lies behind them damage may have changed, so that it is parsed here and
nowhere else.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from fedspa.agent.ledger import file as ledger_file
from fedspa.agent.ledger import witness as ledger_witness
from fedspa.agent.ledger.errors import damaged, explained
from fedspa.errors import LedgerError, PrivacyError
from fedspa.mechanisms import UnknownKind, event_of
from fedspa.privacy.cap import FirstPlan
from fedspa.privacy.event import Event, noise_modes

# What ENTRIES reads, by name; the last two are of a release, which there may not be.
COLUMNS = ("sequence", "agent", "run", "message", "event", "reserved_at", "hash", "digest", "released_at")
ENTRIES = (
    "SELECT sequence, agent, run, message, event.text, reserved_at, hash, digest, released_at FROM entry "
    "LEFT JOIN event ON event.id = entry.event LEFT JOIN release USING (sequence) ORDER BY sequence"
)


@dataclass(frozen=True, slots=True)
class Reservation:
    """One entry. `fresh` is False where an earlier call had made it; `digest` is what was released under it, if any."""

    sequence: int
    agent: str
    event: Event
    fresh: bool
    digest: str | None


@contextmanager
def reading(path: str | Path, *, check: bool = True) -> Iterator[tuple[Path, sqlite3.Connection]]:
    """A read-only view of one moment, whatever other processes write meanwhile."""
    path = Path(path)
    with explained(path), closing(ledger_file.connect(path, "ro", check=check)) as connection:
        connection.execute("BEGIN")
        yield path, connection


def has_entries(path: Path) -> bool:
    """Whether a ledger there holds any, or held any: its witness outlives it."""
    if not path.exists():
        seen = ledger_witness.read(path)
        return seen is not None and seen.head.entries > 0
    with reading(path) as (path, connection):
        return ledger_witness.head(connection).entries > 0


def find(path: Path, connection: sqlite3.Connection, agent: str, run: str, message: str) -> Reservation | None:
    """The entry of this triple, if there is one."""
    row = connection.execute(
        "SELECT sequence, event.text, release.digest FROM entry "
        "JOIN event ON event.id = entry.event LEFT JOIN release USING (sequence) "
        "WHERE agent = ? AND run = ? AND message = ?",
        (agent, run, message),
    ).fetchone()
    if row is None:
        return None
    sequence, text, digest = row
    return Reservation(sequence, agent, parsed(path, text), fresh=False, digest=digest)


def known(connection: sqlite3.Connection, agents: Iterable[str]) -> set[str]:
    """Those of `agents` that have entries."""
    wanted = json.dumps(list(agents))
    query = "SELECT DISTINCT agent FROM total WHERE agent IN (SELECT value FROM json_each(?))"
    return {agent for (agent,) in connection.execute(query, (wanted,))}


def spent(path: Path, connection: sqlite3.Connection, agent: str) -> Counter[Event]:
    """Distinct events of `agent` with their counts."""
    counts: Counter[Event] = Counter()
    query = "SELECT text, count FROM total JOIN event ON event.id = total.event WHERE agent = ?"
    for text, count in connection.execute(query, (agent,)):
        counts[parsed(path, text)] += count
    return counts


def largest(path: Path, connection: sqlite3.Connection, but: str | None) -> Counter[Event]:
    """Of every run, `but` one, how often the agent with the most took part in each event."""
    counts: Counter[Event] = Counter()
    query = (
        "SELECT text, max(count) FROM (SELECT run, event, count(*) AS count FROM entry WHERE run IS NOT ? "
        "GROUP BY run, agent, event) JOIN event ON event.id = event GROUP BY run, event"
    )
    for text, count in connection.execute(query, (but,)):
        counts[parsed(path, text)] += count
    return counts


def first_plan(path: Path, connection: sqlite3.Connection, agent: str) -> FirstPlan | None:
    """What was announced with the first entry of `agent`, if anything was."""
    found = connection.execute(
        "SELECT text, participations FROM plan JOIN entry USING (sequence) JOIN event ON event.id = entry.event "
        "WHERE plan.agent = ?",
        (agent,),
    ).fetchone()
    return None if found is None else announced_plan(path, parsed(path, found[0]), found[1])


def announced_plan(path: Path, event: Event, participations: object) -> FirstPlan:
    """A first plan as the ledger's columns have it, which damage may have changed."""
    if not (isinstance(participations, int) and participations >= 1):
        raise LedgerError(damaged(path, "a first plan has no whole number of participations"))
    return FirstPlan(event, participations)


def parsed(path: Path, text: str) -> Event:
    """The event that a ledger stores as `text`."""
    try:
        return event_of(text)
    except UnknownKind as error:  # a backup would know nothing of what was spent since
        raise LedgerError(f"{path} was written by a newer fedspa ({error}); upgrade fedspa here") from error
    except PrivacyError as error:
        raise LedgerError(f"{path} holds what is no event: {error}; restore it from a backup") from error


def unit_in(path: Path, text: str) -> str:
    """What an event protects, also where its kind is one that only a newer version knows."""
    try:
        return event_of(text).unit
    except UnknownKind:
        return str(json.loads(text).get("unit", "record"))
    except PrivacyError:
        return parsed(path, text).unit


def noise(path: Path, connection: sqlite3.Connection) -> dict[str, int]:
    """How many participations had their noise from where."""
    query = "SELECT text, sum(count) FROM total JOIN event ON event.id = total.event GROUP BY event"
    return noise_modes({parsed(path, text): count for text, count in connection.execute(query)})


def first_plans(connection: sqlite3.Connection) -> list[tuple[str, int, int]]:
    """First plans: of which agent, with which entry, how many participations were announced."""
    return connection.execute("SELECT agent, sequence, participations FROM plan ORDER BY sequence").fetchall()
