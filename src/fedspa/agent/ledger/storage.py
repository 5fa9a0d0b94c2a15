"""A ledger's two files: an SQLite database that only grows, and its anchor. How they are made, opened and refused.

Three mechanisms protect what the ledger acknowledged:

- *Append-only*: no statement changes or deletes an entry or a release. The database has a write-ahead log and
  `synchronous=FULL`, so that a committed row survives a crash of the process and of the machine.
- *Hash chain*: the hash of an entry covers its content and the hash before it. A row that is edited, removed or
  inserted by hand breaks the chain.
- *High-water mark*: the chain cannot show that its end is missing. SQLite drops the tail of a damaged log silently, and
  an old copy of a database is a valid database. So the anchor, a small file beside the ledger, holds how far the ledger
  had come. It is forced to the disk after each commit and before the caller continues. A ledger behind its anchor has
  lost spends and is refused. A ledger ahead of its anchor was killed between the two writes and lacks nothing.

The anchor is made before the ledger, with the ledger's name. So a ledger without an anchor is never a new ledger, and
an anchor of no entries without a ledger is left by a killed process, which lost nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import sqlite3
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fedspa import durable
from fedspa.errors import LedgerError, os_errors_as

APPLICATION_ID = 0x46535041  # "FSPA"
SCHEMA_VERSION = 1
BUSY_TIMEOUT_S = 60.0  # another process may compute ε under the lock, a fraction of a second each time
GENESIS = hashlib.sha256(b"fedspa ledger").hexdigest()  # the hash of no entries
REMEDY = (
    "put the newest copy of both files back; if they are gone for good and you know what was spent since, see "
    "`fedspa ledger accept-loss --help`"
)

# `identity`: a name drawn once, by which an anchor, a run and a guard know their ledger. `entry.announced`: how many
# participations were announced with an agent's first entry (docs/accounting.md). `total`: the number of an agent's
# entries with one event, and the first and the last of them, so that nobody reads all entries to know what was spent.
# `loss`: missing entries that an operator accepted, for every later reader.
_SCHEMA = f"""
BEGIN;
CREATE TABLE identity (name TEXT NOT NULL);
CREATE TABLE event (id INTEGER PRIMARY KEY, text TEXT NOT NULL UNIQUE);
CREATE TABLE entry (
    sequence INTEGER PRIMARY KEY,
    agent TEXT NOT NULL,
    run TEXT NOT NULL,
    message TEXT NOT NULL,
    event INTEGER NOT NULL REFERENCES event (id),
    announced INTEGER,
    reserved_at TEXT NOT NULL,
    hash TEXT NOT NULL,
    UNIQUE (agent, run, message)
);
CREATE TABLE release (
    number INTEGER PRIMARY KEY,
    sequence INTEGER NOT NULL UNIQUE REFERENCES entry (sequence),
    digest TEXT NOT NULL,
    released_at TEXT NOT NULL
);
CREATE TABLE total (
    agent TEXT NOT NULL,
    event INTEGER NOT NULL REFERENCES event (id),
    count INTEGER NOT NULL,
    first INTEGER NOT NULL,
    last INTEGER NOT NULL,
    PRIMARY KEY (agent, event)
) WITHOUT ROWID;
CREATE TABLE loss (accepted_at TEXT NOT NULL, known_entries INTEGER, entries INTEGER NOT NULL);
PRAGMA application_id={APPLICATION_ID};
PRAGMA user_version={SCHEMA_VERSION};
COMMIT;
PRAGMA journal_mode=WAL;
"""

_SLOTS = (0, 4096)  # written in turn, on pages of their own: a torn write leaves the other slot
_SLOT_BYTES = 512


@dataclass(frozen=True, slots=True)
class Anchor:
    """How far the ledger of this name has come: number of entries, of releases, and the hash of the newest entry."""

    ledger: str
    entries: int
    releases: int
    hash: str

    @property
    def writes(self) -> int:
        """The number of writes: of two anchors of one ledger, the later has more."""
        return self.entries + self.releases


def entry_hash(previous: str, sequence: int, *content: str | int | None) -> str:
    """Hash entry `sequence` with its agent, run, message, event, time and, where there is one, announced number onto
    the hash before it (`GENESIS` for the first)."""
    chained = [previous, sequence, *(value for value in content if value is not None)]
    return hashlib.sha256(json.dumps(chained, separators=(",", ":")).encode("ascii")).hexdigest()


def position(connection: sqlite3.Connection) -> Anchor:
    """Return the anchor that fits the ledger as this connection sees it."""
    name, entries, releases, link = connection.execute(
        "SELECT (SELECT name FROM identity), (SELECT max(sequence) FROM entry), (SELECT max(number) FROM release), "
        "(SELECT hash FROM entry ORDER BY sequence DESC LIMIT 1)"
    ).fetchone()
    entries, releases = entries or 0, releases or 0
    if not isinstance(entries, int) or not isinstance(releases, int):  # SQLite keeps any type in any column
        raise sqlite3.DatabaseError("the number of an entry or a release is no whole number")
    return Anchor(str(name), entries, releases, GENESIS if link is None else link)


def missing_spends(path: Path, connection: sqlite3.Connection, anchor: Anchor | None) -> str | None:
    """Describe what the ledger lacks of what its anchor states; None if nothing is missing. `anchor` must have been
    read before the view that the connection has."""
    now, file = position(connection), anchor_path(path).name
    if anchor is None:
        return f"its anchor {file} is missing, so nothing shows whether there were more than its {now.entries} entries"
    if anchor.ledger != now.ledger:
        return f"its anchor {file} is another ledger's, or the ledger was replaced by another"
    if now.entries < anchor.entries:
        return (
            f"it acknowledged {anchor.entries} entries and holds {now.entries}: {anchor.entries - now.entries} spends "
            "are missing"
        )
    if (now.entries, now.hash) != (anchor.entries, anchor.hash):
        link = connection.execute("SELECT hash FROM entry WHERE sequence = ?", (anchor.entries,)).fetchone()
        if (link[0] if link is not None else GENESIS if anchor.entries == 0 else None) != anchor.hash:
            return f"entry {anchor.entries} is not the one that it acknowledged"
    if now.releases < anchor.releases:
        return f"it acknowledged {anchor.releases} releases and holds {now.releases}"
    return None


def require_spends(path: Path, connection: sqlite3.Connection, anchor: Anchor | None) -> None:
    """Raise a LedgerError if the ledger has lost what it acknowledged."""
    if (problem := missing_spends(path, connection, anchor)) is not None:
        raise LedgerError(f"{path} cannot be relied on: {problem}; {REMEDY}")


def create(path: Path) -> None:
    """Make an empty ledger at `path`, whole or not at all; keep a file that another process made meanwhile."""
    if not path.parent.is_dir():
        raise LedgerError(f"cannot create the ledger {path}: the folder {path.parent} does not exist; create it first")
    seen = read_anchor(path)
    log = _log_size(path) > 0
    # Ask for the ledger last: another process may have made it meanwhile, and it comes before its log and its entries.
    if (log or (seen is not None and seen.entries)) and not path.exists():
        left = f"write-ahead log {path.name}-wal" if log else f"anchor {anchor_path(path).name}"
        raise LedgerError(
            f"{path} is missing, but its {left} is there: a ledger was removed; put it back, or move the rest of it "
            "away if you are sure that nothing was spent"
        )
    advice = "put it in a writable folder on a local disk"
    with explained(path), os_errors_as(LedgerError, f"cannot create the ledger {path}", advice):
        if seen is None:
            with _new_file(anchor_path(path)) as draft:
                draft.write_bytes(_anchor_file(Anchor(secrets.token_hex(16), 0, 0, GENESIS)))
            seen = read_anchor(path)
            assert seen is not None
        with _new_file(path) as draft, closing(sqlite3.connect(draft, isolation_level=None)) as connection:
            connection.executescript(_SCHEMA)
            connection.execute("INSERT INTO identity VALUES (?)", (seen.ledger,))


def connect(path: Path, mode: Literal["rw", "ro"], *, anchored: bool = True) -> sqlite3.Connection:
    """Open an existing ledger or raise a LedgerError; `rw` has proved that it can write.

    `anchored=False` is for `verify`, which lists what is wrong instead, and for `accept_loss`.
    """
    if not path.is_file():
        inside = path / "ledger.sqlite"  # a run's folder in place of its ledger
        example = f", as {inside}" if inside.is_file() else ""
        kind = "not a file" if path.exists() else "missing"
        raise LedgerError(f"{path} is {kind}; give the path of a ledger{example}")
    if path.stat().st_size == 0:
        raise LedgerError(f"{path} is empty, which no ledger ever is; restore the ledger or give another path")
    seen = read_anchor(path) if anchored else None  # before the view of the ledger that is compared with it
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
            connection.execute(f"PRAGMA query_only={'ON' if mode == 'ro' else 'OFF'}")
            connection.execute("PRAGMA synchronous=FULL")
            connection.execute("BEGIN" if mode == "ro" else "BEGIN IMMEDIATE")
            _check_kind(path, connection)
            if anchored:
                require_spends(path, connection, seen)
                counted = connection.execute("SELECT coalesce(sum(count), 0) FROM total").fetchone()[0]
                if counted != position(connection).entries:
                    raise LedgerError(damaged(path, "its totals and its last entry disagree"))
            if mode == "rw":  # SQLite opens a write-protected file without an error: only a write shows it
                connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
            connection.execute("COMMIT")
            if mode == "rw" and connection.execute("PRAGMA journal_mode=WAL").fetchone()[0] != "wal":
                raise LedgerError(f"{path} cannot have a write-ahead log there; put the ledger on a local disk")
        except BaseException:
            connection.close()
            raise
    return connection


def _check_kind(path: Path, connection: sqlite3.Connection) -> None:
    if connection.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
        raise LedgerError(f"{path} is an SQLite file but not a fedspa ledger; give another path")
    version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    if version != SCHEMA_VERSION:
        raise LedgerError(
            f"{path} has ledger version {version}, this fedspa knows {SCHEMA_VERSION}; install the fedspa that wrote it"
        )


def _log_size(path: Path) -> int:
    """Return the bytes in the write-ahead log, which can hold entries that the main file lacks; -1 without a log."""
    try:
        return os.stat(f"{path}-wal").st_size
    except OSError:
        return -1


@contextmanager
def _new_file(path: Path) -> Iterator[Path]:
    """Let the block write a draft and give it the name `path`, unless another process has made that file meanwhile."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}.new")
    try:
        yield draft
        durable.force(draft)
        with suppress(FileExistsError):
            os.link(draft, path)  # unlike a rename, never replaces what is there
        durable.force_folder(path.parent)
    finally:
        draft.unlink(missing_ok=True)


