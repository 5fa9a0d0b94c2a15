"""The ledger's file: its tables, what guards them, and how a file is created, opened and refused.

An SQLite database in WAL mode with `synchronous=FULL`, so a committed row outlives a crash of the process and of the
machine. Rows are only ever added: triggers refuse UPDATE and DELETE, and also the INSERT OR REPLACE that would pass by
a DELETE trigger. `total` (agent, distinct event, count) is kept by trigger, so that nobody reads all entries to learn
what was spent. Each entry's hash covers its content and the hash before it, and `head` holds the newest: a row that is
edited, removed or put in by hand breaks the chain. The chain cannot show that its end is gone; a second file does
(`witness`).

Version 1 had no witness. Whoever opens it to write brings it to version 2. A new ledger is made as version 1 and goes
the same way, so that a kill in between leaves a ledger that the next one to open it completes.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Literal

from fedspa.agent.ledger import witness as ledger_witness
from fedspa.agent.ledger.errors import BUSY_TIMEOUT_S, damaged, explained
from fedspa.agent.ledger.witness import GENESIS, Witness
from fedspa.errors import LedgerError

APPLICATION_ID = 0x46535041  # "FSPA"
SCHEMA_VERSION = 2

_TABLES = (
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
)


def _refuse(name: str, when: str, condition: str, reason: str) -> str:
    return f"CREATE TRIGGER {name} BEFORE {when} WHEN {condition} BEGIN SELECT RAISE(ABORT, '{reason}'); END"


# What an agent was told, with its first entry, of how often it would take part in that event: docs/accounting.md.
_PLANS = (
    """CREATE TABLE plan (
        agent TEXT PRIMARY KEY,
        sequence INTEGER NOT NULL REFERENCES entry (sequence),
        participations INTEGER NOT NULL
    ) WITHOUT ROWID""",
    *(
        _refuse(f"plan_no_{verb.lower()}", f"{verb} ON plan", "1", "a ledger only grows")
        for verb in ("UPDATE", "DELETE")
    ),
    _refuse(
        "plan_is_first",
        "INSERT ON plan",
        "(SELECT sum(count) FROM total WHERE agent = NEW.agent) IS NOT 1 "
        "OR NOT EXISTS (SELECT 1 FROM entry WHERE agent = NEW.agent AND sequence = NEW.sequence)",
        "a plan is announced with the first entry",
    ),
)


_TRIGGERS = (
    # What was written stays.
    *(
        _refuse(f"{table}_no_{verb.lower()}", f"{verb} ON {table}", "1", "a ledger only grows")
        for table in ("event", "entry", "release")
        for verb in ("UPDATE", "DELETE")
    ),
    *(_refuse(f"{table}_no_delete", f"DELETE ON {table}", "1", "a ledger only grows") for table in ("total", "head")),
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
)

# What version 2 has beside all that. `identity`: a name drawn once, by which a witness and a run know their ledger.
# `loss`: what an owner accepted to be gone, for every later reader. `plan`: what was announced to an agent first.
_ADDED = (
    "CREATE TABLE identity (id INTEGER PRIMARY KEY CHECK (id = 1), name TEXT NOT NULL)",
    """CREATE TABLE loss (
        id INTEGER PRIMARY KEY,
        accepted_at TEXT NOT NULL,
        known_entries INTEGER,
        known_releases INTEGER,
        entries INTEGER NOT NULL,
        releases INTEGER NOT NULL
    )""",
    *(
        _refuse(f"{table}_no_{verb.lower()}", f"{verb} ON {table}", "1", "a ledger only grows")
        for table in ("identity", "loss")
        for verb in ("UPDATE", "DELETE")
    ),
    _refuse("identity_is_one", "INSERT ON identity", "EXISTS (SELECT 1 FROM identity)", "a ledger has one name"),
    _refuse("loss_is_new", "INSERT ON loss", "EXISTS (SELECT 1 FROM loss WHERE id = NEW.id)", "a ledger only grows"),
    *_PLANS,
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


def create(path: Path) -> None:
    """Make an empty ledger at `path`, whole or not at all; leave a file alone that another process made meanwhile."""
    folder = path.parent
    if not folder.is_dir():
        raise LedgerError(f"cannot create the ledger {path}: the folder {folder} does not exist; create it first")
    # Another process may have made it meanwhile: the ledger comes before its log and its witness, so ask for it last.
    if (_log_size(path) > 0 or ledger_witness.path_of(path).exists()) and not path.exists():
        left = f"write-ahead log {path.name}-wal" if _log_size(path) > 0 else f"witness {path.name}.witness"
        raise LedgerError(
            f"{path} is missing, but its {left} is there: a ledger was removed; put it back, or move the rest of it "
            "away if you are sure that nothing was spent"
        )
    draft = folder / f".{path.name}.{secrets.token_hex(8)}.new"
    try:
        with explained(path), closing(sqlite3.connect(draft, isolation_level=None)) as connection:
            connection.execute("PRAGMA synchronous=FULL")
            connection.execute("BEGIN")
            for statement in (*_TABLES, *_TRIGGERS):
                connection.execute(statement)
            connection.execute("INSERT INTO head VALUES (1, 0, ?, 0)", (GENESIS,))
            connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
            connection.execute("PRAGMA user_version=1")  # `connect` makes the rest, and its witness
            connection.execute("COMMIT")
            connection.execute("PRAGMA journal_mode=WAL")
        os.link(draft, path)  # unlike a rename, never replaces what is there
        ledger_witness.sync_folder(folder)
    except FileExistsError:
        pass
    except OSError as error:
        raise LedgerError(
            f"cannot create the ledger {path}: {error.strerror}; put it in a writable folder on a local disk"
        ) from error
    finally:
        draft.unlink(missing_ok=True)


def _log_size(path: Path) -> int:
    """Bytes in the write-ahead log, -1 without one. It can hold entries that the main file does not have yet."""
    try:
        return os.stat(f"{path}-wal").st_size
    except OSError:
        return -1


def connect(path: Path, mode: Literal["rw", "ro"], *, check: bool = True, witnessed: bool = True) -> sqlite3.Connection:
    """Open an existing ledger or raise a LedgerError; `rw` has proved that it can write.

    `check=False` is for `verify`, which lists what is wrong instead; `witnessed=False` for who mends the witness.
    """
    if not path.is_file():
        raise LedgerError(f"{path} is {'not a file' if path.exists() else 'missing'}; give the path of a ledger")
    if path.stat().st_size == 0:
        raise LedgerError(f"{path} is empty, which no ledger ever is; restore the ledger or give another path")
    # A reader asks the witness first, so that whatever it knows is in the view of the ledger that comes after.
    seen = ledger_witness.read(path) if mode == "ro" and check else None
    with explained(path):
        # A reader that may not write leaves SQLite's empty log and index behind. One that may removes them on closing,
        # and `query_only` keeps it from all else; a log that holds anything is a writer's to work off.
        at_rest = _log_size(path) <= 0 and not os.path.exists(f"{path}-journal")
        tidy = mode == "ro" and at_rest and os.access(path, os.W_OK)
        uri = f"{path.absolute().as_uri()}?mode={'rw' if tidy else mode}"
        if mode == "ro" and _log_size(path) < 0 and not os.access(path.parent, os.W_OK):
            uri += "&immutable=1"  # a copy on read-only media: SQLite could not place its lock file
        connection = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=BUSY_TIMEOUT_S)
        try:
            if mode == "ro":
                connection.execute("PRAGMA query_only=ON")
            connection.execute("PRAGMA foreign_keys=ON")
            connection.execute("PRAGMA synchronous=FULL")
            connection.execute("BEGIN" if mode == "ro" else "BEGIN IMMEDIATE")
            version = _check_kind(path, connection)
            if mode == "rw" and witnessed:
                seen = ledger_witness.read(path)
            if check:
                _check_whole(path, connection, version)
                if witnessed:
                    ledger_witness.require(path, connection, ledger_witness.name(connection), seen)
            if mode == "rw":
                # SQLite opens a write-protected file without a word; only a write tells.
                connection.execute(f"PRAGMA user_version={version}")
            if mode == "rw" and version == 1 and witnessed:
                # The witness comes before the commit: killed in between, version 1 finds it and keeps it.
                drawn = seen or Witness(secrets.token_hex(16), ledger_witness.head(connection))
                upgrade(connection, drawn.ledger)
                if seen is None:
                    ledger_witness.make(path, drawn)
            connection.execute("COMMIT")
            if mode == "rw" and witnessed:
                # Into the file itself, as far as no reader is in the way. Else what a kill leaves there may be of
                # before the upgrade, and taken alone would pass for a ledger that never had a witness.
                connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
            if mode == "rw" and connection.execute("PRAGMA journal_mode=WAL").fetchone()[0] != "wal":
                raise LedgerError(f"{path} cannot have a write-ahead log there; put the ledger on a local disk")
        except BaseException:
            connection.close()
            raise
    return connection


def upgrade(connection: sqlite3.Connection, name: str) -> None:
    """From version 1 to 2, within a transaction."""
    for statement in _ADDED:
        connection.execute(statement)
    connection.execute("INSERT INTO identity VALUES (1, ?)", (name,))
    connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")


def identity(path: Path) -> tuple[int, int] | None:
    """Which file lies at `path` now, whatever its name and content."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def knows_plans(connection: sqlite3.Connection) -> bool:
    """Whether this ledger has what version 2 added: older ones get it when they are opened to write."""
    version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    return version > 1


