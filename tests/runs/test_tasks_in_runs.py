"""Tasks in whole runs: by config and by Python alike, judged by their own score, tried before anything is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_records import Tagger, own_loss, parity, tokens
from small_runs import small
from torch import Tensor, nn
from torch.nn import functional

import fedspa
from fedspa.cli.watch import snapshot
from fedspa.errors import ConfigError, DataError, FedspaError
from fedspa.report import render
from fedspa.report.record import read
from fedspa.running import Stopped, simulate
from fedspa.runs.checkpoint import CheckpointError
from fedspa.runs.config import load
from fedspa.track import figures

X = torch.randn(240, 5, generator=torch.Generator().manual_seed(0))


def numbers() -> fedspa.Dataset:
    y = 3 * X[:, 0] - X[:, 1]
    return fedspa.from_arrays(X[:180], y[:180], X[180:], y[180:], name="numbers")


def config(out: Path, **task: Any) -> dict[str, Any]:
    return small(out, task=task, algorithm={"compression": 1.0, "local_lr": 0.1})


class Bare(nn.Module):
    """No bias: of zeros it gives zeros."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(5, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class TestNames:
    def test_toml_and_python_agree(self, tmp_path: Path) -> None:
        by_config = simulate(config(tmp_path / "a", name="regression", options={"loss": "huber"}), data=numbers())
        by_python = simulate(
            config(tmp_path / "b", name="regression", options={"loss": "huber"}), data=numbers(), task="regression"
        )
        assert by_config.metrics == by_python.metrics
        assert by_config.summary["task"] == "regression"
        assert load(tmp_path / "b" / "config.toml").task.options == {"loss": "huber"}

    def test_a_name_in_python_is_checked_against_the_options(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"unknown key task.options.loss; allowed: weights"):
            simulate(
                config(tmp_path / "run", name="regression", options={"loss": "mae"}), data=numbers(), task="binary"
            )
        with pytest.raises(ConfigError, match=r"task.options has label_smoothing; task 'given:"):
            simulate(config(tmp_path / "run", options={"label_smoothing": 0.1}), task=own_loss)
        assert not (tmp_path / "run").exists()

    @pytest.mark.parametrize(
        ("name", "options", "said"),
        [
            ("regression", {"weights": [1.0]}, "unknown key task.options.weights; allowed: huber, loss"),
            ("regression", {"huber": 2.0}, "task.options.huber is 2, which is for loss = 'huber'"),
            ("regression", {"loss": "mape"}, "task.options.loss is 'mape'; it must be 'mse', 'mae' or 'huber'"),
            ("classification", {"ignore_index": 0}, "allowed: label_smoothing, weights"),
            ("classification", {"weights": []}, "task.options.weights is []"),
            ("classification", {"weights": [-1.0]}, "task.options.weights.0 is -1.0"),
            ("classification", {"label_smoothing": 1.0}, "task.options.label_smoothing is 1.0"),
            ("next-token", {"ignore_index": 2**40}, "task.options.ignore_index is"),
            ("mine:loss", {"weights": [1.0]}, "task.options has weights; task 'mine:loss' has no options"),
        ],
    )
    def test_what_does_not_go_together(self, tmp_path: Path, name: str, options: dict[str, Any], said: str) -> None:
        with pytest.raises(ConfigError) as caught:
            load(config(tmp_path, name=name, options=options))
        assert said in str(caught.value)
        assert "\n" not in str(caught.value)