def anchor_path(ledger: Path) -> Path:
    return ledger.parent / f"{ledger.name}.anchor"  # a folder such as "." has no name to change


def read_anchor(ledger: Path) -> Anchor | None:
    """Read the anchor of this ledger; None if there is none, a LedgerError if it cannot be read."""
    path = anchor_path(ledger)
    if not path.exists():
        return None
    with _locked(path, os.O_RDONLY) as descriptor:
        return _newest(path, _slots(descriptor))


def replace_anchor(ledger: Path, anchor: Anchor) -> None:
    """Put `anchor` in the place of the file that is there, if any."""
    with _explained_anchor(anchor_path(ledger)):
        durable.replace_bytes(anchor_path(ledger), _anchor_file(anchor))


def advance_anchor(ledger: Path, anchor: Anchor, *, force: bool) -> None:
    """Bring the file to `anchor`, on the disk with `force`; one that another process brought further stays so."""
    path = anchor_path(ledger)
    with _locked(path, os.O_RDWR) as descriptor:
        slots = _slots(descriptor)
        newest = _newest(path, slots)
        if newest.ledger != anchor.ledger:
            raise LedgerError(f"{path} is another ledger's anchor now; put the right one back, and release nothing")
        if newest.writes < anchor.writes:
            os.pwrite(descriptor, _encode(anchor), _SLOTS[1 - slots.index(newest)])
        if force:  # also what another process wrote, which may not have waited for the disk, or died before it had
            os.fsync(descriptor)


