"""Scores of held-out examples, gathered part by part: what is counted is exact, and ties count a half."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from fedspa.examples import Tree

Scores = dict[str, float | None]


class Measure(ABC):
    """What every task's scores are asked for."""

    @abstractmethod
    def add(self, found: Tensor, y: Tree) -> None:
        """Outputs and targets of some more examples."""

    @abstractmethod
    def scores(self) -> Scores:
        """Return the scores by name, the task's headline first; None where the examples do not define one."""

    def by_class(self) -> list[float | None] | None:
        """Accuracy on the examples of each class; None where there are no classes."""
        return None

    def constant_prediction(self) -> int | None:
        """Return the class that is predicted for every example, where it is only one and others were right at times."""
        return None


class NoScores(Measure):
    """No scores beside the loss."""

    def add(self, found: Tensor, y: Tree) -> None: ...

    def scores(self) -> Scores:
        return {}


class ClassCounts(Measure):
    """Right, predicted and actual examples of each class: whole numbers, exact in any order. Of two classes also which
    of two examples is ranked higher."""

    def __init__(self, classes: int, headline: str = "accuracy", *, ranked: bool = True) -> None:
        self._counts = torch.zeros(3, classes, dtype=torch.float64)
        self._headline = headline
        self._margins: list[tuple[Tensor, Tensor]] | None = [] if classes == 2 and ranked else None

    def add(self, found: Tensor, y: Tree) -> None:
        assert isinstance(y, Tensor)
        predicted = found.argmax(dim=1)
        hit, one = (predicted == y).double(), torch.ones(len(y), dtype=torch.float64, device=y.device)
        self._counts = self._counts.to(y.device)
        for row, labels, values in zip(self._counts, (y, predicted, y), (hit, one, one)):
            row.index_add_(0, labels, values)
        if self._margins is not None:
            self._margins.append((found[:, 1].double() - found[:, 0].double(), y == 1))

    def scores(self) -> Scores:
        right, predicted, actual = self._counts.tolist()
        recalls = [hits / count for hits, count in zip(right, actual) if count]
        scores: Scores = {
            self._headline: sum(right) / sum(actual) if sum(actual) else None,
            "balanced_accuracy": _mean(recalls),
            "f1": _mean([2 * hits / (p + a) for hits, p, a in zip(right, predicted, actual) if p + a]),
        }
        if self._margins is not None:
            scores["auc"] = auc(*(torch.cat(part) for part in zip(*self._margins))) if self._margins else None
        return scores

    def by_class(self) -> list[float | None]:
        right, _, actual = self._counts.tolist()
        return [hits / count if count else None for hits, count in zip(right, actual)]

    def constant_prediction(self) -> int | None:
        _, predicted, actual = self._counts.tolist()
        answers = [label for label, count in enumerate(predicted) if count]
        return answers[0] if len(answers) == 1 and sum(map(bool, actual)) > 1 else None


class LabelScores(Measure):
    """Of labels that each are there or not: ranking and F1, both a mean over labels, and whole rows that are right.

    A label that no example has, or every example, ranks nothing; one that neither is nor is predicted has no F1.
    """

    def __init__(self) -> None:
        self._found: list[Tensor] = []
        self._wanted: list[Tensor] = []

    def add(self, found: Tensor, y: Tree) -> None:
        assert isinstance(y, Tensor)
        self._found.append(found.reshape(len(y), -1))
        self._wanted.append(y.reshape(len(y), -1) == 1)

    def scores(self) -> Scores:
        found, wanted = torch.cat(self._found), torch.cat(self._wanted)
        predicted = found > 0
        ranks = [auc(found[:, label].double(), wanted[:, label]) for label in range(found.shape[1])]
        hits, either = (predicted & wanted).sum(0).tolist(), (predicted.sum(0) + wanted.sum(0)).tolist()
        return {
            "auc": _mean([rank for rank in ranks if rank is not None]),
            "f1": _mean([2 * h / e for h, e in zip(hits, either) if e]),
            "exact_match": float((predicted == wanted).all(dim=1).double().mean()),
        }


