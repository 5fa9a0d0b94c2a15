"""What goes wrong with a ledger's file, in lines that a user can act on."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedspa.errors import LedgerError

BUSY_TIMEOUT_S = 60.0  # another process may evaluate ε under the lock, a fraction of a second each time


def damaged(path: Path, problem: str) -> str:
    """One line about a ledger that cannot be relied on."""
    said = " ".join(problem.split())  # SQLite's checks speak in several lines
    return f"{path} is damaged ({said}); release nothing, and restore it from a backup"


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn what SQLite says into a line that a user can act on."""
    try:
        yield
    except (sqlite3.Error, UnicodeDecodeError) as error:
        raise LedgerError(explain(path, error)) from error


def explain(path: Path, error: sqlite3.Error | UnicodeDecodeError) -> str:
    """One line: what SQLite met at `path`, and what to do."""
    if isinstance(error, UnicodeDecodeError):  # SQLite's message quotes the damaged text, and Python cannot read it
        return damaged(path, "bytes that are no text where text belongs")
    name: str = getattr(error, "sqlite_errorname", "")
    said = " ".join(str(error).split())
    if name.startswith("SQLITE_NOTADB"):
        return f"{path} is not a ledger, or its first page is damaged; give another path or restore it from a backup"
    if name.startswith("SQLITE_CORRUPT"):
        return damaged(path, said)
    if name.startswith("SQLITE_FULL"):
        return f"no room to write the ledger {path}: nothing was recorded; free disk space and try again"
    if name.startswith("SQLITE_BUSY"):
        return f"{path} was locked by another process for {BUSY_TIMEOUT_S:.0f} s: nothing was recorded; try again"
    if name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM")):
        return f"{path} or its folder cannot be written by this user ({said}); make both writable"
    return (
        f"the ledger {path} cannot be read or written ({said}); free disk space, check the disk and try again; "
        "release nothing before"
    )
