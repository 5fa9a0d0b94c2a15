"""The ledger's file: how one is created, opened and refused.

An SQLite database in WAL mode with `synchronous=FULL`, so a committed row outlives a crash of the process and of the
machine.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Literal

from fedspa import durable
from fedspa.agent.ledger import witness as ledger_witness
from fedspa.agent.ledger.errors import BUSY_TIMEOUT_S, damaged, explained
from fedspa.agent.ledger.schema import APPLICATION_ID, SCHEMA_VERSION, TABLES, TRIGGERS, alterations
from fedspa.agent.ledger.witness import GENESIS, Witness
from fedspa.errors import LedgerError


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
            for statement in (*TABLES, *TRIGGERS):
                connection.execute(statement)
            connection.execute("INSERT INTO head VALUES (1, 0, ?, 0)", (GENESIS,))
            connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
            connection.execute("COMMIT")
            connection.execute("PRAGMA journal_mode=WAL")
        os.link(draft, path)  # unlike a rename, never replaces what is there
        durable.force_folder(folder)
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
        inside = path / "ledger.sqlite"  # a run's folder in place of its ledger
        example = f", as {inside}" if inside.is_file() else ""
        raise LedgerError(
            f"{path} is {'not a file' if path.exists() else 'missing'}; give the path of a ledger{example}"
        )
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
            _check_kind(path, connection)
            if mode == "rw" and witnessed:
                seen = ledger_witness.read(path)
            if check:
                _check_whole(path, connection)
                if witnessed:
                    ledger_witness.require(path, connection, ledger_witness.name(connection), seen)
            if mode == "rw":
                # SQLite opens a write-protected file without a word; only a write tells.
                connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
            if mode == "rw" and witnessed and ledger_witness.name(connection) is None:
                # The witness comes before the commit: after a kill in between, the next process takes its name.
                drawn = seen or Witness(secrets.token_hex(16), ledger_witness.head(connection))
                set_name(connection, drawn.ledger)
                if seen is None:
                    ledger_witness.make(path, drawn)
            connection.execute("COMMIT")
            if mode == "rw" and witnessed:
                # Into the file itself, as far as no reader is in the way. Else what a kill leaves there may have no
                # name yet, and taken alone would pass for a new ledger.
                connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
            if mode == "rw" and connection.execute("PRAGMA journal_mode=WAL").fetchone()[0] != "wal":
                raise LedgerError(f"{path} cannot have a write-ahead log there; put the ledger on a local disk")
        except BaseException:
            connection.close()
            raise
    return connection


def set_name(connection: sqlite3.Connection, name: str) -> None:
    connection.execute("INSERT INTO identity VALUES (1, ?)", (name,))


def identity(path: Path) -> tuple[int, int] | None:
    """Which file lies at `path` now, whatever its name and content."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _check_kind(path: Path, connection: sqlite3.Connection) -> None:
    """Raise where it is no ledger, or one of another version."""
    if connection.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
        raise LedgerError(f"{path} is an SQLite file but not a fedspa ledger; give another path")
    version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    if version != SCHEMA_VERSION:
        raise LedgerError(
            f"{path} has ledger version {version}, this fedspa knows {SCHEMA_VERSION}; install the fedspa that wrote it"
        )


def _check_whole(path: Path, connection: sqlite3.Connection) -> None:
    """Raise where totals, events or head are damaged: they decide ε. `verify` reads the entries behind them."""
    for problem in alterations(connection):
        raise LedgerError(damaged(path, problem))
    for table in ("event", "total", "head", "identity", "loss", "plan"):
        for (problem,) in connection.execute(f"PRAGMA quick_check({table})"):
            if problem != "ok":
                raise LedgerError(damaged(path, problem))
    ends = connection.execute("SELECT entries, hash FROM head").fetchone()
    counted = connection.execute("SELECT coalesce(sum(count), 0) FROM total").fetchone()[0]
    last = connection.execute("SELECT sequence, hash FROM entry ORDER BY sequence DESC LIMIT 1").fetchone()
    if ends != (last or (0, GENESIS)) or ends[0] != counted:
        raise LedgerError(damaged(path, "its totals, its head and its last entry disagree"))
    if counted and ledger_witness.name(connection) is None:
        raise LedgerError(damaged(path, "it has lost its name"))