def _encode(anchor: Anchor) -> bytes:
    place = f"entries {anchor.entries} releases {anchor.releases} hash {anchor.hash}"
    text = f"ledger {anchor.ledger} {place}".encode("ascii")
    return (text + b" " + hashlib.sha256(text).hexdigest().encode("ascii")).ljust(_SLOT_BYTES, b"\n")


def _decode(slot: bytes) -> Anchor | None:
    """Return what a slot states; None if it is damaged, or was torn by a kill."""
    text, _, checksum = slot.rstrip(b"\n").rpartition(b" ")
    if hashlib.sha256(text).hexdigest().encode("ascii") != checksum:
        return None
    _, ledger, _, entries, _, releases, _, link = text.decode("ascii").split(" ")
    return Anchor(ledger, int(entries), int(releases), link)


def _anchor_file(anchor: Anchor) -> bytes:
    return _encode(anchor).ljust(_SLOTS[1], b"\n") + _encode(anchor)


def _slots(descriptor: int) -> list[Anchor | None]:
    return [_decode(os.pread(descriptor, _SLOT_BYTES, place)) for place in _SLOTS]


def _newest(path: Path, slots: list[Anchor | None]) -> Anchor:
    valid = [slot for slot in slots if slot is not None]
    if not valid:
        raise LedgerError(f"{path} is damaged: nothing shows whether its ledger is complete; {REMEDY}")
    return max(valid, key=lambda slot: slot.writes)


