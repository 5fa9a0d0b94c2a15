"""The benchmark of tuning: what is still to be measured, what is kept, and the table of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tables
import tuning


def test_what_was_measured_is_not_measured_again() -> None:
    found = {"wine": {"default": {"1": 90.0}, "tuned": {"1": 91.0, "2": 92.0}}}
    wanted = tuning.jobs(["wine"], ["default", "tuned"], range(1, 3), found)
    assert wanted == [("wine", "default", 2)]


def test_searches_and_images_begin_first() -> None:
    wanted = tuning.jobs(["wine", "mnist"], None, range(1), {})
    assert [job[:2] for job in wanted[:3]] == [("mnist", "tuned"), ("mnist", "agents"), ("mnist", "free")]
    assert {arm for name, arm, _ in wanted if name == "wine"} == set(tuning.TABLE_ARMS)
    assert wanted.index(("wine", "trials", 0)) < wanted.index(("wine", "default", 0))


def test_results_are_kept_in_one_order_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    tuning.keep(path, {"wine": {"tuned": {"2": 1.0, "1": 2.0}, "default": {"1": 3.0}}, "mnist": {"free": {"1": 4.0}}})
    found = tuning.kept(path)
    assert list(found) == ["mnist", "wine"]
    assert list(found["wine"]) == ["default", "tuned"]
    assert list(found["wine"]["tuned"]) == ["1", "2"]


def test_results_of_other_code_are_not_mixed_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tuning.json"
    tuning.keep(path, {"wine": {"default": {"1": 3.0}}})
    monkeypatch.setattr(tuning, "commit", lambda: "another")
    with pytest.raises(SystemExit, match="and this is another"):
        tuning.kept(path)


def test_the_table_has_mean_and_spread_of_each_arm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    tuning.keep(tmp_path / "tuning.json", {"mnist": {"free": {"1": 94.0, "2": 96.0}, "tuned": {"1": 93.0}}})
    assert tables.tuned("tuning").splitlines()[2:] == [
        "| accuracy, % | `free` | `tuned` |",
        "| --- | --- | --- |",
        "| mnist | 95.0 ± 12.7 (2) | 93.0 (1) |",
    ]


@pytest.mark.parametrize("name", tuning.TABLES)
def test_a_table_is_split_by_its_seed(name: str) -> None:
    one, again, other = (tuning.table(name, seed) for seed in (1, 1, 2))
    assert (one.test_y == again.test_y).all()
    assert (one.train_x == again.train_x).all()
    assert json.dumps(one.test_x.tolist()) != json.dumps(other.test_x.tolist())
