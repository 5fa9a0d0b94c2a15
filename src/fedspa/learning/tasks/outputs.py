"""Tasks on the module's outputs: one class of several, labels that are each there or not, numbers, and tokens.

For tokens, outputs are (examples, positions, classes), and an example's loss is the mean over its own tokens that
count, 0 where none does: how long an example is must not decide how much it weighs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from fedspa.errors import ConfigError, DataError
from fedspa.examples import Tree
from fedspa.learning.options import Error
from fedspa.learning.tasks.base import (
    Baseline,
    ClassCounts,
    Errors,
    LabelScores,
    Measure,
    Metric,
    OutputTask,
    Scores,
    TokenScores,
    auc,
    average_precision,
    constant_score,
    mean_rank,
)

IMBALANCED = 0.7  # of the held-out examples: with more in one class, accuracy flatters an answer that is always it
_ANY_ANSWER = "one answer for all"
_BASELINES = {"auc": _ANY_ANSWER, "average_precision": _ANY_ANSWER, "log_loss": "the class frequencies"}


def _class_baseline(headline: str, shares: Tensor) -> Baseline | None:
    score = constant_score(headline, shares)
    return None if score is None else Baseline(_BASELINES.get(headline, "the most frequent class"), score)


def _fair_headline(shares: Tensor) -> tuple[str, str]:
    """Return the headline for classes of such shares, and why it is not accuracy."""
    largest = float(shares.max())
    if not IMBALANCED < largest < 1:
        return "accuracy", ""
    fair, called = ("auc", "AUC") if len(shares) == 2 else ("balanced_accuracy", "balanced accuracy")
    return fair, (
        f"{largest:.1%} of the server's held-out records are of one class, so this run is judged by {called} and not "
        "by accuracy; task.metric names another score"
    )


def _balanced(counts: Tensor, what: str) -> tuple[float, ...]:
    """Return weights in inverse proportion to counts, of mean 1 over the examples."""
    if bool((counts == 0).any()):
        raise ConfigError(
            f"task.options.weights is 'balanced', and the server's held-out records have no {what} "
            f"{int((counts == 0).nonzero()[0])}: hold out more records (data.holdout), or give the weights as numbers"
        )
    return tuple((counts.sum() / (len(counts) * counts.double())).tolist())


class Classification(OutputTask):
    """Targets are whole numbers 0 … classes - 1."""

    name = "classification"
    takes_logits = True
    headline = "accuracy"

    def __init__(
        self, classes: int | None = None, *, weights: Sequence[float] | None = None, label_smoothing: float = 0.0
    ) -> None:
        """`classes` may be left out where nothing is evaluated."""
        if weights is not None and classes is not None and len(weights) != classes:
            raise ConfigError(
                f"task.options.weights has {len(weights)} weights; the data has {classes} classes: one for each"
            )
        self.classes = self.width = classes
        self.weights, self.label_smoothing = None if weights is None else tuple(weights), label_smoothing

    @property
    def plain(self) -> bool:
        """Return whether the loss is cross-entropy and nothing else, which every engine knows."""
        return self.weights is None and self.label_smoothing == 0

    def targets(self, y: Tree, what: str) -> Tree:
        if not isinstance(y, Tensor) or y.ndim != 1:
            raise DataError(f"{what}: classification needs one label per example, and its task may be another one")
        if y.is_floating_point() and not bool(((y == y.floor()) & (y.abs() < 2**31)).all()):
            raise DataError(
                f"{what}: labels are not whole numbers: classes are numbered 0, 1, 2 … (for numbers, task='regression')"
            )
        y = y.to(torch.int64)
        low, high = int(y.min()), int(y.max())
        if self.classes is not None and (low < 0 or high >= self.classes):
            raise DataError(f"{what}: label {low if low < 0 else high} is outside 0 … {self.classes - 1}")
        return y

    def losses(self, found: Tensor, y: Tree) -> Tensor:
        return self._loss(found, y, "none")

    def mean_loss(self, found: Tensor, y: Tree) -> Tensor:
        # torch's own mean divides by the weights again, by which a single example would lose its own.
        return self._loss(found, y, "mean") if self.plain else super().mean_loss(found, y)

    def total_loss(self, found: Tensor, y: Tree) -> Tensor:
        return self._loss(found, y, "sum").double()

    def _loss(self, found: Tensor, y: Tree, reduction: str) -> Tensor:
        assert isinstance(y, Tensor)
        if found.ndim == 1:  # `.squeeze()` drops the dimension of a batch of one
            found = found.reshape(len(y), -1)
        # torch passes over one label, -100 by default: here each outside the classes is wrong, so that one is out of
        # reach.
        y, ignored = y.clamp(min=-1), torch.iinfo(torch.int64).min
        weights = None if self.weights is None else torch.tensor(self.weights, dtype=found.dtype, device=found.device)
        return functional.cross_entropy(
            found, y, weights, ignore_index=ignored, reduction=reduction, label_smoothing=self.label_smoothing
        )

    def require_outputs(self, found: Tensor, y: Tree) -> None:
        assert isinstance(y, Tensor)
        assert self.classes is not None
        if found.shape != (len(y), self.classes):
            raise ConfigError(
                f"it must give one score per class, shape (batch, {self.classes}) for the labels 0 to "
                f"{self.classes - 1}: for a batch of {len(y)} it gave {tuple(found.shape)}"
            )

    def invalid_targets(self, found: Tensor, y: Tree) -> Tensor | None:
        assert isinstance(y, Tensor)
        return (y < 0) | (y >= found.shape[-1])

    def measure(self) -> ClassCounts:
        assert self.classes is not None
        return ClassCounts(self.classes)

    @property
    def measured(self) -> tuple[str, ...]:
        return ("accuracy", "balanced_accuracy", "f1", *(("auc",) if self.classes == 2 else ()))

    def on_request(self) -> Mapping[str, Metric]:
        return {
            "auc": lambda found, y: mean_rank(auc, *_one_against_rest(found, y)),
            "average_precision": lambda found, y: mean_rank(average_precision, *_one_against_rest(found, y)),
            "log_loss": lambda found, y: float(functional.cross_entropy(found.double(), y)),
        }

    def fair_headline(self, y: Tree) -> tuple[str, str]:
        return _fair_headline(self._shares(y))

    def baseline(self, y: Tree) -> Baseline | None:
        return _class_baseline(self.headline, self._shares(y))

    def balanced_weights(self, y: Tree) -> tuple[float, ...]:
        """Return weights by which every class counts the same among such targets."""
        assert isinstance(y, Tensor)
        return _balanced(y.bincount(minlength=self.classes or 0), "record of class")

    def _shares(self, y: Tree) -> Tensor:
        assert isinstance(y, Tensor)
        return y.bincount(minlength=self.classes or 0).double() / len(y)

    @staticmethod
    def answers(found: Tensor) -> Tensor:
        return found.argmax(dim=-1)

    @staticmethod
    def probabilities(found: Tensor) -> Tensor | None:
        return found.softmax(dim=-1)


def _one_against_rest(found: Tensor, y: Tree) -> tuple[Tensor, Tensor]:
    """Return scores by which examples are ranked, and who is positive: a column per class, or the second of two."""
    assert isinstance(y, Tensor)
    if found.shape[1] == 2:
        return (found[:, 1:].double() - found[:, :1].double()), y.unsqueeze(1) == 1
    return found.double().softmax(dim=1), functional.one_hot(y, found.shape[1]) == 1


class MultiLabel(OutputTask):
    """Targets are 0 or 1, (examples, labels). An example's loss is the mean over its labels."""

    name = "multi-label"
    takes_logits = True
    headline = "auc"

    def __init__(self, width: int, *, weights: Sequence[float] | None = None) -> None:
        """`weights` are those of the ones, a number for each label, against 1 for the zeros."""
        if weights is not None and len(weights) != width:
            raise ConfigError(
                f"task.options.weights has {len(weights)} weights; the data has {width} labels: one for each"
            )
        self.width, self.weights = width, None if weights is None else tuple(weights)

    def targets(self, y: Tree, what: str) -> Tree:
        if not isinstance(y, Tensor) or y.ndim not in (1, 2) or y[:1].numel() == 0:
            raise DataError(f"{what}: {self.name} needs a label 0 or 1 per example, or a row of them")
        invalid = y[(y != 0) & (y != 1)]
        if len(invalid):
            raise DataError(f"{what}: a label is {invalid[0].item():g}; {self.name} needs 0 or 1")
        return y.to(torch.float32)

    def losses(self, found: Tensor, y: Tree) -> Tensor:
        assert isinstance(y, Tensor)
        wanted, given = y.reshape(len(y), -1).to(found.dtype), found.reshape(len(y), -1)
        # A label that is neither costs the example its gradient; torch would follow it far beyond any sense.
        wanted = wanted.masked_fill((wanted != 0) & (wanted != 1), torch.nan)
        weights = None if self.weights is None else torch.tensor(self.weights, dtype=found.dtype, device=found.device)
        each = functional.binary_cross_entropy_with_logits(given, wanted, pos_weight=weights, reduction="none")
        return each.mean(dim=1)

    def require_outputs(self, found: Tensor, y: Tree) -> None:
        assert isinstance(y, Tensor)
        if found.shape[:1] != y.shape[:1] or found.numel() != y.numel():
            raise ConfigError(
                f"it must give one logit per label, shape (batch, {self.width}): for a batch of {len(y)} it gave "
                f"{tuple(found.shape)}"
            )

    def invalid_targets(self, found: Tensor, y: Tree) -> Tensor | None:
        assert isinstance(y, Tensor)
        return ((y != 0) & (y != 1)).reshape(len(y), -1).any(dim=1)

    def measure(self) -> Measure:
        return LabelScores()

    @property
    def measured(self) -> tuple[str, ...]:
        return ("auc", "f1", "exact_match")

    def on_request(self) -> Mapping[str, Metric]:
        return {
            "average_precision": lambda found, y: mean_rank(average_precision, *_by_label(found, y)),
            "log_loss": lambda found, y: _log_loss(*_by_label(found, y)),
        }

    def baseline(self, y: Tree) -> Baseline | None:
        assert isinstance(y, Tensor)
        rows = y.reshape(len(y), -1).double()
        ones = rows.mean(dim=0)
        there = ones[ones > 0]
        if self.headline == "auc":
            return Baseline(_ANY_ANSWER, 0.5)
        if self.headline == "f1" and len(there):
            return Baseline("every label", float((2 * there / (1 + there)).mean()))
        if self.headline == "exact_match":
            return Baseline("the most frequent row", max(Counter(map(tuple, rows.tolist())).values()) / len(rows))
        if self.headline == "average_precision" and len(there):
            return Baseline(_ANY_ANSWER, float(there.mean()))
        if self.headline == "log_loss":
            entropy = -float((torch.xlogy(ones, ones) + torch.xlogy(1 - ones, 1 - ones)).mean())
            return Baseline("the label frequencies", entropy)
        return None

    def balanced_weights(self, y: Tree) -> tuple[float, ...]:
        """Return weights by which the ones of each label count as much as its zeros among such targets."""
        assert isinstance(y, Tensor)
        ones = y.reshape(len(y), -1).double().sum(dim=0)
        _balanced(ones, "record with label")
        return tuple(((len(y) - ones) / ones).tolist())

    @staticmethod
    def answers(found: Tensor) -> Tensor:
        return (found.reshape(len(found), -1) > 0).to(torch.int64)

    @staticmethod
    def probabilities(found: Tensor) -> Tensor | None:
        return found.reshape(len(found), -1).sigmoid()


