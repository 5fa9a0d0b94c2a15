"""Private evaluation at the agents: what it finds, what it costs, and which records it is of."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import fedspa
from fedspa.agent.ledger.ledger import Ledger
from fedspa.analytics import evaluation
from fedspa.cli import app
from fedspa.data.dataset import Dataset
from fedspa.errors import ConfigError, DataError
from fedspa.learning.tasks.base import auc
from fedspa.privacy.event import shown
from fedspa.report import render
from fedspa.report.record import promise, read
from fedspa.runs.setup import holdings_of, prepare

AGENTS = 3


def dataset(classes: int | None = 2, persons: bool = False, records: int = 900) -> Dataset:
    rng = np.random.default_rng(4)
    x = rng.normal(size=(records, 4)).astype(np.float32)
    y: Any = x @ np.array([1.0, -1.0, 0.5, 0.0]) + rng.normal(size=records)
    if classes is not None:
        y = np.digitize(y, np.quantile(y, np.arange(1, classes) / classes))
    more: dict[str, Any] = {"persons": np.arange(records) // 3} if persons else {}
    return fedspa.from_arrays(x, y, x[:50], y[:50], name="drawn", **more)


@pytest.fixture
def trained(tmp_path: Path) -> Callable[..., Path]:
    def make(records: Dataset, /, **sections: dict[str, Any]) -> Path:
        values: dict[str, Any] = {
            "federation": {"agents": AGENTS, "per_round": AGENTS, "rounds": 3},
            "data": {"agent_holdout": 0.3},
            "algorithm": {"batch": 20, "local_steps": 5, "local_lr": 0.5, "server": "average"},
            "privacy": {"epsilon": 3.0, "delta": 1e-4, "noise": "seeded"},
            "run": {"out": str(tmp_path / "run")},
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            values = {key: {**values.get(key, {}), **sections.get(key, {})} for key in (*values, *sections)}
            fedspa.run(values, data=records)
        return tmp_path / "run"

    return make


def evaluated(run: Path, data: Dataset, tmp_path: Path, epsilon: float = 40.0, **options: Any) -> fedspa.Evaluation:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fedspa.evaluate(run, data=data, epsilon=epsilon, out=tmp_path / f"evaluation-{epsilon}", **options)


def held_out(run: Path, data: Dataset) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The records that no agent trained on, with the model's outputs, computed anew."""
    config = fedspa.load(run / "config.toml")
    rows = torch.from_numpy(np.concatenate(holdings_of(config, data, held_out=True)))
    assert isinstance(data.train_x, torch.Tensor)
    assert isinstance(data.train_y, torch.Tensor)
    x, y = data.train_x[rows], data.train_y[rows]
    with torch.no_grad():
        return x, y, fedspa.RunResult.load(run).module(x)


def agrees(found: fedspa.Evaluation, score: str, truth: float) -> None:
    """The score is within four standard deviations of the truth; its 95 % interval says what one is."""
    (each,) = (one for one in found.estimates if (one.site, one.statistic) == ("", score))
    assert each.value == pytest.approx(truth, abs=(each.high - each.low) / 2 / 1.96 * 4)
    assert each.high - each.low < 0.4 * max(truth, 0.3)


def test_two_classes(trained, tmp_path: Path) -> None:
    data = dataset()
    run = trained(data)
    found = evaluated(run, data, tmp_path, bins=200)
    _, y, outputs = held_out(run, data)
    right = float((outputs.argmax(1) == y).float().mean())
    agrees(found, "records", len(y))
    agrees(found, "accuracy", right)
    agrees(found, "auc", auc(outputs[:, 1] - outputs[:, 0], y == 1))
    agrees(found, "log loss", float(torch.nn.functional.cross_entropy(outputs, y)))
    assert len(found.sites) == AGENTS


def test_several_classes(trained, tmp_path: Path) -> None:
    data = dataset(4)
    run = trained(data)
    found = evaluated(run, data, tmp_path)
    _, y, outputs = held_out(run, data)
    predicted = outputs.argmax(1)
    agrees(found, "accuracy", float((predicted == y).float().mean()))
    cell = int(((predicted == 3) & (y == 3)).sum())
    agrees(found, "predicted 3 of class 3", cell)


def test_a_number(trained, tmp_path: Path) -> None:
    data = dataset(None)
    run = trained(data, task={"name": "regression"})
    found = evaluated(run, data, tmp_path, error_bound=3.0)
    _, y, outputs = held_out(run, data)
    error = (outputs.reshape(-1) - y).abs().clamp(max=3.0)
    agrees(found, "mean absolute error", float(error.mean()))
    agrees(found, "root mean squared error", float((error**2).mean() ** 0.5))
    with pytest.raises(ConfigError, match="error_bound is missing"):
        evaluated(run, data, tmp_path)


