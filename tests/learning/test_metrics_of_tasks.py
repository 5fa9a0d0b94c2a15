"""Scores, held against scikit-learn's, whatever the parts they come in."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn import metrics
from torch import Tensor
from torch.nn import functional

from fedspa.learning.tasks import (
    Binary,
    Classification,
    CustomLoss,
    MultiLabel,
    NextToken,
    Regression,
    Task,
    TokenClassification,
)
from fedspa.learning.tasks.measures import Measure, auc


def scored(task: Task, found: Tensor, y: Tensor, parts: int = 3) -> Measure:
    measure = task.measure()
    for some, targets in zip(found.tensor_split(parts), y.tensor_split(parts)):
        measure.add(some, targets)
    return measure


def coarse(*shape: int, seed: int = 0) -> Tensor:
    """Few values, so that many are equal."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)) / 2


@pytest.mark.parametrize("classes", [2, 3, 5])
def test_classification(classes: int) -> None:
    found = coarse(200, classes)
    y = torch.randint(0, classes, (200,), generator=torch.Generator().manual_seed(1))
    y[y == 4] = 1  # a class that is predicted and never right
    predicted = found.argmax(1)
    told = scored(Classification(classes), found, y).scores()
    assert next(iter(told)) == "accuracy"
    assert told["accuracy"] == (predicted == y).double().mean().item()
    recalls = metrics.recall_score(y, predicted, labels=y.unique(), average="macro")
    assert told["balanced_accuracy"] == pytest.approx(recalls)
    assert told["f1"] == pytest.approx(metrics.f1_score(y, predicted, average="macro"))
    assert ("auc" in told) == (classes == 2)
    if classes == 2:
        assert told["auc"] == pytest.approx(metrics.roc_auc_score(y, found[:, 1] - found[:, 0]), abs=1e-12)


def test_binary_is_classification_of_two() -> None:
    logit, y = coarse(150, 1), torch.randint(0, 2, (150,), generator=torch.Generator().manual_seed(1))
    two = torch.cat([torch.zeros_like(logit), logit], dim=1)
    told, wanted = scored(Binary(1), logit, y.float()), scored(Classification(2), two, y)
    assert told.scores() == wanted.scores()
    assert told.by_class() == wanted.by_class()


def test_multi_label() -> None:
    found = coarse(120, 4)
    y = torch.randint(0, 2, (120, 4), generator=torch.Generator().manual_seed(1)).float()
    y[:, 3] = 0  # nobody has it: it ranks nothing
    told = scored(MultiLabel(4), found, y).scores()
    ranks = [metrics.roc_auc_score(y[:, label], found[:, label]) for label in range(3)]
    assert next(iter(told)) == "auc"
    assert told["auc"] == pytest.approx(np.mean(ranks), abs=1e-12)
    assert told["f1"] == pytest.approx(metrics.f1_score(y, found > 0, average="macro", zero_division=0))
    assert told["exact_match"] == pytest.approx(metrics.accuracy_score(y, found > 0))
    nobody = scored(MultiLabel(1), -torch.ones(5, 1), torch.zeros(5, 1)).scores()
    assert (nobody["auc"], nobody["f1"], nobody["exact_match"]) == (None, None, 1.0)


@pytest.mark.parametrize("offset", [0.0, 1e6])
@pytest.mark.parametrize("width", [1, 3])
def test_regression(offset: float, width: int) -> None:
    y = coarse(100, width).double() + offset
    found = y + coarse(100, width, seed=2).double() / 3
    told = scored(Regression(width), found, y).scores()
    assert told["rmse"] == pytest.approx(math.sqrt(metrics.mean_squared_error(y, found)))
    assert told["mae"] == pytest.approx(metrics.mean_absolute_error(y, found))
    assert told["r2"] == pytest.approx(metrics.r2_score(y, found), abs=1e-9)
    assert next(iter(told)) == "rmse"
    assert next(iter(scored(Regression(width, loss="mae"), found, y).scores())) == "mae"


def test_targets_that_never_move_have_no_r2() -> None:
    told = scored(Regression(), torch.zeros(4), torch.ones(4)).scores()
    assert (told["rmse"], told["r2"]) == (1.0, None)


def test_next_token() -> None:
    found = coarse(20, 6, 5)
    y = torch.randint(0, 5, (20, 6), generator=torch.Generator().manual_seed(1))
    y[::3, 3:] = -100
    told = scored(NextToken(), found, y).scores()
    logits, labels = found[:, :-1].flatten(0, 1), y[:, 1:].flatten()
    assert told["perplexity"] == pytest.approx(math.exp(functional.cross_entropy(logits.double(), labels).item()))
    counted = labels != -100
    assert told["token_accuracy"] == (logits.argmax(1) == labels)[counted].double().mean().item()
    assert next(iter(told)) == "perplexity"


