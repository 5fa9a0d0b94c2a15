"""The table that runs give: figures side by side, costs by the paper's formula and as sent, and honest notes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import small_table
from typer.testing import CliRunner

from fedspa.data import plugin
from fedspa.errors import ConfigError
from fedspa.runs.config import load
from reproduction import cells, rows
from reproduction.__main__ import app
from reproduction.sweep import Outcome
from reproduction.theorem1 import published_noise


def call(*words: str) -> str:
    result = CliRunner().invoke(app, ["table", *words, "--device", "cpu"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("table")
    path = small_table.write(folder)
    found = json.loads(call(str(path), "--seeds", "2", "--out", str(folder / "out"), "--json"))
    return path, folder / "out", found


def test_every_row_and_setting_is_there(small: tuple[Path, Path, dict[str, Any]]) -> None:
    _, out, found = small
    assert json.loads((out / "table.json").read_text("utf-8")) == found
    cells_of = {row["algorithm"]: {"published", "verified"} & row.keys() for row in found["rows"]}
    assert cells_of == {"fedspa": {"published", "verified"}, "dp-fed": {"verified"}, "fedavg": {"published"}}
    sparse, dense, plain = found["rows"]
    assert (sparse["published"]["sound"], sparse["verified"]["sound"]) == (False, True)
    sizes = {"batch": 10, "records": 240, "steps": 2, "participations": sparse["published"]["participations_max"]}
    noise = published_noise(sparse["published"]["epsilon_published"], 1e-3, **sizes)
    assert noise == pytest.approx(6.0)
    assert sparse["verified"]["epsilon"] <= 4.0
    assert plain["published"]["epsilon"] is None
    assert plain["published"]["sound"] is False
    for cell in (sparse["published"], sparse["verified"], dense["verified"], plain["published"]):
        best, last = cell["accuracy_best"], cell["accuracy_last"]
        assert len(best["values"]) == cell["seeds"] == 2
        assert all(one >= other for one, other in zip(best["values"], last["values"]))
    assert found["command"].endswith("small.toml --seeds 2")
    assert found["hardware"]


def outcome(**summary: Any) -> Outcome:
    told = {"accuracy_best": 0.9, "accuracy_last": 0.8, "payload_bytes": 1, "uplink_bytes": 1, "seconds": 1}
    told |= {"private": True, "epsilon": 1.0, "epsilon_replace_one": 2.0, "participations_max": 5}
    return Outcome("done", "", {**told, **summary})


def test_a_cell_states_what_the_worst_of_its_seeds_paid() -> None:
    config = load({"privacy": {"epsilon": 1.0}})
    paid = outcome(epsilon=1.5, epsilon_replace_one=2.5, epsilon_published=3.0, participations_max=6, private=False)
    found = cells.cell(config, [outcome(epsilon_published=2.0), paid], 2)
    assert (found["epsilon"], found["epsilon_replace_one"], found["epsilon_published"]) == (1.5, 2.5, 3.0)
    assert (found["participations_max"], found["private"], found["sound"]) == (6, False, False)


def test_a_cell_with_a_seed_that_has_no_epsilon_has_none() -> None:
    """The largest of those that have one would be no bound of the other."""
    config = load({"privacy": {"epsilon": 1.0}})
    found = cells.cell(config, [outcome(), outcome(epsilon=None, epsilon_replace_one=None)], 2)
    assert found["epsilon"] is None
    assert found["epsilon_replace_one"] is None


def test_quick_is_quick_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = small_table.write(tmp_path)
    text = call(str(path), "--quick", "--rows", "fedavg")
    assert "Nothing follows" in text
    found = json.loads((tmp_path / "runs" / "table-small-quick" / "table.json").read_text("utf-8"))
    assert (found["quick"], found["rows"][0]["published"]["rounds"]) == (True, 1)


# Rows under secure aggregation: run with the protocol, and both their ε shown; rows that were only priced say so.

CONFIG = """
[federation]
agents = 3
rounds = 2
per_round = 3
[algorithm]
name = "cpsgd"
local_steps = 1
batch = 10
local_lr = 1.0
[algorithm.options]
bits = 4
[privacy]
noise = "seeded"
sampling = "fixed"
clip = "coordinate"
clip_value = 0.05
[run]
engine = "generic"
threads = 1
"""


SHARES = [
    "algorithm.name=fedspa",
    "algorithm.options=none",
    "algorithm.compression=0.2",
    "algorithm.mask=shared",
    "algorithm.batch=480",
]


SHARES += ["privacy.sampling=poisson", "privacy.clip=l2", "privacy.epsilon=4.0"]


TRIALS, SECURE = "algorithm.options.trials=1000", "privacy.adversary=secure-aggregation"


TABLE = f"""
title = "Sums"
data = "digits"
quick = []
stand_in = "reproduction.stand_in:mnist"
curve = "base.toml"
[[row]]
algorithm = "cpsgd"
compression = 1.0
adversary = "secure-aggregation"
verified = {{ config = "base.toml", set = ["{TRIALS}", "{SECURE}"] }}
[[row]]
algorithm = "cpsgd"
compression = 1.0
verified = {{ config = "base.toml", set = ["{TRIALS}"] }}
[[row]]
algorithm = "fedspa"
compression = 0.2
adversary = "secure-aggregation"
tuned = {{ config = "base.toml", set = {json.dumps([*SHARES, SECURE, "privacy.colluders=1"])} }}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    folder = tmp_path_factory.mktemp("sums")
    (folder / "base.toml").write_text(CONFIG)
    (folder / "sums.toml").write_text(TABLE)
    words = ["table", str(folder / "sums.toml"), "--seeds", "2", "--device", "cpu", "--out", str(folder / "out")]
    first = CliRunner().invoke(app, [*words, "--json"], catch_exceptions=False)
    assert first.exit_code == 0, first.output
    return folder, json.loads(first.stdout), CliRunner().invoke(app, words, catch_exceptions=False).stdout


