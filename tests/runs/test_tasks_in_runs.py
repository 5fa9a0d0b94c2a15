"""Tasks in whole runs: by config and by Python alike, judged by their own score, tried before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_records import Tagger, own_loss, tokens
from small_runs import small
from torch import Tensor, nn
from torch.nn import functional

import fedspa
from fedspa.errors import ConfigError, FedspaError
from fedspa.learning import models
from fedspa.learning.flat import FlatModel
from fedspa.running import run as simulate
from fedspa.runs.checkpoint import CheckpointError
from fedspa.runs.config import load
from fedspa.runs.rundir import Stopped
from fedspa.runs.setup import prepare, records_of

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


class TestBadInput:
    """One line each, and no folder left behind."""

    @pytest.mark.parametrize(
        ("given", "task", "said"),
        [
            ({"data": numbers}, "classification", "they are not whole numbers"),
            ({"data": numbers, "module": Bare}, "module", "an example must be a dict"),
            ({"data": tokens, "module": Tagger}, "regression", "one number per target"),
            ({"data": numbers, "metrics": {"mine": lambda found, y: 1 / 0}}, "regression", "'mine' failed (ZeroDiv"),
            ({"data": numbers, "metrics": {"mine": lambda found, y: found}}, "regression", "it must give one number"),
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


# Masks by layer, features, held-out training records and first values, as a run uses them.

# The mlp on digits has tensors of 4096, 64, 640 and 10 coordinates.
SHARES = [0.0, 1.0, 0.25, 1]


LAYERED: dict[str, Any] = {"mask": "fixed", "compression": SHARES, "server": "average"}


def test_only_the_chosen_share_of_each_layer_is_ever_trained(tmp_path: Path) -> None:
    config = small(tmp_path / "run", model={"name": "mlp"}, algorithm=LAYERED)
    result = fedspa.run(config)
    assert result.summary["compression"] == (64 + 160 + 10) / 4810
    before = FlatModel(models.build("mlp", (1, 8, 8), 10, seed=0)).flatten()
    moved = (FlatModel(result.module).flatten() != before).split([4096, 64, 640, 10])
    assert [int(part.sum()) for part in moved] == [0, 64, 160, 10]


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        ({"compression": [1.0, 1.0]}, ["compression", "4096, 64, 640, 10"]),
        ({"compression": [0.0, 0.0, 0.0, 0.0]}, ["compression", "no active coordinate"]),
        ({"compression": [1.5, 0, 0, 0]}, ["compression", "from 0 to 1"]),
        ({"mask": "shared"}, ["compression", "'fixed'"]),
        ({"name": "dp-fed"}, ["compression", "every coordinate"]),
    ],
)
def test_shares_that_do_not_fit_are_refused(tmp_path: Path, algorithm: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        prepare(load(small(tmp_path / "run", model={"name": "mlp"}, algorithm={**LAYERED, **algorithm})))
    assert all(word in str(error.value) for word in words)
    assert "\n" not in str(error.value)


def test_a_run_on_features_judges_itself_by_held_out_training_records(tmp_path: Path) -> None:
    config = load(small(tmp_path / "run", data={"features": "orientations", "holdout": 0.2}))
    plain, seen = records_of(load(small(tmp_path / "run"))), records_of(config)
    assert len(seen.test_y) == round(0.2 * len(plain.train_y))
    assert len(seen.train_y) + len(seen.test_y) == len(plain.train_y)
    assert seen.input_shape == (32,)  # 8 directions on a grid of 2 by 2
    result = fedspa.run(config)
    assert result.summary["dimension"] == 330
    assert result.summary["accuracy_last"] * len(seen.test_y) == pytest.approx(
        round(result.summary["accuracy_last"] * len(seen.test_y)), abs=1e-6
    )


def test_exact_noise_has_features_made_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = set()
    real = torch.split

    def split(x: torch.Tensor, size: int, *rest: Any, **more: Any) -> Any:
        sizes.add(size)
        return real(x, size, *rest, **more)

    monkeypatch.setattr("fedspa.data.features.torch.split", split)
    section = {"data": {"features": "orientations", "holdout": 0.3}}
    records_of(load(small(tmp_path / "run", **section, privacy={"noise": "exact"})))
    assert sizes == {1}
