"""Every error that the page quotes is one that the code prints."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text("utf-8")
QUOTED = re.findall(r"^> `(.+)`$", PAGE, flags=re.M)


@cache
def texts() -> str:
    """All literal text in the package, a line for each piece between two values."""
    found = []
    for path in (ROOT / "src" / "fedspa").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(" ".join(node.value.split("\n")))
    return "\n".join(found)


@pytest.mark.parametrize("error", QUOTED)
def test_it_is_printed_so(error: str) -> None:
    for piece in error.split("…"):
        assert piece.strip() in texts(), piece


def test_every_quote_was_found() -> None:
    assert len(QUOTED) == PAGE.count("\n> ") >= 20
