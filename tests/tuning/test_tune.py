"""`fedspa.tune` and `fedspa tune`, from a config to a model, within one budget."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest
from test_suggest import made_up
from test_trials import recomputed
from typer.testing import CliRunner

import fedspa
from fedspa.agent.ledger.report import export
from fedspa.cli import app
from fedspa.errors import ConfigError
from fedspa.runs.rundir import Stopped, Stopping
from fedspa.tuning import proxy


@pytest.fixture(autouse=True)
def _few_proxy_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Search as always, with fewer steps and repeats."""
    monkeypatch.setattr(proxy, "_FARTHEST", 1)
    monkeypatch.setattr(proxy, "AVERAGES", (0.0, 0.8))
    monkeypatch.setattr(proxy, "_REPEATS", 2)


def config(out: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    given: dict[str, dict[str, Any]] = {
        "federation": {"agents": 6, "per_round": 3, "rounds": 12},
        "data": {"holdout": 0.25},
        "algorithm": {"batch": 40, "local_steps": 1, "local_lr": 0.1},
        "privacy": {"noise": "seeded"},
        "run": {"out": str(out), "threads": 1},
    }
    return {name: {**given.get(name, {}), **sections.get(name, {})} for name in {*given, *sections}}


def test_search_and_training_together_cost_what_was_asked(tmp_path: Path) -> None:
    heard: list[Any] = []
    result = fedspa.tune(config(tmp_path / "run"), epsilon=2.0, share=0.5, data=made_up(), on_proxy=heard.append)
    summary, tuning = result.summary, result.summary["tuning"]
    assert summary["epsilon"] <= 2.0
    assert recomputed(tmp_path / "run") <= 2.0
    entries = export(tmp_path / "run" / "ledger.sqlite")["entries"]
    assert len(entries) == 12 * 3
    assert tuning["rounds"] == 6
    assert len(tuning["trials"]) == 4
    assert len(tuning["proxy"]) == len(heard)
    assert {} in [found["settings"] for found in tuning["proxy"]]  # the config's own
    chosen = fedspa.load(tmp_path / "run" / "config.toml").tuning.candidates
    assert chosen[tuning["choice"]] == tuning["trials"][tuning["choice"]]["settings"]
    kept = json.loads((tmp_path / "run" / "summary.json").read_text("utf-8"))
    assert kept["tuning"] == tuning
    # The test records are another heap than those that chose.
    found = result.module(made_up().test_x).argmax(1)
    right = (found == made_up().test_y).double().mean()
    assert tuning["test"]["accuracy"] == pytest.approx(float(right))
    page = (tmp_path / "run" / "report.html").read_text("utf-8")
    assert "The search for settings" in page
    assert "not used for selection" in page
    best = fedspa.load(tmp_path / "run" / "best.toml")
    winner = tuning["trials"][tuning["choice"]]["settings"]
    assert best == fedspa.load(
        best.model_dump(exclude_none=True), [f"{key}={json.dumps(winner[key])}" for key in winner]
    )
    assert best.tuning.candidates is None
    assert best.run.out is None


def test_stopped_in_the_search_it_goes_on_with_what_was_paid(tmp_path: Path) -> None:
    whole = fedspa.tune(config(tmp_path / "whole"), epsilon=2.0, share=0.5, data=made_up())
    begun = (tmp_path / "run" / "metrics.jsonl").exists
    with pytest.raises(Stopped, match=r"to resume: fedspa\.tune\(resume=.*, data=…\)"):
        fedspa.tune(config(tmp_path / "run"), epsilon=2.0, share=0.5, data=made_up(), stop=begun)
    paid = export(tmp_path / "run" / "ledger.sqlite")["entries"]
    assert {entry["message"] for entry in paid} == {"round-0"}
    result = fedspa.tune(resume=tmp_path / "run", data=made_up())
    assert result.summary["tuning"] == whole.summary["tuning"]
    assert len(export(tmp_path / "run" / "ledger.sqlite")["entries"]) == 36
    again = fedspa.tune(resume=tmp_path / "run", data=made_up())  # it is done: nothing more is spent
    assert again.summary["tuning"] == whole.summary["tuning"]
    assert len(export(tmp_path / "run" / "ledger.sqlite")["entries"]) == 36


def test_stopped_in_a_proxy_run_nothing_is_spent(tmp_path: Path) -> None:
    options: dict[str, Any] = {"epsilon": 2.0, "share": 0.3, "data": made_up()}
    heard: list[Any] = []
    with pytest.raises(Stopping, match="before the first round, and nothing was spent"):
        fedspa.tune(config(tmp_path / "run"), **options, on_proxy=heard.append, stop=lambda: len(heard) == 3)
    assert len(heard) == 3
    assert not (tmp_path / "run").exists()


def test_a_server_without_records_has_its_agents_score(tmp_path: Path) -> None:
    asked = config(tmp_path / "run", data={"holdout": 0.0})
    result = fedspa.tune(asked, epsilon=2.0, share=0.5, data=made_up())
    summary, tuning = result.summary, result.summary["tuning"]
    assert tuning["scored_by"] == "agents"
    assert tuning["scoring"]["rounds"] == [4]  # after two trials of two rounds each
    assert len(export(tmp_path / "run" / "ledger.sqlite")["entries"]) == 12 * 3
    assert recomputed(tmp_path / "run") == pytest.approx(summary["epsilon"])
    assert summary["epsilon"] <= 2.0
    assert tuning["test"]["accuracy"] > 0.5
    # As stated: z·√m / (2·B·√n), here for the two models of the last rung.
    noise = summary["noise_multiplier"] * 2**0.5 / (2 * 40 * 3**0.5)
    assert tuning["scoring"]["deviation"][-1] == pytest.approx(noise)


@pytest.mark.parametrize(("relation", "apart"), [("add-remove", 1), ("replace-one", 2)])
def test_what_is_printed_for_both_is_a_closed_form_where_there_is_one(
    relation: str, apart: int, tmp_path: Path
) -> None:
    """Where every record is in every step, n participations of trials, scores and training are one Gaussian release of
    μ = √n/z (Dong, Roth & Su 2022): no accountant of ours is in this, and the count is of the ledger's lines."""
    privacy = {"neighbours": relation}
    asked = config(tmp_path / "run", data={"holdout": 0.0}, algorithm={"batch": 83}, privacy=privacy)
    summary = fedspa.tune(asked, epsilon=2.0, share=0.5, proxy=False, data=made_up()).summary
    assert summary["tuning"]["scoring"]["rounds"]
    counts = Counter(line["agent"] for line in export(tmp_path / "run" / "ledger.sqlite")["entries"])
    mu = apart * math.sqrt(max(counts.values())) / summary["noise_multiplier"]
    epsilon, tail = summary["epsilon"], NormalDist().cdf
    delta = tail(mu / 2 - epsilon / mu) - math.exp(epsilon) * tail(-mu / 2 - epsilon / mu)
    assert delta == pytest.approx(summary["delta"], rel=1e-4)
    assert delta <= summary["delta"] * (1 + 1e-6)


@pytest.mark.parametrize(
    ("sections", "options", "word"),
    [
        ({"data": {"holdout": 0.0}}, {"proxy": True}, "data.holdout is 0"),
        ({"data": {"holdout": 0.0}, "tuning": {"scored_by": "server"}}, {}, "data.holdout is 0"),
        ({"algorithm": {"name": "fedavg"}}, {}, "fedavg spends no budget"),
        ({}, {"share": 1.0}, "share is 1.0"),
        ({}, {"space": {"algorithm.batch": [5]}}, "algorithm.batch cannot be tried"),
        ({"tuning": {"candidates": [{}]}}, {}, "which `fedspa tune` chooses"),
    ],
)
def test_what_cannot_be_tuned_is_told_in_a_line(
    tmp_path: Path, sections: dict[str, Any], options: dict[str, Any], word: str
) -> None:
    budget = {} if "algorithm" in sections and "name" in sections["algorithm"] else {"epsilon": 2.0}
    heard: list[Any] = []
    with pytest.raises(ConfigError, match=word) as refused:
        fedspa.tune(config(tmp_path / "run", **sections), data=made_up(), on_proxy=heard.append, **budget, **options)
    assert "\n" not in str(refused.value)
    assert heard == []  # hours of proxy runs would have been in vain
    assert not (tmp_path / "run").exists()


def test_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["tune", "--epsilon", "3", "--share", "0.2", "--out", "run", "--space", "algorithm.ema=0,0.5"]
    for key in ("data.holdout=0.3", "algorithm.batch=20", "federation.rounds=10", "privacy.noise=seeded"):
        words += ["--set", key]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    shown = " ".join(done.output.split())
    for part in ("took 2 of 10 rounds", "chosen", "no privacy cost", "not used for selection"):
        assert part in shown
    stated = CliRunner().invoke(app, ["tune", "--resume", "run", "--json"])
    summary = json.loads(stated.stdout)
    assert summary["epsilon"] <= 3
    for bad, word in (
        (["tune", "--space", "algorithm.ema"], "--space algorithm.ema: it must read"),
        (["tune", "--resume", "run", "--out", "other"], "--resume continues the run as it began"),
        (["tune", "--resume", "run", "--epsilon", "9"], "--resume continues the run as it began"),
        (["tune", "--resume", "run", "--share", "0.5"], "--resume continues the run as it began"),
        (["tune", "--resume", "run", "--set", "run.seed=5"], "--resume continues the run as it began"),
        (["tune", "--resume", "nowhere"], "holds no run"),
    ):
        assert word in str(CliRunner().invoke(app, bad).exception)
