"""Settings that a config leaves out follow from public numbers, and a run writes which."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import fedspa
from fedspa.cli import app
from fedspa.runs.config import load
from fedspa.runs.defaults import FOLLOWING, noise_to_signal, rounds_with
from fedspa.runs.setup import prepare
from fedspa.tuning.suggest import suggest_for


def given(**sections: dict[str, Any]) -> dict[str, dict[str, Any]]:
    asked = {"federation": {"agents": 8, "rounds": 3}, "privacy": {"epsilon": 2.0, "noise": "seeded"}}
    return {name: {**asked.get(name, {}), **sections.get(name, {})} for name in {*asked, *sections}}


def test_every_record_in_each_step_and_as_far_as_noise_lets_it(tmp_path: Path) -> None:
    result = fedspa.run(given(run={"out": str(tmp_path / "run")}))
    config, plan = load(result.folder / "config.toml"), prepare(load(given())).plan
    algorithm = config.algorithm
    assert (algorithm.batch, algorithm.local_steps, algorithm.server_lr) == (plan.records, 5, 1.0)
    assert config.run.chosen == sorted(FOLLOWING)
    ratio = noise_to_signal(plan.noise_multiplier, plan.dimension, plan.batch, 3 * 8, 5)
    walk = algorithm.local_lr * config.privacy.clip_value * 3 * 5
    assert walk == pytest.approx(min(10 / ratio, 5 * 3 * 5), rel=0.01)
    assert result.summary["score_last"] > 0.6


def test_what_is_set_stays_and_the_rate_follows_from_it() -> None:
    free, shorter = (prepare(load(given(algorithm=keys))).config.algorithm for keys in ({}, {"local_lr": 0.5}))
    assert 0.5 * shorter.server_lr == pytest.approx(free.local_lr, rel=0.01)
    sums = {"privacy": {**given()["privacy"], "adversary": "secure-aggregation"}, "federation": given()["federation"]}
    assert prepare(load(sums)).config.algorithm.local_steps == 1
    for keys in ({"server_lr": 0.3}, {"server": "adam"}, {"name": "fedavg", "server_lr": 1.0}):
        privacy = {} if "name" in keys else given()["privacy"]
        asked = load({"federation": {"agents": 8}, "algorithm": keys, "privacy": privacy})
        found = prepare(asked).config
        assert (found.algorithm.ema, found.privacy.clip_value) == (0.0, 1.0)
        assert found.algorithm.server == asked.algorithm.server
        assert ("algorithm.batch" in found.run.chosen) == ("name" not in keys)


@pytest.mark.parametrize(("epsilon", "expected"), [(0.5, 0.0), (8.0, 0.75)])
def test_momentum_takes_sums_as_far_as_noise_lets_them(epsilon: float, expected: float, tmp_path: Path) -> None:
    """One step in a round, of length 5 at most, is too short at little noise. Sums then do no worse than local runs."""
    privacy = {"epsilon": epsilon, "delta": 1e-5, "noise": "seeded"}
    sums = {"privacy": {**privacy, "adversary": "secure-aggregation"}, "algorithm": {"mask": "shared"}}
    job = prepare(load(sums))
    algorithm, plan = job.config.algorithm, job.plan
    momentum = algorithm.server_options.beta1 if algorithm.server == "momentum" else 0.0
    assert momentum == expected
    assert ("algorithm.server_options.beta1" in job.config.run.chosen) == (expected > 0)
    step = algorithm.local_lr * job.config.privacy.clip_value
    assert step <= 5
    ratio = noise_to_signal(plan.noise_multiplier, plan.dimension, plan.batch, 40 * 10, 1)
    assert step * rounds_with(momentum, 40) == pytest.approx(min(10 / ratio, 500), rel=0.01)
    found = [
        fedspa.run({**each, "run": {"out": str(tmp_path / name)}}).summary["score_last"]
        for name, each in (("sums", sums), ("local", {"privacy": privacy}))
    ]
    assert found[0] > found[1]


def test_rounds_and_cohort_follow_from_the_agents() -> None:
    for agents, per_round, rounds in ((4, 4, 40), (100, 10, 50), (1000, 100, 50)):
        found = load({"federation": {"agents": agents}, "privacy": {"epsilon": 1.0}}).federation
        assert (found.per_round, found.rounds) == (per_round, rounds)


def test_a_suggestion_for_a_config_is_what_its_run_takes(tmp_path: Path) -> None:
    asked = given(algorithm={"local_steps": 20, "local_lr": 0.3}, privacy={"clip_value": 7.0})
    found = suggest_for(load(asked))
    assert found.settings == suggest_for(load(given())).settings
    config = prepare(load(given())).config
    assert found.settings["algorithm.local_lr"] == config.algorithm.local_lr
    path = tmp_path / "config.toml"
    path.write_text('[federation]\nagents = 8\nrounds = 3\n[privacy]\nepsilon = 2.0\nnoise = "seeded"\n')
    stated = json.loads(CliRunner().invoke(app, ["suggest", str(path), "--json"]).stdout)
    assert stated["settings"] == found.settings
    assert stated["smallest"] is None or "holds" in stated["smallest"]
    refused = CliRunner().invoke(app, ["suggest", str(path), "--agents", "3"])
    assert "--agents and CONFIG" in str(refused.exception)
    missing = CliRunner().invoke(app, ["suggest", "--agents", "3"])
    assert "--records, --parameters, --epsilon missing" in str(missing.exception)


def test_it_says_what_the_smallest_agent_costs() -> None:
    import numpy as np

    x, y = np.random.default_rng(0).normal(size=(500, 3)), np.arange(500) % 2
    owners = np.repeat(["north", "south", "west"], [50, 200, 250])
    data = fedspa.from_arrays(x, y, x[:50], y[:50], name="three", owners=owners)
    found = suggest_for(load({"federation": {"agents": 3}, "privacy": {"epsilon": 2.0}}), data)
    assert found.smallest.startswith("north holds 50 records, the next 200")
    assert found.settings["algorithm.batch"] == 50
