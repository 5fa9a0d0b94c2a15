"""`task.metric` in whole runs: what they are judged by, everywhere that a score is shown or decides."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_runs import small
from torch import Tensor, nn

import fedspa
from fedspa.errors import ConfigError
from fedspa.report import render
from fedspa.report.record import read
from fedspa.running import run as simulate
from fedspa.runs.checkpoint import CheckpointError
from fedspa.runs.rundir import Stopped
from fedspa.tuning import proxy


def classes(share: float, kinds: int = 2, test: int = 200) -> fedspa.Dataset:
    """Records of which so many are of class 0, the rest of the others in turn."""
    draws = torch.Generator().manual_seed(0)
    n = 400 + test
    y = torch.where(torch.arange(n) % 100 < 100 * share, 0, 1 + torch.arange(n) % max(1, kinds - 1))
    x = torch.randn(n, 4, generator=draws) + 2 * nn.functional.one_hot(y % 4, 4)
    order = torch.randperm(n, generator=draws)
    x, y = x[order], y[order]
    return fedspa.from_arrays(x[:400], y[:400], x[400:], y[400:], name="classes")


def config(out: Path, **sections: Any) -> dict[str, Any]:
    return small(out, **{"algorithm": {"compression": 1.0}, **sections})


def recall_of_ones(found: Tensor, y: Tensor) -> float:
    return float((found.argmax(1)[y == 1] == 1).double().mean())


@pytest.mark.parametrize("metric", ["auc", "log_loss"])
def test_it_decides_everywhere(tmp_path: Path, metric: str) -> None:
    result = simulate(config(tmp_path / "run", task={"metric": metric}), data=classes(0.6))
    values = [line.scores[metric] for line in result.metrics]
    best = (min if metric == "log_loss" else max)(values)
    summary = result.summary
    assert summary["score"] == metric
    assert (summary["score_last"], summary["score_best"]) == (values[-1], best)
    assert next(iter(summary["scores"])) == metric
    assert summary["accuracy_last"] == result.metrics[-1].accuracy  # under its own name as ever
    assert summary["baseline"] is not None
    record = read(result.folder)
    assert record.headline == metric
    assert record.best == values.index(best)
    page = render(read(result.folder))
    named = {"auc": "AUC", "f1": "F1"}.get(metric, metric.replace("_", " ").capitalize())
    assert f"{named} by round" in page
    assert not any("task.metric" in line for line in summary["warnings"])


@pytest.mark.parametrize(("kinds", "headline"), [(2, "auc"), (3, "balanced_accuracy")])
def test_imbalanced_classes_are_not_judged_by_accuracy(tmp_path: Path, kinds: int, headline: str) -> None:
    result = simulate(config(tmp_path / "run"), data=classes(0.8, kinds))
    assert result.summary["score"] == headline
    assert any("judged by" in line and "task.metric" in line for line in result.summary["warnings"])
    assert "held-out records are of one class" in render(read(result.folder))
    chosen = simulate(config(tmp_path / "own", task={"metric": "accuracy"}), data=classes(0.8, kinds))
    assert chosen.summary["score"] == "accuracy"
    assert not any("judged by" in line for line in chosen.summary["warnings"])
    assert torch.equal(chosen.module[-1].weight, result.module[-1].weight)  # nothing is trained otherwise


@pytest.mark.parametrize("lower", [True])
def test_stopped_and_resumed_it_is_the_same_run(tmp_path: Path, lower: bool) -> None:
    given = {"task": {"metric": "log_loss" if lower else "average_precision"}}
    whole = simulate(config(tmp_path / "whole", **given), data=classes(0.6))
    asked = iter([False, True])
    with pytest.raises(Stopped):
        simulate(config(tmp_path / "run", **given), data=classes(0.6), stop=lambda: next(asked, True))
    with pytest.raises(CheckpointError, match=r"task.metric was .* and is unset"):
        simulate(config(tmp_path / "run"), data=classes(0.6), resume=tmp_path / "run")
    resumed = simulate(resume=tmp_path / "run", data=classes(0.6))
    assert resumed.metrics == whole.metrics
    assert resumed.summary["score_best"] == whole.summary["score_best"]


def test_a_function(tmp_path: Path) -> None:
    name = "test_chosen_metric:recall_of_ones"
    result = simulate(config(tmp_path / "run", task={"metric": name}), data=classes(0.6))
    assert result.summary["score"] == name
    found = result.module(classes(0.6).test_x)
    assert result.summary["score_last"] == pytest.approx(recall_of_ones(found, classes(0.6).test_y))
    assert result.summary["baseline"] is None
    assert "Recall_of_ones by round" in render(read(result.folder))
    given = {"mine": recall_of_ones}
    again = simulate(config(tmp_path / "b", task={"metric": "mine"}), data=classes(0.6), metrics=given)
    assert [line.score for line in again.metrics] == [line.score for line in result.metrics]
    own = simulate(config(tmp_path / "own", task={"metric": name}), data=classes(0.6), task=_own_loss)
    assert own.summary["score"] == name


def _own_loss(module: nn.Module, example: Any) -> Tensor:
    return nn.functional.cross_entropy(module(example[0]), example[1])


@pytest.mark.parametrize(
    ("section", "given", "said"),
    [
        (
            {"name": "regression", "metric": "auc"},
            {},
            "task.metric is 'auc', which task 'regression' has no score for; ",
        ),
        ({"metric": "perplexity"}, {}, "task 'classification' has no score for"),
        ({"metric": "nowhere:function"}, {}, "task.metric = 'nowhere:function': cannot import 'nowhere'"),
        ({"metric": "auc"}, {"task": _own_loss}, "has no score for; choose one of loss,"),
        (
            {"options": {"weights": "balance"}},
            {},
            "task.options.weights is 'balance'; it must be 'balanced', or a list",
        ),
    ],
)
def test_what_does_not_go_together_is_one_line(tmp_path: Path, section: Any, given: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        simulate(config(tmp_path / "run", task=section), data=classes(0.6), **given)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


class TestBalanced:
    def test_by_the_held_out_records_and_no_others(self, tmp_path: Path) -> None:
        data = classes(0.75)
        ones = int((data.test_y == 1).sum())
        n = len(data.test_y)
        numbers = [n / (2 * (n - ones)), n / (2 * ones)]
        runs = [
            simulate(config(tmp_path / str(number), task={"options": {"weights": weights}}), data=data)
            for number, weights in enumerate(("balanced", numbers))
        ]
        assert torch.equal(runs[0].module[-1].weight, runs[1].module[-1].weight)
        assert fedspa.load(tmp_path / "0" / "config.toml").task.options == {"weights": "balanced"}


class TestProbabilities:
    def test_of_classes(self, tmp_path: Path) -> None:
        result = simulate(config(tmp_path / "run"), data=classes(0.4, kinds=3))
        x = classes(0.4, kinds=3).test_x
        found = result.predict_proba(x)
        assert found.shape == (200, 3)
        np.testing.assert_allclose(found.sum(axis=1), 1, rtol=1e-5)
        assert (found.argmax(axis=1) == result.predict(x)).all()

    @pytest.mark.parametrize(("name", "data", "columns"), [("binary", "parity", 2), ("multi-label", "bits", 4)])
    def test_of_labels(self, tmp_path: Path, name: str, data: str, columns: int) -> None:
        given = {"data": {"name": f"small_records:{data}"}, "task": {"name": name}}
        result = simulate(config(tmp_path / "run", **given))
        x = torch.rand(7, 1, 8, 8)
        found = result.predict_proba(x)
        assert found.shape == (7, columns)
        ones = found[:, 1] if name == "binary" else found
        assert ((ones > 0.5) == (result.predict(x) == 1)).all()


class TestTuned:
    @pytest.fixture(autouse=True)
    def _few_proxy_runs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(proxy, "_FARTHEST", 1)
        monkeypatch.setattr(proxy, "AVERAGES", (0.0,))
        monkeypatch.setattr(proxy, "_REPEATS", 2)

    def tuned(self, out: Path, data: Callable[[], fedspa.Dataset], **sections: Any) -> fedspa.RunResult:
        given = {
            "federation": {"agents": 6, "per_round": 3, "rounds": 12},
            "data": {"holdout": 0.25},
            "algorithm": {"batch": 20, "local_steps": 1},
            "privacy": {"noise": "seeded"},
            "run": {"out": str(out), "threads": 1},
        }
        merged = {name: {**given.get(name, {}), **sections.get(name, {})} for name in {*given, *sections}}
        return fedspa.tune(merged, epsilon=8.0, share=0.5, data=data())

    def test_by_the_metric(self, tmp_path: Path) -> None:
        metric = "log_loss"
        result = self.tuned(tmp_path / "run", lambda: classes(0.6), task={"metric": metric})
        tuning, scores = result.summary["tuning"], [line.scores[metric] for line in result.metrics]
        assert result.summary["score"] == metric
        for trial in tuning["trials"]:
            assert trial["scores"] == [scores[t] for t in trial["rounds"]]
        assert metric in tuning["test"]
        assert all(each["score"] > 0 for each in tuning["proxy"])

    @pytest.mark.parametrize(("metric", "learnable"), [("auc", False), ("log_loss", True)])
    def test_it_warns_before_it_spends_where_nothing_is_learned(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, metric: str, learnable: bool
    ) -> None:
        """The best of many runs on labels that follow from no input is above chance, by chance. What chance is, the
        repeats of a run show: as many as a user's."""
        monkeypatch.setattr(proxy, "_REPEATS", 6)
        rng = np.random.default_rng(0)
        x = rng.normal(size=(600, 4)).astype(np.float32)
        y = (x[:, 0] > 0 if learnable else rng.random(600) < 0.5).astype(np.int64)
        data = fedspa.from_arrays(x[100:], y[100:], x[:100], y[:100], name="coins")
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            self.tuned(tmp_path / "run", lambda: data, task={"metric": metric})
        said = [str(each.message) for each in heard if "nothing is spent yet" in str(each.message)]
        assert len(said) == (0 if learnable else 1)
        pattern = r"none of \d+ proxy runs clearly beats a constant answer: .* differ by"
        assert all(re.search(pattern, line) for line in said)
