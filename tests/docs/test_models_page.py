"""The page on models: its code runs, and its table is what happens."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text("utf-8")


def test_its_code_runs(capsys: pytest.CaptureFixture[str]) -> None:
    [code] = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.M | re.S)
    exec(code, {})
    found, changed = capsys.readouterr().out.splitlines()
    assert found.startswith("the module's layer '1' (BatchNorm2d) mixes the examples of a batch")
    assert changed.startswith("1: BatchNorm2d(16) became GroupNorm(4, 16)")
