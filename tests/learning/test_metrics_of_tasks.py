"""Scores, held against scikit-learn's, whatever the parts they come in."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn import metrics
from sklearn.utils.class_weight import compute_class_weight
from torch import Tensor
from torch.nn import functional

from fedspa.errors import ConfigError
from fedspa.learning.tasks import (
    Binary,
    Classification,
    MultiLabel,
    NextToken,
    Regression,
    Task,
    TokenClassification,
)
from fedspa.learning.tasks.base import Measure, auc, average_precision
from fedspa.learning.tasks.named import judged_by


def scored(task: Task, found: Tensor, y: Tensor, parts: int = 3) -> Measure:
    measure = task.measure()
    for some, targets in zip(found.tensor_split(parts), y.tensor_split(parts)):
        measure.add(some, targets)
    return measure


def coarse(*shape: int, seed: int = 0) -> Tensor:
    """Few values, so that many are equal."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)) / 2


@pytest.mark.parametrize("classes", [2, 5])
def test_classification(classes: int) -> None:
    found = coarse(200, classes)
    y = torch.randint(0, classes, (200,), generator=torch.Generator().manual_seed(1))
    y[y == 4] = 1  # a class that is predicted and never right
    predicted = found.argmax(1)
    scores = scored(Classification(classes), found, y).scores()
    assert next(iter(scores)) == "accuracy"
    assert scores["accuracy"] == (predicted == y).double().mean().item()
    recalls = metrics.recall_score(y, predicted, labels=y.unique(), average="macro")
    assert scores["balanced_accuracy"] == pytest.approx(recalls)
    assert scores["f1"] == pytest.approx(metrics.f1_score(y, predicted, average="macro"))
    assert ("auc" in scores) == (classes == 2)
    if classes == 2:
        assert scores["auc"] == pytest.approx(metrics.roc_auc_score(y, found[:, 1] - found[:, 0]), abs=1e-12)


def test_binary_is_classification_of_two() -> None:
    logit, y = coarse(150, 1), torch.randint(0, 2, (150,), generator=torch.Generator().manual_seed(1))
    two = torch.cat([torch.zeros_like(logit), logit], dim=1)
    scores, wanted = scored(Binary(1), logit, y.float()), scored(Classification(2), two, y)
    assert scores.scores() == wanted.scores()
    assert scores.by_class() == wanted.by_class()


def test_multi_label() -> None:
    found = coarse(120, 4)
    y = torch.randint(0, 2, (120, 4), generator=torch.Generator().manual_seed(1)).float()
    y[:, 3] = 0  # nobody has it: it ranks nothing
    scores = scored(MultiLabel(4), found, y).scores()
    ranks = [metrics.roc_auc_score(y[:, label], found[:, label]) for label in range(3)]
    assert next(iter(scores)) == "auc"
    assert scores["auc"] == pytest.approx(np.mean(ranks), abs=1e-12)
    assert scores["f1"] == pytest.approx(metrics.f1_score(y, found > 0, average="macro", zero_division=0))
    assert scores["exact_match"] == pytest.approx(metrics.accuracy_score(y, found > 0))
    nobody = scored(MultiLabel(1), -torch.ones(5, 1), torch.zeros(5, 1)).scores()
    assert (nobody["auc"], nobody["f1"], nobody["exact_match"]) == (None, None, 1.0)


@pytest.mark.parametrize("offset", [0.0, 1e6])
@pytest.mark.parametrize("width", [1, 3])
def test_regression(offset: float, width: int) -> None:
    y = coarse(100, width).double() + offset
    found = y + coarse(100, width, seed=2).double() / 3
    scores = scored(Regression(width), found, y).scores()
    assert scores["rmse"] == pytest.approx(math.sqrt(metrics.mean_squared_error(y, found)))
    assert scores["mae"] == pytest.approx(metrics.mean_absolute_error(y, found))
    assert scores["r2"] == pytest.approx(metrics.r2_score(y, found), abs=1e-9)
    assert next(iter(scores)) == "rmse"
    assert next(iter(scored(Regression(width, loss="mae"), found, y).scores())) == "mae"


def test_next_token() -> None:
    found = coarse(20, 6, 5)
    y = torch.randint(0, 5, (20, 6), generator=torch.Generator().manual_seed(1))
    y[::3, 3:] = -100
    scores = scored(NextToken(), found, y).scores()
    logits, labels = found[:, :-1].flatten(0, 1), y[:, 1:].flatten()
    assert scores["perplexity"] == pytest.approx(math.exp(functional.cross_entropy(logits.double(), labels).item()))
    counted = labels != -100
    assert scores["token_accuracy"] == (logits.argmax(1) == labels)[counted].double().mean().item()
    assert next(iter(scores)) == "perplexity"