def test_it_adds_to_the_budget_of_the_training(trained, tmp_path: Path) -> None:
    data = dataset()
    run = trained(data, privacy={"noise": "secure"})
    found = evaluated(run, data, tmp_path, epsilon=0.5)
    trained_epsilon = fedspa.RunResult.load(run).summary["epsilon"]
    assert found.summary["epsilon"] <= 0.5
    assert found.summary["epsilon_total"] > trained_epsilon
    with Ledger.open(run.parent / "ledger.sqlite", create=False) as ledger:
        assert {sum(ledger.spent(f"agent-{number}").values()) for number in range(AGENTS)} == {4}


class TestHoldout:
    def test_who_is_held_out_depends_on_nobody_else(self) -> None:
        """With a record less, all others stay where they are."""
        data, config = dataset(), fedspa.load({"data": {"agent_holdout": 0.3}, "privacy": {"epsilon": 1.0}})
        assert isinstance(data.train_x, torch.Tensor)
        rows = set(np.concatenate(holdings_of(config, data, held_out=True)).tolist())
        fewer = fedspa.from_arrays(data.train_x[1:], data.train_y[1:], data.test_x, data.test_y, name="fewer")
        after = {row + 1 for row in np.concatenate(holdings_of(config, fewer, held_out=True)).tolist()}
        assert rows - {0} == after
        assert 0.2 < len(rows) / len(data.train_x) < 0.4

    def test_parts_are_disjoint_and_whole(self) -> None:
        data, config = dataset(), fedspa.load({"data": {"agent_holdout": 0.3}, "privacy": {"epsilon": 1.0}})
        parts = [np.concatenate(holdings_of(config, data, held_out=side)) for side in (False, True)]
        assert sorted(np.concatenate(parts).tolist()) == list(range(len(data.train_x)))

    @pytest.mark.parametrize("task", ["classification", "binary", "regression"])
    @pytest.mark.parametrize("persons", [False, True])
    def test_no_record_is_scored_that_was_trained_on(
        self, trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str, persons: bool
    ) -> None:
        """The rows that an evaluation scores, beside those that the run of the same config trains on."""
        data = dataset(None if task == "regression" else 2, persons=persons)
        delta = {"privacy": {"delta": 1e-4}}
        run = trained(data, task={"name": task}, algorithm={"batch": 10}, **delta)
        config = fedspa.load(run / "config.toml")
        trained_rows = set(np.concatenate(prepare(config, data).holdings).tolist())
        scored: list[np.ndarray] = []
        original = evaluation._held_out

        def noting(holdings, *rest):
            scored.extend(holdings)
            return original(holdings, *rest)

        monkeypatch.setattr(evaluation, "_held_out", noting)
        evaluated(run, data, tmp_path, **({"error_bound": 3.0} if task == "regression" else {}))
        rows = set(np.concatenate(scored).tolist())
        assert rows
        assert not rows & trained_rows
        assert len(rows) + len(trained_rows) == (300 if persons else 900)

    def test_persons_are_held_out_whole(self, trained, tmp_path: Path) -> None:
        data = dataset(persons=True)
        run = trained(data)
        config = fedspa.load(run / "config.toml")
        persons = np.concatenate(holdings_of(config, data, held_out=True))
        found = evaluated(run, data, tmp_path)
        assert found.summary["unit"] == "person"
        agrees(found, "persons", len(persons))  # each person counts once
        assert 0.2 < len(persons) / 300 < 0.4

    def test_an_agent_without_any_is_named(self) -> None:
        config = fedspa.load(
            {"data": {"agent_holdout": 0.001}, "federation": {"agents": 10}, "privacy": {"epsilon": 1.0}}
        )
        with pytest.raises(DataError, match=r"agent-\d+ has no record outside training"):
            holdings_of(config, dataset(records=100), held_out=True)


@pytest.mark.parametrize(
    ("sections", "options", "said"),
    [
        ({"data": {"agent_holdout": 0.0}}, {}, "was trained with data.agent_holdout = 0"),
        ({}, {"bins": 5}, "it must be an even number"),
    ],
)
def test_what_cannot_be_evaluated(trained, tmp_path: Path, sections, options, said: str) -> None:
    data = dataset()
    with pytest.raises(ConfigError, match=said):
        evaluated(trained(data, **sections), data, tmp_path, **options)


