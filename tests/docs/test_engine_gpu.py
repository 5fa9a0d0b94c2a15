"""docs/engine-gpu.md names the command of its kept measurements (tests/benchmarks/test_tables.py holds its figures)."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_command_is_that_of_the_results() -> None:
    found = json.loads((ROOT / "reproduction" / "results" / "engine-gpu.json").read_text("utf-8"))
    assert found["command"] in (ROOT / "docs" / "engine-gpu.md").read_text("utf-8")