def _by_label(found: Tensor, y: Tree) -> tuple[Tensor, Tensor]:
    assert isinstance(y, Tensor)
    return found.reshape(len(y), -1).double(), y.reshape(len(y), -1) == 1


def _log_loss(logits: Tensor, positive: Tensor) -> float:
    return float(functional.binary_cross_entropy_with_logits(logits, positive.double()))


class Binary(MultiLabel):
    """Targets are 0 or 1, one per example; the module gives one logit."""

    name = "binary"
    headline = "accuracy"

    def targets(self, y: Tree, what: str) -> Tree:
        y = super().targets(y, what)
        assert isinstance(y, Tensor)
        if y[0].numel() != 1:
            raise DataError(f"{what}: binary needs one label per example, and each has {y[0].numel()}: multi-label")
        return y

    def measure(self) -> Measure:
        return _Two()

    @property
    def measured(self) -> tuple[str, ...]:
        return ("accuracy", "balanced_accuracy", "f1", "auc")

    def fair_headline(self, y: Tree) -> tuple[str, str]:
        return _fair_headline(self._shares(y))

    def baseline(self, y: Tree) -> Baseline | None:
        return _class_baseline(self.headline, self._shares(y))

    def _shares(self, y: Tree) -> Tensor:
        assert isinstance(y, Tensor)
        return y.reshape(-1).to(torch.int64).bincount(minlength=2).double() / len(y)

    @staticmethod
    def answers(found: Tensor) -> Tensor:
        return MultiLabel.answers(found)[:, 0]

    @staticmethod
    def probabilities(found: Tensor) -> Tensor | None:
        ones = found.reshape(len(found), 1)
        return torch.cat([-ones, ones], dim=1).sigmoid()


