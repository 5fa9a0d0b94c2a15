"""Figure 1 as data and as a picture that can be held to its data."""

from __future__ import annotations

import csv
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import small_table
from click import UsageError
from typer.testing import CliRunner

from fedspa.errors import ConfigError
from fedspa.runs.config import load
from reproduction import plot, rows, tradeoff
from reproduction.__main__ import app
from reproduction.sweep import Outcome


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


def test_points_carry_the_ratio_that_was_asked_for(tmp_path: Path) -> None:
    """k is a whole number: 0.05 of 537,610 is 0.0499991."""
    config = rows.find_config("mnist")
    planned = tradeoff.plan(config, [0.05], [0.5], 1, tmp_path, [])
    summary = dict.fromkeys(("accuracy_best", "accuracy_last", "payload_bytes", "uplink_bytes", "seconds"), 0.5)
    summary |= {"compression": 0.0499991, "epsilon": 0.5, "epsilon_replace_one": 1.0, "private": True}
    ((run,),) = planned.values()
    (point,) = tradeoff.assemble(planned, {run.name: Outcome("done", "", summary)}, {})["points"]
    assert point["compression"] == 0.05


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


def test_as_a_table(small: tuple[Path, dict[str, Any]]) -> None:
    folder, found = small
    columns, rows = tradeoff.lines(found)
    assert columns == ["ε (SEEDED NOISE: a simulation)", "p = 0.2", "p = 1"]
    assert [row[0] for row in rows] == ["1", "4"]
    assert tradeoff.markdown(found).count("\n") == 3
    words = ["--epsilon", "1,4", "--compression", "0.2,1", "--seeds", "2", "--out", str(folder / "out")]
    assert rows[1][2] in call(str(folder / "base.toml"), *words)


def test_the_picture_names_its_data(small: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `plots` is not installed")
    folder, found = small
    first = (folder / "out" / "tradeoff.svg").read_text("utf-8")
    assert plot.fingerprint(found) in first
    for words in ("p = 0.2", "p = 1", "accuracy after the last round, %", "δ = 0.001, add-remove, poisson"):
        assert words in first
    assert "NOT SOUND" not in first
    plot.draw(found, tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_text("utf-8") == first
    assert (folder / "out" / "tradeoff.png").read_bytes()[:4] == b"\x89PNG"
    points = [{**point, "sound": False} for point in found["points"]]
    plot.draw({**found, "points": points}, tmp_path / "other.svg")
    assert "NOT SOUND" in (tmp_path / "other.svg").read_text("utf-8")
    assert plot.fingerprint({**found, "points": points}) != plot.fingerprint(found)


def test_without_matplotlib_the_data_are_there_and_it_says_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    small_table.write(tmp_path)
    words = [
        "tradeoff",
        str(tmp_path / "base.toml"),
        "--epsilon",
        "4",
        "--compression",
        "1",
        "--out",
        str(tmp_path / "out"),
    ]
    result = CliRunner().invoke(app, [*words, "--device", "cpu"], catch_exceptions=False)
    assert result.exit_code == 0
    assert "pip install 'fedspa[plots]'" in result.stderr
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"runs", "tradeoff.json", "tradeoff.csv"}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--epsilon", "1,x"], "--epsilon is '1,x'"),
        (["--epsilon", ""], "--epsilon"),
        (["--compression", "0.1,0.1"], "different"),
        (["--compression", "2"], "algorithm.compression"),
        (["--epsilon", "-1"], "privacy.epsilon"),
        (["--seeds", "0"], "0 is not in the range"),
        (["--quick"], "--quick"),
        (["--set", "algorithm.name=dp-fed"], "only fedspa"),
    ],
)
def test_bad_options_are_refused_by_name(tmp_path: Path, words: list[str], told: str) -> None:
    small_table.write(tmp_path)
    with pytest.raises((ConfigError, UsageError), match=told):
        app(["tradeoff", str(tmp_path / "base.toml"), *words], standalone_mode=False)


@pytest.mark.parametrize(("unit", "said"), [("person", "ε per person and agent"), (None, "ε per record and agent")])
def test_curves_say_who_is_protected(unit: str | None, said: str) -> None:
    from reproduction.plot import epsilon_label

    point = {"unit": unit, "sound": True, "delta": 1e-3, "neighbours": "add-remove", "sampling": "poisson"}
    assert epsilon_label([{"status": "refused"}, point]) == f"{said} (δ = 0.001, add-remove, poisson)"