def test_token_classification() -> None:
    found = coarse(20, 6, 3)
    y = torch.randint(0, 3, (20, 6), generator=torch.Generator().manual_seed(1))
    y[::3, 3:] = -100
    scores = scored(TokenClassification(), found, y).scores()
    counted, predicted = y != -100, found.argmax(2)
    assert next(iter(scores)) == "token_accuracy"
    assert scores["token_accuracy"] == (predicted == y)[counted].double().mean().item()
    assert scores["f1"] == pytest.approx(metrics.f1_score(y[counted], predicted[counted], average="macro"))


def test_no_token_at_all_says_nothing() -> None:
    none = torch.full((4, 3), -100)
    assert scored(NextToken(), coarse(4, 3, 2), none).scores() == {"perplexity": None, "token_accuracy": None}
    assert scored(TokenClassification(), coarse(4, 3, 2), none).scores()["token_accuracy"] is None
    assert NextToken().baseline(none) is None


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
        scores = scored(task, constant.expand(51, 2), y).scores()[task.headline]
        assert task.baseline(y).score == pytest.approx(scores)
        assert task.baseline(y).answer == ("the median target" if loss == "mae" else "the mean target")

    def test_tokens(self) -> None:
        y = torch.tensor([[3, 0, 1, -100], [3, 0, 0, 2]])
        shares = torch.tensor([3 / 5, 1 / 5, 1 / 5, 1e-30])
        scores = scored(NextToken(), shares.log().expand(2, 4, 4), y, 1).scores()["perplexity"]
        assert NextToken().baseline(y).score == pytest.approx(scores, rel=1e-6)
        assert TokenClassification().baseline(y).score == 3 / 7


def test_one_answer_for_all() -> None:
    y = torch.tensor([0, 1, 1])
    assert scored(Classification(2), torch.tensor([[0.0, 1.0]] * 3), y).constant_prediction() == 1
    assert (
        scored(Classification(2), torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]]), y).constant_prediction() is None
    )
    assert scored(Classification(2), torch.tensor([[0.0, 1.0]] * 3), torch.ones(3).long()).constant_prediction() is None
    assert scored(Binary(1), torch.ones(3, 1), y.float()).constant_prediction() == 1