class _Two(ClassCounts):
    """A logit is the second of two classes' scores, of which the first is zero."""

    def __init__(self) -> None:
        super().__init__(2)

    def add(self, found: Tensor, y: Tree) -> None:
        assert isinstance(y, Tensor)
        logit = found.reshape(-1)
        super().add(torch.stack([torch.zeros_like(logit), logit], dim=1), y.reshape(-1).to(torch.int64))


class Regression(OutputTask):
    """Targets are floats, (examples,) or (examples, numbers). An example's loss is the mean over its numbers."""

    name = "regression"

    def __init__(self, width: int = 1, *, loss: Error = "mse", huber: float = 1.0, scale: float = 1.0) -> None:
        """Huber's error is squared up to `huber` and absolute beyond. Scores are in the targets' own unit, of
        which `scale` is 1 of what the module learns; the loss is not."""
        self.width, self.error, self.huber, self.scale = width, loss, huber, scale
        self.headline = "mae" if loss == "mae" else "rmse"

    def targets(self, y: Tree, what: str) -> Tree:
        if not isinstance(y, Tensor) or y.ndim not in (1, 2) or y[:1].numel() == 0:
            raise DataError(f"{what}: regression needs one number per example, or one row of numbers")
        return y.to(torch.float32)

    def losses(self, found: Tensor, y: Tree) -> Tensor:
        assert isinstance(y, Tensor)
        wanted, given = y.reshape(len(y), -1).to(found.dtype), found.reshape(len(y), -1)
        if self.error == "mse":
            each = functional.mse_loss(given, wanted, reduction="none")
        elif self.error == "mae":
            each = functional.l1_loss(given, wanted, reduction="none")
        else:
            each = functional.huber_loss(given, wanted, reduction="none", delta=self.huber)
        return each.mean(dim=1)

    def require_outputs(self, found: Tensor, y: Tree) -> None:
        assert isinstance(y, Tensor)
        if found.shape[:1] != y.shape[:1] or found.numel() != y.numel():
            raise ConfigError(
                f"it must give one number per target, shape (batch, {y[0].numel()}): for a batch of {len(y)} it "
                f"gave {tuple(found.shape)}"
            )

    def measure(self) -> Errors:
        return Errors("mae" if self.error == "mae" else "rmse", self.scale)

    @property
    def measured(self) -> tuple[str, ...]:
        return ("rmse", "mae", "r2")

    def baseline(self, y: Tree) -> Baseline | None:
        assert isinstance(y, Tensor)
        each = y.reshape(len(y), -1).double() * self.scale
        if self.headline == "mae":
            return Baseline("the median target", float((each - each.median(dim=0).values).abs().mean()))
        if self.headline == "r2":
            return Baseline("the mean target", 0.0)
        if self.headline != "rmse":
            return None
        return Baseline("the mean target", math.sqrt(float((each - each.mean(dim=0)).square().mean())))

    @staticmethod
    def answers(found: Tensor) -> Tensor:
        rows = found.reshape(len(found), -1)
        return rows[:, 0] if rows.shape[1] == 1 else rows