def test_the_protocol_is_run(run: tuple[Path, dict[str, Any], str]) -> None:
    folder, found, _ = run
    binomial, local, shares = found["rows"]
    assert (binomial["verified"]["members"], binomial["verified"]["colluders"]) == (3, 0)
    assert (shares["tuned"]["members"], shares["tuned"]["colluders"]) == (3, 1)
    assert local["verified"]["members"] is None
    for cell in (binomial["verified"], local["verified"], shares["tuned"]):
        assert cell["status"] == "done"
        assert cell["sound"]
    assert binomial["verified"]["epsilon"] < local["verified"]["epsilon"]  # three agents' noise, and one's
    assert binomial["verified"]["epsilon_worst_case"] == local["verified"]["epsilon"]
    assert shares["tuned"]["epsilon"] <= 4.0
    for cell in (binomial["verified"], shares["tuned"]):
        assert cell["epsilon_worst_case"] > cell["epsilon"]
        assert cell["first_seed"] == 2000
    seeds = {path.name.rpartition("-")[2] for path in (folder / "out" / "runs").glob("*secure-aggregation*")}
    assert seeds == {"2000", "2001"}


def row(**cell: Any) -> dict[str, Any]:
    return {"algorithm": "cpsgd", "compression": 0.4, "adversary": "secure-aggregation", "published": cell}


# Tables as data: the two of the paper are complete, and files that are no tables are refused in one line.

