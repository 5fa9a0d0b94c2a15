"""docs/accuracy.md shows the kept results, and these come from the configs as they are."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from fedspa.runs.config import load

ROOT = Path(__file__).parents[2]


def _benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("accuracy", ROOT / "benchmarks" / "accuracy.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_is_the_kept_results() -> None:
    assert _benchmark().markdown() in (ROOT / "docs" / "accuracy.md").read_text("utf-8")


@pytest.mark.parametrize("name", _benchmark().ROWS)
def test_kept_results_are_those_of_their_config(name: str) -> None:
    kept = json.loads((ROOT / "experiments" / "results" / f"{name}.json").read_text("utf-8"))
    config = load(ROOT / "experiments" / f"{name}.toml")
    assert config.data.holdout == 0
    for seed, run in enumerate(kept["summaries"]):
        assert run["seed"] == seed
        assert run["rounds"] == config.federation.rounds
        assert run["private"] is True
        assert run["neighbours"] == (config.privacy.neighbours or "add-remove")
        assert run["epsilon"] <= config.privacy.epsilon
        if config.algorithm.layer_shares is None:
            assert run["compression"] == pytest.approx(config.algorithm.compression, abs=0.001)
        assert run["compression"] <= 0.1