@contextmanager
def _locked(path: Path, flags: int) -> Iterator[int]:
    """Open an anchor, locked against a write by another process (shared among readers)."""
    with _explained_anchor(path):
        descriptor = os.open(path, flags)
        try:
            if os.name == "posix":
                import fcntl

                fcntl.flock(descriptor, fcntl.LOCK_EX if flags & os.O_RDWR else fcntl.LOCK_SH)
            yield descriptor
        finally:
            os.close(descriptor)


def _explained_anchor(path: Path) -> AbstractContextManager[None]:
    rule = "nothing may be released before it is there and can be written"
    return os_errors_as(LedgerError, f"the ledger's anchor {path} cannot be used", rule)


def damaged(path: Path, problem: str) -> str:
    """Describe in one line a ledger that cannot be relied on."""
    return f"{path} is damaged ({' '.join(problem.split())}); release nothing, and restore it from a backup"


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn SQLite's errors into one line that says what to do."""
    try:
        yield
    except (sqlite3.Error, UnicodeDecodeError) as error:
        raise LedgerError(explain(path, error)) from error


def explain(path: Path, error: sqlite3.Error | UnicodeDecodeError) -> str:
    """Describe in one line what SQLite met at `path`, and what to do."""
    if isinstance(error, UnicodeDecodeError):  # SQLite's message quotes the damaged text, and Python cannot read it
        return damaged(path, "bytes that are no text where text belongs")
    name: str = getattr(error, "sqlite_errorname", "")
    said = " ".join(str(error).split())
    if name.startswith("SQLITE_NOTADB"):
        return f"{path} is not a ledger, or its first page is damaged; give another path or restore it from a backup"
    if name.startswith("SQLITE_CORRUPT") or said.startswith("no such"):
        return damaged(path, said)
    if name.startswith("SQLITE_FULL"):
        return f"no disk space to write the ledger {path}: nothing was recorded; free disk space and try again"
    if name.startswith("SQLITE_BUSY"):
        return f"{path} was locked by another process for {BUSY_TIMEOUT_S:.0f} s: nothing was recorded; try again"
    if name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM")):
        return f"{path} or its folder cannot be written by this user ({said}); make both writable"
    return (
        f"the ledger {path} cannot be read or written ({said}); free disk space, check the disk and try again; "
        "release nothing before"
    )
