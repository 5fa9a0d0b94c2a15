"""Runs on one's own records in one working folder write into one ledger, and each states what all of them cost."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import fedspa
from fedspa.agent.ledger.ledger import Ledger
from fedspa.agent.ledger.report import summary
from fedspa.cli import app
from fedspa.data.dataset import Dataset
from fedspa.privacy.accounting import epsilon
from fedspa.privacy.event import shown
from fedspa.report import render
from fedspa.report.record import promise, read
from fedspa.runs import rundir


def records(shift: float = 0.0, **more: Any) -> Dataset:
    rng = np.random.default_rng(1)
    x = rng.normal(shift, size=(300, 3)).astype(np.float32)
    y = (x[:, 0] > shift).astype(np.int64)
    return fedspa.from_arrays(x, y, x[:40], y[:40], name="clinic", **more)


def trained(out: Path, given: Dataset | None, /, **sections: dict[str, Any]) -> fedspa.RunResult:
    values: dict[str, dict[str, Any]] = {
        "federation": {"agents": 3, "per_round": 3, "rounds": 2},
        "algorithm": {"batch": 20, "local_steps": 2},
        "privacy": {"noise_multiplier": 4.0, "delta": 1e-4},
        "run": {"out": str(out)},
    }
    values = {key: {**values.get(key, {}), **sections.get(key, {})} for key in (*values, *sections)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fedspa.run(values, data=given)


def test_two_runs_on_the_same_records_add_up(tmp_path: Path) -> None:
    first = trained(tmp_path / "a", records())
    second = trained(tmp_path / "b", records(), run={"out": str(tmp_path / "b"), "seed": 5})
    assert not list(tmp_path.glob("*/ledger.sqlite"))
    with Ledger.open(tmp_path / "ledger.sqlite", create=False) as ledger:
        spent = ledger.spent("agent-0")
    both = epsilon(dict(spent), 1e-4, neighbours="add-remove")
    assert sum(spent.values()) == 4
    assert first.summary["epsilon"] == second.summary["epsilon"] < both
    assert both <= second.summary["epsilon_total"] <= 1.25 * both  # the filter of a plan that nobody announced
    # A report that is made now counts what came later, and keeps its run's own ε apart.
    for result in (first, second):
        held = promise(read(result.folder))
        assert set(held.counts.values()) == {2}
        assert held.facts["epsilon"] == result.summary["epsilon"]
        assert held.facts["epsilon_total"] == second.summary["epsilon_total"]
    page = render(read(first.folder))
    assert f"with 1 other run in the ledger ε\u00a0=\u00a0{shown(second.summary['epsilon_total'])}" in page
    assert "12 entries" not in page
    assert "6 entries of this run; the ledger, of 2 runs of these agents: hash chain verified" in page


def test_other_records_add_up_too(tmp_path: Path) -> None:
    """An edited table holds most of the same records: no digest decides that its budget is a fresh one."""
    trained(tmp_path / "a", records())
    found = trained(tmp_path / "b", records(shift=1e-3)).summary
    assert found["epsilon_total"] > found["epsilon"]


def test_a_killed_run_resumes_in_the_ledger_that_it_shares(tmp_path: Path) -> None:
    values = {
        "privacy": {"epsilon": 2.0},
        "federation": {"rounds": 3, "per_round": 5},
        "run": {"out": str(tmp_path / "a")},
    }
    with pytest.raises(fedspa.FedspaError, match="stopped after round 1"):
        fedspa.run(values, data=records(), stop=lambda: True)
    fedspa.run(resume=tmp_path / "a", data=records())
    assert summary(tmp_path / "ledger.sqlite", delta=1e-3, neighbours="add-remove").entries == 15
    assert not (tmp_path / "a/ledger.sqlite").exists()


@pytest.mark.parametrize("sections", [{"privacy": {"noise": "seeded"}}, {"data": {"name": "digits"}}])
def test_a_simulation_or_public_data_spends_nobodys_budget(tmp_path: Path, sections: dict[str, dict[str, Any]]) -> None:
    result = trained(tmp_path / "a", None if "data" in sections else records(), **sections)
    assert (result.folder / "ledger.sqlite").exists()
    assert not (tmp_path / "ledger.sqlite").exists()
    assert result.summary["epsilon_total"] is None


def test_records_and_persons_do_not_share_a_ledger(tmp_path: Path) -> None:
    trained(tmp_path / "a", records())
    with pytest.raises(fedspa.FedspaError, match=r"their ε do not add up; .* another ledger \(run\.ledger"):
        trained(tmp_path / "b", records(persons=np.arange(300) // 2))


def sites(**more: Any) -> Dataset:
    """The same kind of records, of two hospitals with names of their own."""
    x, y = np.asarray(records().train_x), np.asarray(records().train_y)
    halves = {"north": slice(0, 150), "south": slice(150, 300)}
    parts = {
        name: fedspa.from_arrays(x[half], y[half], x[:9], y[:9], name=name, **more) for name, half in halves.items()
    }
    return fedspa.from_agents(parts, name="hospitals")


def test_persons_of_hospitals_and_records_in_one_folder(tmp_path: Path) -> None:
    """Numbered agents may hold anybody's records: where units differ no total is stated, and every report opens."""
    two = {"federation": {"agents": 2, "per_round": 2}, "algorithm": {"batch": 10}}
    persons = trained(tmp_path / "a", sites(persons=np.arange(150) // 4), **two)
    own = trained(tmp_path / "b", records())
    assert persons.summary["epsilon_total"] == pytest.approx(persons.summary["epsilon"])
    assert own.summary["epsilon_total"] is None
    assert any("no ε over all runs of these agents" in warning for warning in own.summary["warnings"])
    for result in (persons, own):
        assert "no ε over all runs of these agents" in render(read(result.folder))


def test_hospitals_of_other_names_are_not_counted_and_a_note_says_so(tmp_path: Path) -> None:
    two = {"federation": {"agents": 2, "per_round": 2}}
    first = trained(tmp_path / "a", sites(), **two)
    x, y = np.asarray(records().train_x), np.asarray(records().train_y)
    part = fedspa.from_arrays(x[:150], y[:150], x[:9], y[:9], name="east")
    second = trained(tmp_path / "b", fedspa.from_agents({"east": part}), federation={"agents": 1, "per_round": 1})
    third = trained(tmp_path / "c", records())
    assert second.summary["epsilon_total"] == pytest.approx(second.summary["epsilon"])
    assert any("not counted, since their agents have other names: 1" in each for each in second.summary["warnings"])
    assert third.summary["epsilon_total"] > max(each.summary["epsilon"] for each in (first, second, third))


def test_the_first_card_has_each_agents_total_by_name(tmp_path: Path) -> None:
    """South takes part in the second run alone, and has spent less."""
    x, y = np.asarray(records().train_x), np.asarray(records().train_y)
    parts = {name: fedspa.from_arrays(x[:150], y[:150], x[:9], y[:9], name=name) for name in ("north", "south")}
    few = {"federation": {"agents": 1, "per_round": 1}}
    trained(tmp_path / "a", fedspa.from_agents({"north": parts["north"]}, name="one"), **few)
    result = trained(tmp_path / "b", fedspa.from_agents(parts, name="two"), federation={"agents": 2, "per_round": 2})
    with Ledger.open(tmp_path / "ledger.sqlite", create=False) as ledger:
        north, south = (shown(ledger.epsilon(name, 1e-4, "add-remove")) for name in ("north", "south"))
    assert north > south == shown(result.summary["epsilon"])
    page = render(read(result.folder))
    assert f"in the ledger ε\u00a0=\u00a0{north} in total so far (north {north}, south {south})" in page


def test_a_runs_name_is_cut_alike_on_the_screen_and_in_the_report(tmp_path: Path) -> None:
    for name in ("a" * 60, "b" * 60):
        result = trained(tmp_path / name, records())
    shows = CliRunner().invoke(app, ["ledger", "show", str(result.folder)], catch_exceptions=False).output
    listed = [line.split()[1].rstrip(":") for line in shows.splitlines() if line.startswith("run ")]
    assert len(listed) == len(set(listed)) == 2
    assert all(name in render(read(result.folder)) for name in listed)


@pytest.mark.parametrize(
    ("name", "begins"),
    [("sites/*.csv", "fedspa-sites-2"), ("*.csv", "fedspa-data-2"), ("a/north.csv|b/x.csv", "fedspa-north-2")],
)
def test_a_pattern_has_a_readable_folder(name: str, begins: str) -> None:
    config = fedspa.load({"privacy": {"epsilon": 2.0}})
    assert rundir._dated(config, name).name.startswith(begins)


def test_units_that_do_not_add_up_leave_a_report_without_a_total(tmp_path: Path) -> None:
    """Numbered agents may hold each other's records, and an agent that took part in neither unit's rounds is none."""
    few = {"agents": 12, "per_round": 1, "rounds": 1}
    persons = trained(
        tmp_path / "a", records(persons=np.arange(300) // 2), federation=few, algorithm={"batch": 10}, run={"seed": 5}
    )
    own = trained(tmp_path / "b", records(), federation={"agents": 1, "per_round": 1})
    for result in (persons, own):
        page = render(read(result.folder))
        assert f"ε\u00a0=\u00a0{shown(result.summary['epsilon'])}" in page
        assert "with 1 other run in the ledger no ε can be stated in total" in page
        assert "some of these participations protect each record and some each person" in page


def test_ledger_show_lists_the_runs(tmp_path: Path) -> None:
    first = trained(tmp_path / "a", records())
    trained(tmp_path / "b", records(), federation={"rounds": 1})
    shows = CliRunner().invoke(app, ["ledger", "show", str(first.folder)], catch_exceptions=False)
    lines = [line for line in shows.output.splitlines() if line.startswith("run ")]
    assert len(lines) == 2
    assert "6 rounds by 3 agents" in lines[0]
    assert "δ = 0.0001" in shows.output
    assert "3 rounds by 3 agents" in lines[1]
    shows = CliRunner().invoke(app, ["ledger", "show", str(first.folder), "--json"], catch_exceptions=False)
    assert [run["participations"] for run in json.loads(shows.output)["runs"]] == [6, 3]


def test_search_and_run_add_up(tmp_path: Path) -> None:
    values = {
        "federation": {"agents": 3, "per_round": 3, "rounds": 4},
        "algorithm": {"batch": 20, "local_steps": 2},
        "privacy": {"delta": 1e-4},
        "run": {"out": str(tmp_path / "tuned")},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tuned = fedspa.tune(values, epsilon=2.0, proxy=False, data=records()).summary
    found = trained(tmp_path / "after", records()).summary
    assert found["epsilon_total"] > max(tuned["epsilon"], found["epsilon"])