# Tables 1 and 2 of the paper, read off its page: (algorithm, p) → accuracy, cost, ε.
PRINTED = {
    "mnist": {
        ("fedspa", 0.05): (92.65, 0.0197, 1.0),
        ("fedspa", 0.1): (92.16, 0.0393, 1.0),
        ("fedspa", 0.4): (94.84, 0.1572, 1.0),
        ("fedspa", 1.0): (94.70, 0.3931, 1.0),
        ("cpsgd", 0.4): (87.32, 1.5720, 3.63),
        ("cpsgd", 1.0): (88.48, 3.9310, 2.26),
        ("dp-fed", 1.0): (91.41, 0.3931, 1.0),
        ("fedavg", 1.0): (96.87, 0.3931, None),
    },
    "cifar10": {
        ("fedspa", 0.05): (63.0, None, 1.0),
        ("fedspa", 0.1): (63.28, 2.15, 1.0),
        ("fedspa", 0.4): (64.36, 8.60, 1.0),
        ("fedspa", 1.0): (62.06, 21.50, 1.0),
        ("cpsgd", 0.4): (35.74, 86.02, 258.0),
        ("cpsgd", 1.0): (37.17, 215.04, 39.77),
        ("dp-fed", 1.0): (61.13, 21.50, 1.0),
        ("fedavg", 1.0): (67.16, 21.50, None),
    },
}


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_rows_carry_what_is_printed(name: str) -> None:
    for row in rows.read(rows.find_table(name)).row:
        printed = (row.printed.accuracy, row.printed.cost, row.printed.epsilon)
        if row.printed.diverged:
            assert row.algorithm == "cpsgd"
            assert row.compression in (0.05, 0.1)
            assert printed == (None, None, None)
        elif (row.algorithm == "cpsgd") != (row.adversary == "secure-aggregation"):  # ours: the paper has no such row
            assert printed == (None, None, None)
        else:
            assert printed == PRINTED[name][row.algorithm, row.compression], row.key


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_settings_are_what_they_are_called(name: str) -> None:
    """Published: the paper's noise and clip, not sound. Verified: (1.0, 1e-3) by a sound accountant."""
    path = rows.find_table(name)
    spec = rows.read(path)
    federation = (100, 45 if name == "mnist" else 200, 10)
    for row in spec.row:
        if row.algorithm == "cpsgd" or row.adversary != "local":
            continue
        for setting in rows.TRIAL_KINDS:
            if (trial := row.trials.get(setting)) is None:
                assert row.algorithm == "fedavg" or setting == "tuned"
                continue
            config = rows.trial_config(path, trial, [])
            assert config.algorithm.name == row.algorithm
            assert config.algorithm.compression == row.compression
            if setting != "tuned":
                assert (config.federation.agents, config.federation.rounds, config.federation.per_round) == federation
                assert config.model.name.endswith(f"{name}-cnn") or config.model.name.endswith(f"{name}_cnn")
            if row.algorithm == "fedavg":
                continue
            published = setting == "published"
            assert (config.privacy.epsilon, config.privacy.delta) == (None if published else 1.0, 1e-3)
            if published:
                batch, records, steps, times = (10, 600, 300, 5) if name == "mnist" else (50, 500, 50, 20)
                sizes = {"batch": batch, "records": records, "steps": steps, "participations": times}
                noise = published_noise(1.0, 1e-3, **sizes)
                assert config.privacy.noise_multiplier == pytest.approx(noise, rel=1e-4)
                assert config.privacy.clip_value == (0.0113 if name == "mnist" else 0.0006)  # median_clip.py
                assert (config.algorithm.local_steps, config.algorithm.batch, config.algorithm.local_lr) == (
                    (300, 10, 0.01) if name == "mnist" else (50, 50, 0.1)
                )
    assert plugin.resolve(spec.stand_in, key="stand_in", error=ConfigError)


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_rows_run_against_the_adversary_that_they_name(name: str) -> None:
    """cpSGD's of the paper with the protocol, over all agents; Fed-SPA beside them; at (1.0, 1e-3) where sound."""
    path = rows.find_table(name)
    summed = []
    for row in rows.read(path).row:
        for setting, trial in row.trials.items():
            config = rows.trial_config(path, trial, [])
            assert config.privacy.adversary == row.adversary, row.key
            if row.adversary == "local":
                continue
            summed.append(row.algorithm)
            assert (config.privacy.colluders, config.privacy.members) == (0, None)
            assert config.federation.per_round == (100 if row.algorithm == "cpsgd" else 10)
            if setting != "published":
                assert (config.privacy.epsilon, config.privacy.delta) == (1.0, 1e-3)
    assert summed.count("cpsgd") == 5
    assert "fedspa" in summed


def test_every_config_that_a_table_names_is_found() -> None:
    named = set()
    for name in rows.table_names():
        path = rows.find_table(name)
        spec = rows.read(path)
        trials = [trial for row in spec.row for trial in row.trials.values()]
        named |= {rows.config_of(path, file).resolve() for file in (spec.curve, *(trial.config for trial in trials))}
    assert len(named) >= 12
    for path in named:
        assert rows.find_config(path.stem).resolve() == path