class TestBadInput:
    """One line each, and no folder left behind."""

    @pytest.mark.parametrize(
        ("given", "task", "said"),
        [
            ({"data": numbers}, "classification", "they are not whole numbers"),
            ({"data": numbers}, "next-token", "a row of whole numbers per example"),
            ({"data": numbers, "module": Bare}, "module", "an example must be a dict"),
            ({"data": tokens, "module": Tagger}, "regression", "one number per target"),
            ({"data": tokens}, "next-token", "not made for examples of several tensors"),
            ({"data": numbers, "metrics": {"mine": lambda found, y: 1 / 0}}, "regression", "'mine' failed (ZeroDiv"),
            ({"data": numbers, "metrics": {"mine": lambda found, y: found}}, "regression", "it must give one number"),
            ({"data": numbers, "metrics": {"rmse": lambda found, y: 0.0}}, "regression", "the name of a score"),
            ({"data": numbers, "metrics": {"epsilon": lambda found, y: 0.0}}, "regression", "no other figure"),
        ],
    )
    def test_it_is_said_before_anything_is_written(
        self, tmp_path: Path, given: dict[str, Any], task: str, said: str
    ) -> None:
        made = {key: value() if key != "metrics" else value for key, value in given.items()}
        with pytest.raises(FedspaError) as caught:
            simulate(config(tmp_path / "run"), task=task, **made)
        assert said in str(caught.value)
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "run").exists()

    @pytest.mark.parametrize(
        ("task", "said"),
        [
            (lambda module, example: module(example[0]).sum(dim=1), "must be one number"),
            (lambda module, example: 0.5, "it gave float"),
            (lambda module, example: module(example[0]).sum() * torch.nan, "is nan; it must be finite"),
            (lambda module, example: torch.zeros(()), "has no gradient for an example"),
            (torch.nn.CrossEntropyLoss(), "task = CrossEntropyLoss failed on records of shape (5,) float32 (TypeError"),
            (
                lambda module, example: module(example[0]).detach().sum(),
                "the task (task = <lambda>) has no gradient for an example made like (5,)",
            ),
        ],
    )
    def test_a_loss_of_ones_own(self, tmp_path: Path, task: Callable[..., Tensor], said: str) -> None:
        y = torch.zeros(240, dtype=torch.int64)
        y[1::2] = 1
        data = fedspa.from_arrays(X[:180], y[:180], X[180:] * 0, y[180:], name="mine")
        with pytest.raises(FedspaError) as caught:
            simulate(config(tmp_path / "run"), data=data, module=Bare(), task=task)
        assert said in str(caught.value)
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "run").exists()

    def test_a_module_that_fails_on_some_held_out_record(self, tmp_path: Path) -> None:
        data = tokens()
        data.test_x["input_ids"][5, 3] = 99  # type: ignore[call-overload, index]
        with pytest.raises(DataError, match=r"the model fails on the held-out records \(IndexError: "):
            simulate(config(tmp_path / "run"), data=data, module=Tagger(), task="next-token")
        assert not (tmp_path / "run").exists()

    def test_a_label_beyond_the_module(self, tmp_path: Path) -> None:
        data = tokens()
        data.train_y[7, 1] = 17  # type: ignore[call-overload, index]
        with pytest.raises(DataError, match="train: the target of record 7 is outside what the module tells apart"):
            simulate(config(tmp_path / "run"), data=data, module=Tagger(), task="token-classification")
        assert not (tmp_path / "run").exists()


class TestSummary:
    def test_accuracy_is_the_score_of_classes_and_stays_under_its_name(self, tmp_path: Path) -> None:
        summary = simulate(small(tmp_path / "run")).summary
        assert (summary["score"], summary["score_last"]) == ("accuracy", summary["accuracy_last"])
        assert list(summary["scores"]) == ["accuracy", "balanced_accuracy", "f1"]
        assert summary["baseline_answer"] == "the most frequent class"
        assert 0.1 <= summary["baseline"] < 0.12

    def test_regression(self, tmp_path: Path) -> None:
        result = simulate(config(tmp_path / "run", name="regression"), data=numbers())
        summary, data = result.summary, numbers()
        assert (summary["score"], summary["accuracy_last"], summary["accuracy_by_class"]) == ("rmse", None, None)
        assert summary["baseline"] == pytest.approx(float(data.test_y.double().std(correction=0)))  # type: ignore[union-attr]
        assert summary["score_best"] == min(line.scores["rmse"] for line in result.metrics)
        with torch.no_grad():
            found = result.module(data.test_x).squeeze(1)
        assert summary["score_last"] == pytest.approx(functional.mse_loss(found, data.test_y).sqrt().item(), rel=1e-5)

    def test_a_model_that_learned_nothing_is_called_so(self, tmp_path: Path) -> None:
        """It has no bias, and of held-out zeros it gives zeros: class 0."""
        y = (torch.arange(240) % 3 > 0).long()
        data = fedspa.from_arrays(X[:180], y[:180], X[180:] * 0, y[180:], name="mine")
        notes = simulate(config(tmp_path / "run"), data=data, module=Bare()).summary["warnings"]
        assert "the last model predicts class 0 for every held-out record" in notes
        worse = "the last model is not better than no model: accuracy 33.33%, and 66.67% by the most frequent class"
        assert any(note.startswith(worse) and "try algorithm.server = 'average'" in note for note in notes)
        plain = config(tmp_path / "plain")
        plain["algorithm"]["server"] = "average"
        notes = simulate(plain, data=data, module=Bare()).summary["warnings"]
        assert any(note.startswith(worse) and note.endswith("of the held-out records") for note in notes)

    def test_metrics_of_ones_own_stand_beside(self, tmp_path: Path) -> None:
        shapes = []

        def bias(found: Tensor, y: Any) -> Tensor:
            shapes.append((tuple(found.shape), tuple(y.shape)))
            return (found.squeeze(1) - y).mean()

        result = simulate(config(tmp_path / "run", name="regression"), data=numbers(), metrics={"bias": bias})
        assert list(result.summary["scores"]) == ["rmse", "mae", "r2", "bias"]
        assert result.summary["score"] == "rmse"
        assert set(shapes) == {((60, 1), (60,))}
        assert len(shapes) == 1 + len(result.metrics)  # once before the run
        with torch.no_grad():
            left = (result.module(X[180:]).squeeze(1) - numbers().test_y).mean()
        assert result.summary["scores"]["bias"] == pytest.approx(float(left), rel=1e-4, abs=1e-6)