class Errors(Measure):
    """Sums from which the mean errors and R² follow, in float64. R² is a mean over the numbers of an example, of those
    that are not always the same. Errors are reported times `scale`."""

    def __init__(self, headline: str = "rmse", scale: float = 1.0) -> None:
        self._headline, self._scale = headline, scale
        self._count, self._absolute = 0, 0.0
        # Of each number: squared errors, its mean, and the squares around that.
        self._squared = self._mean = self._spread = torch.zeros(1, dtype=torch.float64)

    def add(self, found: Tensor, y: Tree) -> None:
        assert isinstance(y, Tensor)
        wanted, given = (part.reshape(len(y), -1).double().cpu() for part in (y, found))
        error = given - wanted
        self._absolute += float(error.abs().sum())
        mean, count = wanted.mean(dim=0), len(wanted)
        # Merged part by part around the means: a difference of large sums of squares would lose its digits.
        total, apart = self._count + count, mean - self._mean
        self._spread = self._spread + (wanted - mean).square().sum(dim=0) + apart**2 * (self._count * count / total)
        self._mean = self._mean + apart * (count / total)
        self._squared = self._squared + error.square().sum(dim=0)
        self._count = total

    def scores(self) -> Scores:
        numbers = self._count * len(self._squared)
        moving = self._spread > 0
        scores: Scores = {
            "rmse": self._scale * math.sqrt(float(self._squared.sum()) / numbers),
            "mae": self._scale * self._absolute / numbers,
            "r2": float((1 - self._squared[moving] / self._spread[moving]).mean()) if moving.any() else None,
        }
        return {self._headline: scores[self._headline]} | scores


class TokenScores(Measure):
    """Of the tokens that count, all together: a long example has more of them than a short one."""

    def __init__(self) -> None:
        self._sums = torch.zeros(3, dtype=torch.float64)  # tokens, right ones, and the sum of their losses

    def add(self, found: Tensor, y: Tree) -> None:
        """Add tokens in one row, without the ignored ones."""
        assert isinstance(y, Tensor)
        loss = found.log_softmax(dim=-1).gather(1, y.unsqueeze(1)).double().sum().neg()
        parts = torch.stack([loss.new_tensor(len(y)), (found.argmax(dim=1) == y).double().sum(), loss])
        self._sums = self._sums.to(parts) + parts

    def scores(self) -> Scores:
        count, right, loss = self._sums.tolist()
        return {
            "perplexity": math.exp(loss / count) if count and loss / count < _LARGEST_LOG else None,
            "token_accuracy": right / count if count else None,
        }


_LARGEST_LOG = 60.0  # a perplexity beyond e^60 says no more than none


def auc(scores: Tensor, positive: Tensor) -> float | None:
    """Return the chance that a positive example is ranked above another, ties as a half; None where there is only one
    kind. Ranks are halves of whole numbers, so the sums are exact."""
    if not bool(scores.isfinite().all()):
        return None
    _, place, sizes = torch.unique(scores, return_inverse=True, return_counts=True)
    ranks = (sizes.cumsum(0).double() - (sizes - 1).double() / 2)[place]
    above = int(positive.sum())
    pairs = above * (len(scores) - above)
    return (float(ranks[positive].sum()) - above * (above + 1) / 2) / pairs if pairs else None


def average_precision(scores: Tensor, positive: Tensor) -> float | None:
    """Return the mean over positive examples of the precision at their score, equal scores together; None where there
    is no positive example."""
    if not bool(scores.isfinite().all()) or not bool(positive.any()):
        return None
    _, place, sizes = torch.unique(scores, return_inverse=True, return_counts=True)
    hits = torch.zeros(len(sizes), dtype=torch.float64).index_add_(0, place, positive.double()).flip(0)
    return float((hits * hits.cumsum(0) / sizes.flip(0).cumsum(0)).sum() / hits.sum())


Rank = Callable[[Tensor, Tensor], float | None]


def mean_rank(rank: Rank, scores: Tensor, positive: Tensor) -> float:
    """Return the mean of `rank` over columns, which are classes or labels; those that have none are left out, and the
    mean of none is NaN."""
    found = [rank(scores[:, column], positive[:, column]) for column in range(scores.shape[1])]
    mean = _mean([value for value in found if value is not None])
    return math.nan if mean is None else mean


def constant_score(name: str, shares: Tensor) -> float | None:
    """Return the best score of an answer that is the same for all examples, where the classes have these shares of
    them; None for a score that it does not know."""
    most, present = float(shares.max()), int((shares > 0).sum())
    entropy = -float(torch.xlogy(shares, shares).sum())
    precision = float(shares[1]) if len(shares) == 2 else 1 / present
    return {
        "accuracy": most,
        "token_accuracy": most,
        "balanced_accuracy": 1 / present,
        "f1": 2 * most / (1 + most) / present,
        "auc": 0.5,
        "average_precision": precision,
        "log_loss": entropy,
        "perplexity": math.exp(entropy),
    }.get(name)


def _mean(values: list[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