def test_the_command(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = ["data.agent_holdout=0.3", "federation.rounds=1", "privacy.epsilon=2"]
    runner = CliRunner()
    assert runner.invoke(app, ["run", "--out", "run", *(f"--set={each}" for each in settings)]).exit_code == 0
    done = runner.invoke(app, ["evaluate", "run", "--epsilon", "5", "--out", "scores"])
    assert done.exit_code == 0, done.exception
    assert "accuracy" in done.output
    assert "(ε = 5" in done.output
    again = runner.invoke(app, ["evaluate", "scores", "--json"])
    assert json.loads(again.output)["estimates"][0]["statistic"] == "records"
    missing = runner.invoke(app, ["evaluate", "run"])
    assert "--epsilon is missing" in str(missing.exception)
    assert "evaluated a model" in str(runner.invoke(app, ["stats", "scores"]).exception)


def test_the_report_of_the_training_counts_its_own_entries_and_states_the_total(trained, tmp_path: Path) -> None:
    """The release wrote into the same ledger: it is another run, and ε of both together stands beside the run's own."""
    data = dataset()
    run = trained(data, privacy={"noise": "secure"})
    before = promise(read(run))
    total = evaluated(run, data, tmp_path, epsilon=0.5).summary["epsilon_total"]
    after, record = promise(read(run)), read(run)
    assert before is not None
    assert after is not None
    assert after.counts == before.counts == {f"agent-{number}": 3 for number in range(AGENTS)}
    assert after.facts["epsilon"] == before.facts["epsilon"]
    assert before.facts["epsilon_total"] is None
    assert after.facts["epsilon_total"] == total > after.facts["epsilon"]
    assert record.problems == []
    assert f"with 1 other run in the ledger ε\u00a0=\u00a0{shown(total)} in total so far" in render(record)


def test_the_training_shows_what_its_evaluation_found(trained, tmp_path: Path) -> None:
    """In the report and the model card, with the ε that it cost; a file that is damaged is named."""
    data = dataset()
    run = trained(data, privacy={"noise": "secure"})
    found = evaluated(run, data, tmp_path, epsilon=8.0)
    page, card = (run / "report.html").read_text("utf-8"), fedspa.RunResult.load(run).card()
    for text in (page, card):
        assert "AUC at the agents" in text
        assert f"{found.value('auc'):.4g}" in text
        assert f"released at ε = {shown(found.summary['epsilon'])}" in text.replace("\u00a0", " ")
    (run / "evaluation.json").write_text("{")
    assert any("evaluation.json cannot be read" in problem for problem in read(run).problems)


def test_a_release_is_a_target_of_the_audit(trained, tmp_path: Path, monkeypatch) -> None:
    """Of its own plan, though its records came from Python; and first of what one person adds."""
    data = dataset(persons=True)
    run = trained(data, privacy={"noise": "secure"})
    scores = evaluated(run, data, tmp_path, epsilon=2.0)
    assert scores.estimates[0].statistic == "persons"
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(
        app, ["audit", "--config", str(scores.folder / "config.toml"), "--draws", "100", "--json"]
    )
    assert done.exit_code == 0, done.exception
    kept = json.loads(done.output)
    assert kept["holds"]
    assert kept["checks"][0]["name"] == "one person's part"
    Path("alone.toml").write_text((scores.folder / "config.toml").read_text("utf-8"))
    alone = CliRunner().invoke(app, ["audit", "--config", "alone.toml"])
    assert "audit the config.toml of its finished private run" in str(alone.exception)


def test_a_lost_ledger_is_no_fresh_budget(trained, tmp_path: Path) -> None:
    data = dataset()
    run = trained(data, privacy={"noise": "secure"})
    for file in run.parent.rglob("ledger.sqlite*"):
        file.unlink()
    with pytest.raises(ConfigError, match=r"the ledger of the run, .* is missing; put it back"):
        evaluated(run, data, tmp_path)


def test_a_policy_refuses_what_its_budget_does_not_cover(trained, tmp_path: Path) -> None:
    data = dataset()
    policy = tmp_path / "policy.toml"
    policy.write_text(
        'epsilon = 3.2\ndelta = 1e-4\nneighbours = "add-remove"\nmin_noise_multiplier = 0.01\nmax_local_steps = 100\n'
        'max_rounds = 100\nmax_compression = 1.0\nclippings = ["l2", "coordinate"]\n'
    )
    run = trained(data, privacy={"noise": "secure"}, run={"out": str(tmp_path / "run"), "policy": str(policy)})
    with pytest.raises(fedspa.FedspaError, match=r"budget|cap|left"):
        evaluated(run, data, tmp_path, epsilon=2.0)
