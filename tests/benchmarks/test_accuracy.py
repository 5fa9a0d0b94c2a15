"""The kept results of docs/accuracy.md come from the configs as they are, and every one of those was audited."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import accuracy
import seeds
from fedspa.runs.config import load
from fedspa.runs.guarantee import SEEDED
from reproduction import rows

ROOT = Path(__file__).parents[2]


def test_every_config_was_audited_and_holds() -> None:
    kept = json.loads((ROOT / "reproduction" / "results" / "audits.json").read_text("utf-8"))
    assert kept["audits"].keys() == {**accuracy.ROWS, **accuracy.SUMS}.keys()
    assert not kept["provenance"]["commit"].endswith("+")
    for report in kept["audits"].values():
        assert report["holds"]
        assert all(check["holds"] for check in report["checks"])


@pytest.mark.parametrize("name", {**accuracy.ROWS, **accuracy.SUMS})
def test_kept_results_are_those_of_their_config(name: str) -> None:
    kept = json.loads((ROOT / "reproduction" / "results" / f"{name}.json").read_text("utf-8"))
    config = load(rows.find_config(name))
    assert config.data.holdout == 0
    assert not {run["seed"] for run in kept["summaries"]} & seeds.of_trials(seeds.LOG.read_text("utf-8"))
    for run in kept["summaries"]:
        assert run["rounds"] == config.federation.rounds
        assert run["private"] is True or run["not_private_because"] == SEEDED
        assert run["adversary"] == config.privacy.adversary
        assert run["neighbours"] == (config.privacy.neighbours or "add-remove")
        assert run["epsilon"] <= config.privacy.epsilon
        if not isinstance(config.algorithm.compression, list):
            assert run["compression"] == pytest.approx(config.algorithm.compression, abs=0.001)
        assert run["compression"] <= 0.1 or config.algorithm.compression == 1
