"""Figure 1 as data and as a picture that can be held to its data."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest
import small_table
from typer.testing import CliRunner

from fedspa.runs.config import load
from reproduction import rows, tradeoff
from reproduction.__main__ import app


def call(*words: str) -> str:
    result = CliRunner().invoke(app, ["tradeoff", *words, "--device", "cpu"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("tradeoff")
    small_table.write(folder)
    words = ["--epsilon", "1,4", "--compression", "0.2,1", "--seeds", "2", "--out", str(folder / "out"), "--json"]
    return folder, json.loads(call(str(folder / "base.toml"), *words))


def test_every_point_is_there_and_keeps_its_budget(small: tuple[Path, dict[str, Any]]) -> None:
    folder, found = small
    points = {(point["compression"], point["epsilon_target"]): point for point in found["points"]}
    assert points.keys() == {(0.2, 1.0), (1.0, 1.0), (0.2, 4.0), (1.0, 4.0)}
    for (p, epsilon), point in points.items():
        assert 0.98 * epsilon <= point["epsilon"] <= epsilon
        assert point["compression"] == p
        assert (point["status"], point["sound"], point["seeds"]) == ("done", True, 2)
    assert json.loads((folder / "out" / "tradeoff.json").read_text("utf-8")) == found
    with (folder / "out" / "tradeoff.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["accuracy_last"]) for row in rows] == [p["accuracy_last"]["mean"] for p in found["points"]]
    terms = {"delta": "0.001", "neighbours": "add-remove", "sampling": "poisson", "unit": "record"}
    for row in rows:
        assert terms | {"adversary": "local", "sound": "True", "noise": "seeded"} == {
            key: row[key] for key in [*row][-7:]
        }


def test_the_clip_follows_the_active_part(tmp_path: Path) -> None:
    """3·√p at every p where the config says 0.67 at 0.05; a coordinate's bound does not change."""
    config = rows.find_config("mnist")
    planned = tradeoff.plan(config, [0.05, 0.2, 1.0], [0.5], 1, tmp_path, [])
    clips = {p: runs[0].config.privacy.clip_value for (p, _), runs in planned.items()}
    assert clips[0.05] == 0.67
    assert all(clip == pytest.approx(3 * math.sqrt(p), rel=2e-3) for p, clip in clips.items())
    published = tradeoff.plan(config.with_name("mnist-published.toml"), [0.05, 1.0], [0.5], 1, tmp_path, [])
    assert {runs[0].config.privacy.clip_value for runs in published.values()} == {
        load(config.with_name("mnist-published.toml")).privacy.clip_value
    }
    assert {runs[0].config.privacy.epsilon for runs in published.values()} == {0.5}
