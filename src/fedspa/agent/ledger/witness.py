"""A ledger's witness: a small file beside it that knows how far the ledger had come when a spend was acknowledged.

SQLite drops the tail of a damaged write-ahead log without a word, and an old copy of a database is a whole database:
the chain of hashes says of neither that its end is missing. The witness does. After each commit, and before the caller
is told, it is brought to the ledger's head (entries, releases, hash of the newest entry) and forced to the disk; a
ledger that lies behind its witness has lost what it acknowledged, and is refused. One that lies ahead was killed
between its commit and its witness, and lacks nothing.

Two slots on pages of their own are written in turn, each with a checksum: a write that is torn leaves the other.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import sqlite3
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from fedspa import durable
from fedspa.errors import LedgerError, worded

GENESIS = hashlib.sha256(b"fedspa ledger").hexdigest()  # the hash of no entries
REMEDY = (
    "put the newest copy of both files back; if they are gone for good and you know what was spent since, see "
    "`fedspa ledger accept-loss --help`"
)

_SLOTS = (0, 4096)
_SLOT_BYTES = 512
_LINE = re.compile(
    rb"(fedspa ledger witness 1, ledger ([0-9a-f]{32}), entries (\d{1,18}), releases (\d{1,18}), "
    rb"hash ([0-9a-f]{64}), checksum )([0-9a-f]{64})\n"
)


@dataclass(frozen=True, slots=True)
class Head:
    """How far a ledger has come."""

    entries: int
    releases: int
    hash: str

    @property
    def writes(self) -> int:
        """Grows with each entry and each release: of two heads of one ledger, the later has more."""
        return self.entries + self.releases


@dataclass(frozen=True, slots=True)
class Witness:
    """What a witness says: of the ledger with this name, at least this much was acknowledged."""

    ledger: str
    head: Head


def path_of(ledger: Path) -> Path:
    return ledger.parent / f"{ledger.name}.witness"  # a folder such as "." has no name to change


def make(ledger: Path, witness: Witness) -> None:
    """Put a witness beside the ledger, whole or not at all; one that is there is replaced."""
    path = path_of(ledger)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}.new")
    with _explained(path):
        try:
            descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL, os.stat(ledger).st_mode & 0o777)
            try:
                for place in _SLOTS:
                    os.pwrite(descriptor, _encoded(witness), place)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.replace(draft, path)
        finally:
            draft.unlink(missing_ok=True)
        durable.force_folder(path.parent)


def read(ledger: Path) -> Witness | None:
    """What the witness of this ledger says; None where there is none, a LedgerError where it cannot be read."""
    path = path_of(ledger)
    if not path.exists():
        return None
    with _opened(path, os.O_RDONLY) as descriptor:
        return _newest(path, _slots(descriptor))


def advance(ledger: Path, witness: Witness, *, force: bool) -> None:
    """Bring the witness to `witness`, on the disk with `force`; one that another process brought further stays so."""
    path = path_of(ledger)
    with _opened(path, os.O_RDWR) as descriptor:
        slots = _slots(descriptor)
        newest = _newest(path, slots)
        if newest.ledger != witness.ledger:
            raise LedgerError(f"{path} is another ledger's witness now; put the right one back, and release nothing")
        if newest.head.writes < witness.head.writes:
            os.pwrite(descriptor, _encoded(witness), _SLOTS[1 - slots.index(newest)])
        if force:  # also what another process wrote, which may have waited for no disk, or died before it had
            os.fsync(descriptor)


def name(connection: sqlite3.Connection) -> str | None:
    """Return the name of the ledger; None where it is new and was never opened to write."""
    row = connection.execute("SELECT name FROM identity").fetchone()
    return None if row is None else str(row[0])


def head(connection: sqlite3.Connection) -> Head:
    row = connection.execute("SELECT entries, releases, hash FROM head").fetchone()
    return Head(0, 0, "") if row is None else Head(*row)


def lost(path: Path, connection: sqlite3.Connection, own: str | None, seen: Witness | None) -> str | None:
    """What the ledger of the name `own` lacks of what its witness has seen, in words; None where nothing."""
    file = path_of(path).name
    if seen is None:
        # A witness that was made since the caller looked for it is that of a ledger that got its name meanwhile.
        if own is None or path_of(path).exists():
            return None
        entries = head(connection).entries
        return f"its witness {file} is missing, so whether there were more than its {entries} entries cannot be told"
    if own is not None and seen.ledger != own:
        return f"its witness {file} is another ledger's, or the ledger was replaced by another"
    now, then = head(connection), seen.head
    if now.entries < then.entries:
        return (
            f"it acknowledged {then.entries} entries and holds {now.entries}: {then.entries - now.entries} spends are "
            "missing"
        )
    link = connection.execute("SELECT hash FROM entry WHERE sequence = ?", (then.entries,)).fetchone()
    if (link[0] if link is not None else GENESIS if then.entries == 0 else None) != then.hash:
        return f"entry {then.entries} is not the one that it acknowledged"
    if now.releases < then.releases:
        return f"it acknowledged {then.releases} releases and holds {now.releases}"
    return None


def require(path: Path, connection: sqlite3.Connection, own: str | None, seen: Witness | None) -> None:
    """Raise where the ledger has lost what it acknowledged. `seen` was read before the view that is looked at."""
    if (problem := lost(path, connection, own, seen)) is not None:
        raise LedgerError(f"{path} cannot be relied on: {problem}; {REMEDY}")


def _encoded(witness: Witness) -> bytes:
    head = witness.head
    text = (
        f"fedspa ledger witness 1, ledger {witness.ledger}, entries {head.entries}, releases {head.releases}, "
        f"hash {head.hash}, checksum "
    ).encode("ascii")
    return (text + hashlib.sha256(text).hexdigest().encode("ascii") + b"\n").ljust(_SLOT_BYTES, b"\n")


def _slots(descriptor: int) -> list[Witness | None]:
    return [_decoded(os.pread(descriptor, _SLOT_BYTES, place)) for place in _SLOTS]


def _decoded(slot: bytes) -> Witness | None:
    """None where the slot is damaged, or was torn by a kill while it was written."""
    found = _LINE.match(slot)
    if found is None or hashlib.sha256(found[1]).hexdigest().encode("ascii") != found[6]:
        return None
    return Witness(found[2].decode(), Head(int(found[3]), int(found[4]), found[5].decode()))


def _newest(path: Path, slots: list[Witness | None]) -> Witness:
    whole = [slot for slot in slots if slot is not None]
    if not whole:
        raise LedgerError(f"{path} is damaged: whether its ledger is whole cannot be told; {REMEDY}")
    return max(whole, key=lambda slot: slot.head.writes)


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    """The file, locked against a write by another process (shared among readers)."""
    with _explained(path):
        descriptor = os.open(path, flags)
        try:
            if os.name == "posix":
                import fcntl

                fcntl.flock(descriptor, fcntl.LOCK_EX if flags & os.O_RDWR else fcntl.LOCK_SH)
            yield descriptor
        finally:
            os.close(descriptor)


def _explained(path: Path) -> AbstractContextManager[None]:
    rule = "nothing may be released before it is there and can be written"
    return worded(LedgerError, lambda why: f"the ledger's witness {path} cannot be used: {why}; {rule}")
