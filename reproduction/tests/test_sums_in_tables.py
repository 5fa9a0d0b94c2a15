"""Rows under secure aggregation: run with the protocol, and both their ε shown; rows that were only priced say so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedspa.runs.config import load
from reproduction import cells, rows, table
from reproduction.__main__ import app
from reproduction.sweep import Outcome

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
    assert binomial["verified"]["epsilon_floor"] == local["verified"]["epsilon"]
    assert shares["tuned"]["epsilon"] <= 4.0
    for cell in (binomial["verified"], shares["tuned"]):
        assert cell["epsilon_floor"] > cell["epsilon"]
        assert cell["first_seed"] == 2000
    seeds = {path.name.rpartition("-")[2] for path in (folder / "out" / "runs").glob("*secure-aggregation*")}
    assert seeds == {"2000", "2001"}


def test_both_epsilons_are_shown(run: tuple[Path, dict[str, Any], str]) -> None:
    _, found, screen = run
    binomial, local, shares = table.epsilon_lines(found)
    assert binomial[0] == "cpSGD, secure aggregation"
    assert local[0] == "cpSGD"
    assert shares[0] == "Fed-SPA, secure aggregation"
    assert "(floor " in binomial[-2]
    assert "(floor " in shares[-1]
    assert "floor" not in local[-2]
    (note,) = [line for line in table.notes(found) if "floor" in line]
    assert "3 members (0 collude) in cpSGD's, 3 members (1 collude) in Fed-SPA's" in note
    assert not any("Priced only" in line for line in table.notes(found))
    assert "floor" in screen
    assert max(len(line) for line in screen.splitlines() if "Files:" not in line) <= 80


def row(**cell: Any) -> dict[str, Any]:
    return {"algorithm": "cpsgd", "compression": 0.4, "adversary": "secure-aggregation", "published": cell}


def test_a_floor_without_end() -> None:
    cell = {"epsilon": 14.8565, "epsilon_floor": None, "members": 100, "colluders": 0}
    assert table.epsilon(row(**cell), "published") == "14.857 (floor ∞)"


def test_what_was_only_priced_says_so() -> None:
    """Results of editions that had no protocol name no members."""
    old = row(epsilon=0.2265, seeds=1, status="done", reason="")
    assert table.epsilon(old, "published") == "0.227 (priced only)"
    notes = table.notes({"rows": [old], "quick": False})
    assert any("Priced only" in line and "no guarantee" in line for line in notes)
    assert not any("floor" in line for line in notes)


def test_the_largest_floor_of_the_seeds_counts() -> None:
    def of(*floors: float | None) -> Any:
        summary = dict.fromkeys(("accuracy_best", "accuracy_last", "payload_bytes", "uplink_bytes", "seconds"), 1.0)
        summary |= dict.fromkeys(("epsilon", "epsilon_replace_one"), 1.0)
        ended = [Outcome("done", "", summary | {"private": True, "epsilon_floor": floor}) for floor in floors]
        return cells.cell(load(), ended, len(ended))["epsilon_floor"]

    assert of(2.0, 3.0) == 3.0
    assert of(2.0, None) is None


def test_a_row_is_named_by_its_adversary() -> None:
    local = rows.Row(algorithm="cpsgd", compression=1.0)
    summed = rows.Row(algorithm="cpsgd", compression=1.0, adversary="secure-aggregation")
    assert (local.key, summed.key) == ("cpsgd-1", "cpsgd-1-secure-aggregation")
