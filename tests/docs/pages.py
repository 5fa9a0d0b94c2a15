"""Parts of the documentation's pages, for tests that run or compare them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", flags=re.M | re.S)


def section(page: str, title: str | None = None) -> str:
    """Return a page of docs/, or one section of it with everything below its heading."""
    text = (ROOT / "docs" / page).read_text("utf-8")
    if title is None:
        return text
    heading = re.search(rf"^(#+) {re.escape(title)}$", text, flags=re.M)
    assert heading is not None, f"{page} has no heading {title!r}"
    rest = text[heading.end() :]
    end = re.search(rf"^#{{1,{len(heading[1])}}} [^\n]*$", _without_code(rest), flags=re.M)
    return rest if end is None else rest[: end.start()]


def _without_code(text: str) -> str:
    """Blank out code blocks, keeping every position: a comment in them is no heading."""
    return re.sub(r"^```.*?^```$", lambda block: re.sub(r"[^\n]", " ", block[0]), text, flags=re.M | re.S)


def blocks(text: str, language: str) -> list[str]:
    """Return the untitled code blocks of one language."""
    return [body for kind, title, body in _BLOCK.findall(text) if kind == language and not title]


def titled(text: str) -> dict[str, str]:
    """Return the code blocks that have a title, by it: files of an example, or `printed`."""
    return {title: body for _, title, body in _BLOCK.findall(text) if title}


def write_files(text: str, folder: Path) -> dict[str, str]:
    """Write the titled blocks into a folder and return them."""
    found = titled(text)
    for name, body in found.items():
        (folder / name).write_text(body, "utf-8")
    return found
