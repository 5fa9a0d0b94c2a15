"""Every promise of SECURITY.md names a test, and that test is there."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "SECURITY.md").read_text("utf-8")
TABLE = PAGE.partition("## Which test holds which promise")[2]


def test_the_tests_of_the_promises_are_there() -> None:
    named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", TABLE)
    assert len(named) > 50
    for file, name in named:
        assert re.search(rf"^ *(?:async )?def {name}\(", (TESTS / file).read_text("utf-8"), re.M), f"{file}::{name}"


def test_every_adversary_and_every_promise_has_a_row() -> None:
    """Sections under "Who may be malicious" that promise something, and those after it that do."""
    rows = [row.split(" | ") for row in re.findall(r"^\| (.*) \|$", TABLE, re.M)[1:]]
    sections = [row[0].strip("*| ") for row in rows if row[0].startswith("**")]
    asked = re.findall(r"^### (.+)$", PAGE, re.M)
    assert len(asked) > 8
    assert set(asked) - set(sections) == {"Who can read the process"}  # to whom nothing is promised
    assert set(sections) - set(asked) == {"Under secure aggregation", "What the guarantee rests on", "After a crash"}
    for row in rows:
        assert row[0].startswith("**") or "::test_" in row[1], row
    for promise in re.findall(r"^- \*\*(.+?)\*\*", PAGE.partition("### The server")[2].partition("###")[0], re.M):
        words = long_words(promise)
        assert any(len(words & long_words(row[0])) >= min(2, len(words)) for row in rows), promise


def long_words(text: str) -> set[str]:
    return set(re.findall(r"[\w-]{5,}", text.lower()))
