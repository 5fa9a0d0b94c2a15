"""Accuracy against ε by kind of trust: the runs of each line, and the kept figure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from reproduction import page, plot, trust

ROOT = Path(__file__).parents[2]


def test_each_line_has_its_trust_and_all_have_one_delta(tmp_path: Path) -> None:
    planned = trust.plan([0.5, 2.0], 2, tmp_path, [])
    assert {point: len(runs) for point, runs in planned.items()} == {
        (line, epsilon): 2 for line in trust.LINES for epsilon in (0.5, 2.0)
    }
    configs = {line: planned[line, 0.5][0].config for line in trust.LINES}
    assert {config.privacy.delta for config in configs.values()} == {1e-5}
    assert {config.privacy.epsilon for config in configs.values()} == {0.5}
    terms = {
        line: (config.privacy.adversary, config.privacy.colluders, config.federation.per_round)
        for line, config in configs.items()
    }
    assert terms == {
        "central": ("local", 0, 1),
        "sums of 100, 20 colluding": ("secure-aggregation", 20, 100),
        "sums of 10, 2 colluding": ("secure-aggregation", 2, 10),
        "local": ("local", 0, 10),
    }
    for line in trust.LINES:
        rates = [planned[line, epsilon][0].config.algorithm.server_lr for epsilon in (0.5, 2.0)]
        assert rates[0] == pytest.approx(rates[1] / 2)


def test_the_picture_shows_the_kept_data() -> None:
    found = json.loads((page.RESULTS / "accuracy-by-trust.json").read_text("utf-8"))
    assert found["command"].startswith("python -m reproduction trust ")
    drawn = (ROOT / "docs" / "figures" / "accuracy-by-trust.svg").read_text("utf-8")
    assert plot.fingerprint(found) in drawn
    for line in trust.LINES:
        assert line in drawn