class TestChosen:
    """The score that a run is judged by: its value, and what a constant answer makes of it."""

    @pytest.mark.parametrize("seed", range(3))
    @pytest.mark.parametrize("classes", [2, 4])
    def test_classes(self, classes: int, seed: int) -> None:
        found = coarse(200, classes, seed=seed)
        y = torch.randint(0, classes, (200,), generator=torch.Generator().manual_seed(seed + 9))
        chances = found.double().softmax(1)
        hot = functional.one_hot(y, classes)
        task = Classification(classes)
        if classes == 2:
            ranked = (y, found[:, 1].double() - found[:, 0].double())
            assert task.on_request()["auc"](found, y) == pytest.approx(metrics.roc_auc_score(*ranked), abs=1e-12)
        else:
            ranked = (hot, chances)
            wanted = metrics.roc_auc_score(y, chances, multi_class="ovr", average="macro")
            assert task.on_request()["auc"](found, y) == pytest.approx(wanted, abs=1e-12)
        wanted = metrics.average_precision_score(*ranked, average="macro")
        assert task.on_request()["average_precision"](found, y) == pytest.approx(wanted, abs=1e-12)
        assert task.on_request()["log_loss"](found, y) == pytest.approx(metrics.log_loss(y, chances))

    def test_labels(self) -> None:
        found, y = coarse(120, 3), (coarse(120, 3, seed=5) > 0.5).float()
        scores = MultiLabel(3).on_request()
        wanted = metrics.average_precision_score(y, found, average="macro")
        assert scores["average_precision"](found, y) == pytest.approx(wanted, abs=1e-12)
        each = [metrics.log_loss(y[:, label], found[:, label].double().sigmoid()) for label in range(3)]
        assert scores["log_loss"](found, y) == pytest.approx(np.mean(each))
        two = Binary(1).on_request()
        assert two["average_precision"](found[:, 0], y[:, :1]) == pytest.approx(
            metrics.average_precision_score(y[:, 0], found[:, 0]), abs=1e-12
        )
        assert two["log_loss"](found[:, 0], y[:, :1]) == pytest.approx(each[0])

    @pytest.mark.parametrize("classes", [2, 3])
    @pytest.mark.parametrize("name", ["accuracy", "balanced_accuracy", "f1", "auc", "average_precision", "log_loss"])
    def test_a_constant_answer(self, name: str, classes: int) -> None:
        y = torch.tensor([0] * 20 + [1] * 13 + [classes - 1] * 7)
        task, own = judged_by(name, Classification(classes), y, {})
        constant = (y.bincount().double() / len(y)).log().expand(len(y), classes)
        scores = scored(task, constant, y).scores() | {key: metric(constant, y) for key, metric in own.items()}
        found = task.baseline(y)
        assert found.score == pytest.approx(scores[name])

    @pytest.mark.parametrize("name", ["f1", "exact_match", "auc", "average_precision", "log_loss"])
    def test_a_constant_answer_of_labels(self, name: str) -> None:
        y = torch.tensor([[1.0, 0, 1]] * 5 + [[0.0, 0, 1]] * 4 + [[0.0, 1, 0]] * 3)
        task, own = judged_by(name, MultiLabel(3), y, {})
        shares = y.mean(0)
        constant = {"f1": torch.ones(3), "exact_match": 2 * y[0] - 1}.get(name, (shares / (1 - shares)).log())
        constant = constant.expand(12, 3)
        scores = scored(task, constant, y).scores() | {key: metric(constant, y) for key, metric in own.items()}
        assert task.baseline(y).score == pytest.approx(scores[name])

    @pytest.mark.parametrize("name", ["rmse", "mae", "r2"])
    def test_a_constant_number(self, name: str) -> None:
        y = coarse(51, 2)
        task, _ = judged_by(name, Regression(2), y, {})
        constant = y.median(dim=0).values if name == "mae" else y.mean(dim=0)
        scores = scored(task, constant.expand(51, 2), y).scores()
        assert task.baseline(y).score == pytest.approx(scores[name], abs=1e-6)

    @pytest.mark.parametrize("name", ["token_accuracy", "balanced_accuracy", "f1"])
    def test_a_constant_token(self, name: str) -> None:
        y = torch.tensor([[2, 0, 1, -100], [2, 0, 2, 2]])
        task, _ = judged_by(name, TokenClassification(), y, {})
        always = functional.one_hot(torch.full_like(y, 2), 3).float()
        assert task.baseline(y).score == pytest.approx(scored(task, always, y, 1).scores()[name])

    def test_one_kind_ranks_nothing(self) -> None:
        y, found = torch.zeros(5).long(), coarse(5, 2)
        assert math.isnan(Classification(2).on_request()["auc"](found, y))
        assert average_precision(found[:, 0].double(), y == 1) is None
        assert math.isnan(Classification(2).on_request()["average_precision"](found * math.nan, 1 - y))

    @pytest.mark.parametrize(
        ("task", "counts", "headline"),
        [
            (Classification(2), [30, 70], "accuracy"),
            (Classification(2), [29, 71], "auc"),
            (Binary(1), [71, 29], "auc"),
            (Classification(3), [71, 29], "balanced_accuracy"),
            (Classification(3), [10, 60, 30], "accuracy"),
            (Classification(2), [100], "accuracy"),  # one class alone ranks nothing
        ],
    )
    def test_imbalance_decides_where_nobody_does(self, task: Task, counts: list[int], headline: str) -> None:
        y = torch.cat([torch.full((count,), label) for label, count in enumerate(counts)])
        judged, own = judged_by(None, task, y, {})
        assert (judged.headline, own) == (headline, {})
        assert bool(judged.headline_note) == (headline != "accuracy")
        assert judged_by("accuracy", task, y, {})[0].headline == "accuracy"
        assert task.headline == "accuracy"  # the one that was given stays

    def test_balanced_weights(self) -> None:
        y = torch.tensor([0] * 6 + [1] * 3 + [2])
        wanted = compute_class_weight("balanced", classes=np.arange(3), y=y.numpy())
        assert Classification(3).balanced_weights(y) == pytest.approx(wanted)
        assert Binary(1).balanced_weights(torch.tensor([0.0, 0, 0, 1])) == (3.0,)
        with pytest.raises(ConfigError, match=r"no record of class 3: hold out more records"):
            Classification(4).balanced_weights(y)
        with pytest.raises(ConfigError, match=r"no record with label 1: hold out"):
            MultiLabel(2).balanced_weights(torch.tensor([[1.0, 0]]))
