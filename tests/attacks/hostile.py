"""What the tests of bad input share."""

from __future__ import annotations

from pathlib import Path

from fedspa.errors import FedspaError

LONG = "x" * 300  # longer than any file system takes for a name


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def one_line(error: FedspaError) -> None:
    text = str(error)
    assert text.isprintable(), text
    assert 0 < len(text) < 2000, text
