"""The reference is made from the code: every key has a meaning, every command and option a line."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from fedspa.runs.config import Config

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))

import reference


def test_every_key_of_a_config_has_a_meaning() -> None:
    for name, section in Config.model_fields.items():
        for key, about in section.annotation.model_fields.items():  # type: ignore[union-attr]
            assert about.description, f"say what {name}.{key} means, by Field(description=…) in runs/sections.py"
            assert about.description[-1] == "."


def test_values_and_defaults_are_those_of_the_code() -> None:
    table = reference.config()
    assert "| `local_lr` | float, ≥ 1e-10, ≤ 1e+10 | `0.1` |" in table
    assert '| `sampling` | `poisson` `fixed` | `"poisson"` |' in table
    assert "| `agents` | int, ≥ 1, ≤ 1e+07 | `10` |" in table
    assert "| `epsilon` | float, ≥ 1e-06, ≤ 1e+06 | – |" in table
    assert "| `table.columns` | table | – |" in table
    assert "| `seed` | int, ≥ 0, < 2^64 | `0` |" in table
    assert table.count("\n## [") + 1 == len(Config.model_fields)


def test_every_command_is_there_with_its_options() -> None:
    text = reference.cli()
    headings = re.findall(r"^## (.+)$", text, flags=re.M)
    assert {"fedspa run", "fedspa ledger show", "fedspa doctor", "fedspa new"} <= set(headings)
    assert "| `--batch` | integer | required |" in text
    assert "\n    fedspa audit --self-test\n" in text
    assert not re.search(r"^\| .* \|  \|$", text, flags=re.M)  # an option without a word of help
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {5}  # a stray bar would shift the columns


def test_markers_are_filled_and_the_rest_stays() -> None:
    page = "before\n<!-- reference: config -->\nsee elsewhere\n<!-- end -->\nafter\n"
    filled = reference.filled(page)
    assert filled.startswith("before\n<!-- reference: config -->\n## [federation]")
    assert filled.endswith("<!-- end -->\nafter\n")
    assert "elsewhere" not in filled
    assert reference.filled(filled) == filled


@pytest.mark.parametrize("page", reference.PAGES, ids=lambda page: page.stem)
def test_the_pages_are_up_to_date(page: Path) -> None:
    """After a change of keys or commands: python docs/reference.py."""
    text = page.read_text("utf-8")
    assert "<!-- reference: " in text
    assert text == reference.filled(text)