def alterations(connection: sqlite3.Connection) -> list[str]:
    """How the tables and triggers differ from what `create` and `connect` make."""
    query = "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL AND name NOT LIKE 'sqlite_%'"
    found = {str(row[0]) for row in connection.execute(query)}  # str: in a damaged file it may be bytes
    made = {*_TABLES, *_TRIGGERS, *(_ADDED if knows_plans(connection) else ())}
    return [
        *(f"missing or altered: {' '.join(sql.split()[1:3])}" for sql in sorted(made - found)),
        *(f"not part of a ledger: {' '.join(sql.split()[1:3])}" for sql in sorted(found - made)),
    ]


def _check_kind(path: Path, connection: sqlite3.Connection) -> int:
    """The ledger's version."""
    if connection.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
        raise LedgerError(f"{path} is an SQLite file but not a fedspa ledger; give another path")
    version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    if not 1 <= version <= SCHEMA_VERSION:
        raise LedgerError(
            f"{path} has ledger version {version}, this fedspa knows {SCHEMA_VERSION}; install the fedspa that wrote it"
        )
    return version


def _check_whole(path: Path, connection: sqlite3.Connection, version: int) -> None:
    """Totals, events and head decide ε and must be sound. The entries behind them are for `verify` to read."""
    for problem in alterations(connection):
        raise LedgerError(damaged(path, problem))
    for table in ("event", "total", "head", *(("identity", "loss", "plan") if version > 1 else ())):
        for (problem,) in connection.execute(f"PRAGMA quick_check({table})"):
            if problem != "ok":
                raise LedgerError(damaged(path, problem))
    ends = connection.execute("SELECT entries, hash FROM head").fetchone()
    counted = connection.execute("SELECT coalesce(sum(count), 0) FROM total").fetchone()[0]
    last = connection.execute("SELECT sequence, hash FROM entry ORDER BY sequence DESC LIMIT 1").fetchone()
    if ends != (last or (0, GENESIS)) or ends[0] != counted:
        raise LedgerError(damaged(path, "its totals, its head and its last entry disagree"))
    if version > 1 and ledger_witness.name(connection) is None:
        raise LedgerError(damaged(path, "it has lost its name"))
