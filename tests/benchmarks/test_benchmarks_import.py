"""Every benchmark can be imported: what it takes from the package is still there."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "benchmarks"
OPTIONAL = {"opacus", "pfl", "timm", "transformers", "triton"}


@pytest.mark.parametrize("name", sorted(path.stem for path in ROOT.glob("*.py")))
def test_it_imports(name: str) -> None:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in OPTIONAL:
            raise
        pytest.skip(f"needs {error.name}")