class TokenClassification(OutputTask):
    """Targets are whole numbers, (examples, positions); `ignore_index` where a token does not count."""

    name = "token-classification"
    takes_logits = True
    headline = "token_accuracy"

    def __init__(self, *, ignore_index: int = -100) -> None:
        self.ignored = ignore_index

    def targets(self, y: Tree, what: str) -> Tree:
        if not isinstance(y, Tensor) or y.ndim != 2 or y[:1].numel() == 0 or y.is_floating_point():
            raise DataError(f"{what}: {self.name} needs a row of whole numbers per example, a label for each token")
        y = y.to(torch.int64)
        if bool(((y < 0) & (y != self.ignored)).any()):
            low = int(y[y != self.ignored].min())
            raise DataError(f"{what}: label {low} is below 0, and task.ignore_index is {self.ignored}")
        return y

    def losses(self, found: Tensor, y: Tree) -> Tensor:
        found, y = self.aligned(found, y)
        counts = y != self.ignored
        # A label outside the classes costs the example its gradient, and never a GPU its process.
        place = y.clamp(0, found.shape[-1] - 1)
        loss = found.log_softmax(dim=-1).gather(-1, place.unsqueeze(-1)).squeeze(-1).neg()
        known = torch.ones_like(loss).masked_fill(counts & (y != place), torch.nan)
        loss = (loss * known).masked_fill(~counts, 0)
        return loss.sum(dim=1) / counts.sum(dim=1).clamp(min=1)

    def aligned(self, found: Tensor, y: Tree) -> tuple[Tensor, Tensor]:
        """Outputs, and the label that stands against each."""
        assert isinstance(y, Tensor)
        return found, y

    def require_outputs(self, found: Tensor, y: Tree) -> None:
        assert isinstance(y, Tensor)
        if found.ndim != 3 or found.shape[:2] != y.shape:
            raise ConfigError(
                f"it must give a score per class for each token, shape (batch, {y.shape[1]}, classes): for a batch "
                f"of {len(y)} it gave {tuple(found.shape)}"
            )

    def invalid_targets(self, found: Tensor, y: Tree) -> Tensor | None:
        assert isinstance(y, Tensor)
        return ((y != self.ignored) & ((y < 0) | (y >= found.shape[-1]))).any(dim=1)

    def measure(self) -> Measure:
        return _Counted(self, None)

    @property
    def measured(self) -> tuple[str, ...]:
        return ("token_accuracy", "balanced_accuracy", "f1")

    def baseline(self, y: Tree) -> Baseline | None:
        shares = self._shares(y)
        score = None if shares is None else constant_score(self.headline, shares)
        answer = "the token frequencies" if self.headline == "perplexity" else "the most frequent label"
        return None if score is None else Baseline(answer, score)

    def _shares(self, y: Tree) -> Tensor | None:
        """Return the share of each label among the tokens that count."""
        assert isinstance(y, Tensor)
        _, y = self.aligned(y, y)
        counted = y[y != self.ignored]
        return counted.bincount().double() / len(counted) if len(counted) else None

    @staticmethod
    def answers(found: Tensor) -> Tensor:
        return found.argmax(dim=-1)

    @staticmethod
    def probabilities(found: Tensor) -> Tensor | None:
        return found.softmax(dim=-1)