def test_token_classification() -> None:
    found = coarse(20, 6, 3)
    y = torch.randint(0, 3, (20, 6), generator=torch.Generator().manual_seed(1))
    y[::3, 3:] = -100
    told = scored(TokenClassification(), found, y).scores()
    counted, predicted = y != -100, found.argmax(2)
    assert next(iter(told)) == "token_accuracy"
    assert told["token_accuracy"] == (predicted == y)[counted].double().mean().item()
    assert told["f1"] == pytest.approx(metrics.f1_score(y[counted], predicted[counted], average="macro"))


def test_no_token_at_all_says_nothing() -> None:
    none = torch.full((4, 3), -100)
    assert scored(NextToken(), coarse(4, 3, 2), none).scores() == {"perplexity": None, "token_accuracy": None}
    assert scored(TokenClassification(), coarse(4, 3, 2), none).scores()["token_accuracy"] is None
    assert NextToken().baseline(none) is None


def test_a_perplexity_beyond_all_measure_is_none() -> None:
    found = torch.tensor([[[0.0, 1e4], [0.0, 0.0]]])
    assert scored(NextToken(), found, torch.tensor([[0, 0]]), 1).scores()["perplexity"] is None


class TestAuc:
    def test_ties_count_a_half_exactly(self) -> None:
        scores, positive = torch.tensor([1.0, 1.0, 2.0, 2.0, 2.0]), torch.tensor([True, False, True, False, False])
        assert auc(scores, positive) == (0.5 + 0 + 0 + 1 + 0.5 + 0.5) / 6
        assert auc(torch.zeros(7), torch.arange(7) < 3) == 0.5

    @pytest.mark.parametrize("seed", range(5))
    def test_it_is_the_share_of_pairs(self, seed: int) -> None:
        scores = coarse(60, seed=seed).double()
        positive = torch.rand(60, generator=torch.Generator().manual_seed(seed)) < 0.3
        above, below = scores[positive].unsqueeze(1), scores[~positive].unsqueeze(0)
        pairs = (above > below).double() + (above == below).double() / 2
        assert auc(scores, positive) == pairs.sum().item() / pairs.numel()

    def test_one_kind_or_what_is_not_finite_has_none(self) -> None:
        assert auc(torch.ones(3), torch.ones(3, dtype=torch.bool)) is None
        assert auc(torch.tensor([1.0, math.nan]), torch.tensor([True, False])) is None


class TestBaseline:
    """What the best constant answer scores, by the same measure as a model."""

    def test_majority(self) -> None:
        y = torch.tensor([2, 2, 0, 1, 2])
        always = torch.eye(3)[torch.full((5,), 2)]
        assert Classification(3).baseline(y).score == scored(Classification(3), always, y).scores()["accuracy"] == 0.6
        assert Binary(1).baseline(torch.tensor([0.0, 0.0, 1.0])).score == 2 / 3

    @pytest.mark.parametrize("loss", ["mse", "mae"])
    def test_mean_and_median(self, loss: str) -> None:
        y = coarse(51, 2)
        task = Regression(2, loss=loss)
        constant = y.median(dim=0).values if loss == "mae" else y.mean(dim=0)
        told = scored(task, constant.expand(51, 2), y).scores()[task.headline]
        assert task.baseline(y).score == pytest.approx(told)
        assert task.baseline(y).answer == ("the median target" if loss == "mae" else "the mean target")

    def test_tokens(self) -> None:
        y = torch.tensor([[3, 0, 1, -100], [3, 0, 0, 2]])
        shares = torch.tensor([3 / 5, 1 / 5, 1 / 5, 1e-30])
        told = scored(NextToken(), shares.log().expand(2, 4, 4), y, 1).scores()["perplexity"]
        assert NextToken().baseline(y).score == pytest.approx(told, rel=1e-6)
        assert TokenClassification().baseline(y).score == 3 / 7

    def test_ranks_and_own_losses(self) -> None:
        assert MultiLabel(2).baseline(torch.zeros(3, 2)).score == 0.5
        assert CustomLoss(lambda module, example: torch.zeros(())).baseline(torch.zeros(3)) is None


def test_one_answer_for_all() -> None:
    y = torch.tensor([0, 1, 1])
    assert scored(Classification(2), torch.tensor([[0.0, 1.0]] * 3), y).one_answer() == 1
    assert scored(Classification(2), torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]]), y).one_answer() is None
    assert scored(Classification(2), torch.tensor([[0.0, 1.0]] * 3), torch.ones(3).long()).one_answer() is None
    assert scored(Binary(1), torch.ones(3, 1), y.float()).one_answer() == 1
