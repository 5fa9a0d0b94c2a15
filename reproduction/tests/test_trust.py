"""Accuracy against ε by kind of trust: the runs of each line, and the kept figure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from reproduction import page, plot, trust

ROOT = Path(__file__).parents[2]


def test_each_line_has_its_trust_and_all_have_one_delta(tmp_path: Path) -> None:
    axis = trust.AXES["epsilon"]
    planned = trust.plan(axis, [0.5, 2.0], 2, tmp_path, [])
    assert {point: len(runs) for point, runs in planned.items()} == {
        (line, epsilon): 2 for line in axis.lines for epsilon in (0.5, 2.0)
    }
    configs = {line: planned[line, 0.5][0].config for line in axis.lines}
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
    for line in axis.lines:
        rates = [planned[line, epsilon][0].config.algorithm.server_lr for epsilon in (0.5, 2.0)]
        assert rates[0] == pytest.approx(rates[1] / 2)


def test_agents_share_the_same_records(tmp_path: Path) -> None:
    planned = trust.plan(trust.AXES["agents"], [10.0, 1000.0], 1, tmp_path, [])
    for (line, agents), (run,) in planned.items():
        federation, algorithm = run.config.federation, run.config.algorithm
        assert federation.agents == agents
        assert algorithm.batch * agents == trust.RECORDS  # every record in every step, as where settings were chosen
        turns = federation.rounds * federation.per_round // federation.agents
        assert turns == (9 if line == "local" else 60)
        assert run.config.privacy.colluders == (0 if line == "local" else agents / 5)
    rates = {point: run.config.algorithm.server_lr for point, (run,) in planned.items()}
    assert rates["local", 10.0] == pytest.approx(rates["local", 1000.0] * 10**0.5, rel=1e-3)


def test_the_clip_shrinks_with_what_is_uploaded(tmp_path: Path) -> None:
    planned = trust.plan(trust.AXES["bytes"], [0.04, 1.0], 1, tmp_path, [])
    for line in trust.AXES["bytes"].lines:
        clips = [planned[line, p][0].config.privacy.clip_value for p in (0.04, 1.0)]
        assert clips[0] == pytest.approx(clips[1] / 5)


@pytest.mark.parametrize("against", trust.AXES)
def test_the_pictures_show_the_kept_data(against: str) -> None:
    name = f"accuracy-by-{against}"
    found = json.loads((page.RESULTS / f"{name}.json").read_text("utf-8"))
    assert found["command"].startswith(f"python -m reproduction trust --against {against} ")
    drawn = (ROOT / "docs" / "figures" / f"{name}.svg").read_text("utf-8")
    assert plot.fingerprint(found) in drawn
    for line in trust.AXES[against].lines:
        assert line in drawn
