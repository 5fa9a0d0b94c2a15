"""The ledger's tables, and what guards them.

Rows are only ever added: triggers refuse UPDATE and DELETE, and also the INSERT OR REPLACE that would pass by a DELETE
trigger. `total` (agent, distinct event, count) is kept by trigger, so that nobody reads all entries to learn what was
spent. Each entry's hash covers its content and the hash before it, and `head` holds the newest: a row that is edited,
removed or put in by hand breaks the chain. The chain cannot show that its end is gone;
a second file does (`witness`).

A new ledger has no name yet. The first process that opens it to write gives it one, and its witness: a kill in between
leaves an empty ledger that the next process completes.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3

APPLICATION_ID = 0x46535041  # "FSPA"
SCHEMA_VERSION = 1

# `identity`: a name drawn once, by which a witness and a run know their ledger. `loss`: missing entries that an owner
# accepted, for every later reader. `plan`: the participations that were announced to an agent with its first entry
# (docs/accounting.md).
TABLES = (
    "CREATE TABLE event (id INTEGER PRIMARY KEY, text TEXT NOT NULL UNIQUE)",
    """CREATE TABLE entry (
        sequence INTEGER PRIMARY KEY,
        agent TEXT NOT NULL,
        run TEXT NOT NULL,
        message TEXT NOT NULL,
        event INTEGER NOT NULL REFERENCES event (id),
        reserved_at TEXT NOT NULL,
        hash TEXT NOT NULL,
        UNIQUE (agent, run, message)
    )""",
    """CREATE TABLE release (
        sequence INTEGER PRIMARY KEY REFERENCES entry (sequence),
        digest TEXT NOT NULL,
        released_at TEXT NOT NULL
    )""",
    """CREATE TABLE total (
        agent TEXT NOT NULL,
        event INTEGER NOT NULL REFERENCES event (id),
        count INTEGER NOT NULL,
        PRIMARY KEY (agent, event)
    ) WITHOUT ROWID""",
    """CREATE TABLE head (
        id INTEGER PRIMARY KEY CHECK (id = 1),
        entries INTEGER NOT NULL,
        hash TEXT NOT NULL,
        releases INTEGER NOT NULL
    )""",
    "CREATE TABLE identity (id INTEGER PRIMARY KEY CHECK (id = 1), name TEXT NOT NULL)",
    """CREATE TABLE loss (
        id INTEGER PRIMARY KEY,
        accepted_at TEXT NOT NULL,
        known_entries INTEGER,
        known_releases INTEGER,
        entries INTEGER NOT NULL,
        releases INTEGER NOT NULL
    )""",
    """CREATE TABLE plan (
        agent TEXT PRIMARY KEY,
        sequence INTEGER NOT NULL REFERENCES entry (sequence),
        participations INTEGER NOT NULL
    ) WITHOUT ROWID""",
)


def _refuse(name: str, when: str, condition: str, reason: str) -> str:
    return f"CREATE TRIGGER {name} BEFORE {when} WHEN {condition} BEGIN SELECT RAISE(ABORT, '{reason}'); END"


def _kept(*tables: str, verbs: tuple[str, ...] = ("UPDATE", "DELETE")) -> list[str]:
    return [
        _refuse(f"{table}_no_{verb.lower()}", f"{verb} ON {table}", "1", "a ledger only grows")
        for table in tables
        for verb in verbs
    ]


TRIGGERS = (
    # What was written stays.
    *_kept("event", "entry", "release", "identity", "loss", "plan"),
    *_kept("total", "head", verbs=("DELETE",)),
    # INSERT OR REPLACE deletes without firing a DELETE trigger: refuse what it would replace.
    _refuse(
        "event_is_new",
        "INSERT ON event",
        "EXISTS (SELECT 1 FROM event WHERE id = NEW.id OR text = NEW.text)",
        "this event exists",
    ),
    _refuse(
        "entry_is_next",
        "INSERT ON entry",
        "NEW.sequence IS NOT (SELECT entries + 1 FROM head) OR EXISTS (SELECT 1 FROM entry "
        "WHERE agent = NEW.agent AND run = NEW.run AND message = NEW.message)",
        "an entry is new and takes the next number",
    ),
    _refuse(
        "release_is_new",
        "INSERT ON release",
        "EXISTS (SELECT 1 FROM release WHERE sequence = NEW.sequence)",
        "a release is marked once",
    ),
    _refuse(
        "total_starts_at_zero",
        "INSERT ON total",
        "NEW.count IS NOT 0 OR EXISTS (SELECT 1 FROM total WHERE agent = NEW.agent AND event = NEW.event)",
        "a total starts once, at zero",
    ),
    _refuse(
        "total_grows_by_one",
        "UPDATE ON total",
        "NEW.agent IS NOT OLD.agent OR NEW.event IS NOT OLD.event OR NEW.count IS NOT OLD.count + 1",
        "a total grows by one",
    ),
    _refuse("head_is_one", "INSERT ON head", "EXISTS (SELECT 1 FROM head)", "there is one head"),
    _refuse(
        "head_moves_by_one",
        "UPDATE ON head",
        "NEW.id IS NOT OLD.id OR NEW.entries + NEW.releases IS NOT OLD.entries + OLD.releases + 1 "
        "OR NEW.entries < OLD.entries OR NEW.releases < OLD.releases",
        "the head moves by one",
    ),
    """CREATE TRIGGER entry_counts AFTER INSERT ON entry BEGIN
        UPDATE head SET entries = NEW.sequence, hash = NEW.hash;
        INSERT INTO total SELECT NEW.agent, NEW.event, 0
            WHERE NOT EXISTS (SELECT 1 FROM total WHERE agent = NEW.agent AND event = NEW.event);
        UPDATE total SET count = count + 1 WHERE agent = NEW.agent AND event = NEW.event;
    END""",
    "CREATE TRIGGER release_counts AFTER INSERT ON release BEGIN UPDATE head SET releases = releases + 1; END",
    _refuse("identity_is_one", "INSERT ON identity", "EXISTS (SELECT 1 FROM identity)", "a ledger has one name"),
    _refuse("loss_is_new", "INSERT ON loss", "EXISTS (SELECT 1 FROM loss WHERE id = NEW.id)", "a ledger only grows"),
    _refuse(
        "plan_is_first",
        "INSERT ON plan",
        "(SELECT sum(count) FROM total WHERE agent = NEW.agent) IS NOT 1 "
        "OR NOT EXISTS (SELECT 1 FROM entry WHERE agent = NEW.agent AND sequence = NEW.sequence)",
        "a plan is announced with the first entry",
    ),
)


def entry_hash(
    previous: str,
    sequence: int,
    agent: str,
    run: str,
    message: str,
    event_text: str,
    reserved_at: str,
    announced: int | None = None,
) -> str:
    """The link of the chain that `sequence` adds to `previous` (`GENESIS` for the first). `announced` is of an agent's
    first entry that came with a plan."""
    content = [previous, sequence, agent, run, message, event_text, reserved_at]
    content += [] if announced is None else [announced]
    return hashlib.sha256(json.dumps(content, separators=(",", ":")).encode("ascii")).hexdigest()


def alterations(connection: sqlite3.Connection) -> list[str]:
    """How the tables and triggers differ from what `create` makes."""
    query = "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL AND name NOT LIKE 'sqlite_%'"
    found = {str(row[0]) for row in connection.execute(query)}  # str: in a damaged file it may be bytes
    made = {*TABLES, *TRIGGERS}
    return [
        *(f"missing or altered: {' '.join(sql.split()[1:3])}" for sql in sorted(made - found)),
        *(f"not part of a ledger: {' '.join(sql.split()[1:3])}" for sql in sorted(found - made)),
    ]