class NextToken(TokenClassification):
    """Targets lie at the position of their own token, as transformers has them, and are held against the output one
    before. Examples without targets are their own: `input_ids`, where `attention_mask` does not say that it is
    padding."""

    name = "next-token"
    headline = "perplexity"

    def labels(self, x: Tree, y: Tree) -> Tree:
        if not isinstance(y, Tensor) or y.ndim != 2 or y.shape[1] > 0:
            return y
        ids = x.get("input_ids") if isinstance(x, dict) else x
        if not isinstance(ids, Tensor):
            raise DataError("next-token: examples without labels must be `input_ids`, or one tensor of tokens")
        mask = x.get("attention_mask") if isinstance(x, dict) else None
        return ids.masked_fill(mask == 0, self.ignored) if isinstance(mask, Tensor) else ids

    def aligned(self, found: Tensor, y: Tree) -> tuple[Tensor, Tensor]:
        assert isinstance(y, Tensor)
        return found[:, :-1], y[:, 1:]

    def measure(self) -> Measure:
        return _Counted(self, TokenScores())

    @property
    def measured(self) -> tuple[str, ...]:
        return ("perplexity", "token_accuracy")


class _Counted(Measure):
    """Hands the tokens that count to what scores them: by default their classes, which the first outputs number."""

    def __init__(self, task: TokenClassification, scored: Measure | None) -> None:
        self._task, self._scored = task, scored

    def add(self, found: Tensor, y: Tree) -> None:
        found, y = self._task.aligned(found, y)
        counts = y != self._task.ignored
        if self._scored is None:
            self._scored = ClassCounts(found.shape[-1], "token_accuracy", ranked=False)
        self._scored.add(found[counts], y[counts])

    def scores(self) -> Scores:
        assert self._scored is not None
        return self._scored.scores()

    def constant_prediction(self) -> int | None:
        return None if self._scored is None else self._scored.constant_prediction()
