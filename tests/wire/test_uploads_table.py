"""The table of bytes and accuracy in docs/wire.md is the kept result, line by line."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_docs_table_is_the_kept_result() -> None:
    spec = importlib.util.spec_from_file_location("uploads", ROOT / "benchmarks" / "uploads.py")
    assert spec is not None
    assert spec.loader is not None
    uploads = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(uploads)
    rows = json.loads((ROOT / "experiments" / "results" / "uploads.json").read_text("utf-8"))["rows"]
    assert uploads.markdown(rows) in (ROOT / "docs" / "wire.md").read_text("utf-8")
