"""An ε that was measured is shown by `shown` and its kin, which round up. A format in an f-string may round down."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# A figure of a summary, a result or a total with a number of digits; what a user asked for has no such key.
ROUNDED = re.compile(r"""\{[^{}]*\[["']epsilon[a-z_]*["']\]\s*:[^{}]*\}""")


@pytest.mark.parametrize("folder", ["src", "benchmarks", "examples"])
def test_no_figure_of_a_run_is_rounded_to_the_nearest(folder: str) -> None:
    files = [path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".ipynb")]
    assert files
    found = [f"{path}: {hit}" for path in files for hit in ROUNDED.findall(path.read_text("utf-8").replace('\\"', '"'))]
    assert found == []


def test_the_pattern_sees_one() -> None:
    assert ROUNDED.search("print(f\"ε = {summary['epsilon']:.2f}\")")
    assert ROUNDED.search("{run['epsilon_replace_one']:.4f}")
    assert not ROUNDED.search("{shown(run['epsilon'])}, {run['delta']:g}")