class TestResume:
    def stopped(self, out: Path, **given: Any) -> None:
        with pytest.raises(Stopped):
            simulate(config(out), stop=lambda: True, **given)

    def test_another_function_is_another_run(self, tmp_path: Path) -> None:
        self.stopped(tmp_path / "run", task=own_loss)

        def other(module: nn.Module, example: Any) -> Tensor:
            return functional.multi_margin_loss(module(example[0]), example[1], margin=1.5)

        other.__name__ = "own_loss"
        with pytest.raises(CheckpointError, match="the digest of the task is another"):
            simulate(resume=tmp_path / "run", task=other)
        with pytest.raises(ConfigError, match="given its task in Python"):
            simulate(resume=tmp_path / "run")
        assert simulate(resume=tmp_path / "run", task=own_loss).summary["score"] == "loss"

    def test_another_name_or_option_is_another_run(self, tmp_path: Path) -> None:
        self.stopped(tmp_path / "run", data=parity())
        for task in ({"name": "binary"}, {"options": {"weights": [1.0, 2.0]}}):
            with pytest.raises(CheckpointError, match=r"task\.(name|options\.weights) was"):
                simulate(config(tmp_path / "run", **task), data=parity(), resume=tmp_path / "run")

    def test_metrics_must_come_again(self, tmp_path: Path) -> None:
        own = {"mean": lambda found, y: found.mean()}
        self.stopped(tmp_path / "run", metrics=own)
        with pytest.raises(CheckpointError, match=r"has the scores accuracy, .*, mean, and would go on with accuracy"):
            simulate(resume=tmp_path / "run")
        assert "mean" in simulate(resume=tmp_path / "run", metrics=own).summary["scores"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    out = tmp_path_factory.mktemp("runs")
    simulate(config(out / "numbers", name="regression"), data=numbers())
    simulate(config(out / "tokens", name="next-token"), data=tokens(), module=Tagger())
    simulate(config(out / "own"), task=own_loss)
    return [out / "numbers", out / "tokens", out / "own"]


class TestShown:
    def test_a_report_has_the_score_of_its_task(self, folders: list[Path]) -> None:
        run = read(folders[0])
        text = render([run])
        assert not run.problems
        assert "RMSE by round" in text
        assert "Accuracy" not in text
        assert "a minimum over rounds" in text
        assert f"without a model {run.summary['baseline']:.4g}, by the mean target" in text  # type: ignore[index]
        assert "cross-entropy" not in text

    def test_a_loss_below_zero_is_no_damage(self, tmp_path: Path) -> None:
        def negative(module: nn.Module, example: Any) -> Tensor:
            return functional.cross_entropy(module(example[0]), example[1]) - 10

        simulate(config(tmp_path / "run"), task=negative)
        run = read(tmp_path / "run")
        assert not run.problems
        assert run.best is not None
        assert run.scores[run.best] == min(line.loss for line in run.metrics) < 0
        assert "Loss by round" in render([run])

    def test_watch_and_trackers(self, folders: list[Path]) -> None:
        now = snapshot(folders[0])
        lines = [json.loads(line) for line in (folders[0] / "metrics.jsonl").read_text().splitlines()]
        told = figures(lines[-1])
        assert told["rmse"] == now.metrics[-1].score
        assert told["epsilon_not_private"] == now.metrics[-1].epsilon


def test_tokens_without_labels_run_as_they_come(tmp_path: Path) -> None:
    ids = torch.randint(0, 17, (150, 8), generator=torch.Generator().manual_seed(0))
    made = fedspa.from_examples({"input_ids": ids[:120]}, {"input_ids": ids[120:]}, name="text", target="")
    assert made.key == ""
    result = simulate(config(tmp_path / "run", name="next-token"), data=made, module=Tagger())
    assert result.summary["score"] == "perplexity"
