"""How a run ended before its last round, for whoever looks at its folder: ended.json. One that was killed left none."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Literal

from fedspa import durable
from fedspa.errors import FedspaError, place_of, printable

Ending = Literal["stopped", "failed"]
FILE = "ended.json"


class Stopping(FedspaError):
    """What a run raises that was asked to stop and did: its end, and no failure."""


def note(folder: Path, error: BaseException) -> None:
    """Beside the run, whatever becomes of the exception. A disk that takes no more is no reason to hide the error."""
    how: Ending = "failed" if isinstance(error, Exception) and not isinstance(error, Stopping) else "stopped"
    with suppress(OSError):
        durable.replace_text(folder / FILE, json.dumps({"ended": how, "why": _why(error)}) + "\n")


def _why(error: BaseException) -> str:
    """What fedspa says itself. Of foreign code the kind and the place: its words may quote a record, and the folder is
    one that is shown around."""
    root = error.__cause__ or error
    if isinstance(error, FedspaError) and isinstance(root, FedspaError):
        return str(error)
    place = place_of(root)
    return type(root).__name__ + ("" if place is None else f" at {place}")


def clear(folder: Path) -> None:
    """It goes on."""
    (folder / FILE).unlink(missing_ok=True)


def read(folder: Path) -> tuple[Ending, str] | None:
    """How the run in `folder` ended, and why; None where it left no word."""
    try:
        found = json.loads((folder / FILE).read_bytes())
        how, why = found["ended"], str(found["why"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return (how, printable(why)) if how in ("stopped", "failed") else None
