"""Yes or no, once per example (binary) or for each of several labels: binary cross-entropy of logits."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from fedspa.errors import ConfigError, DataError
from fedspa.examples import Tree
from fedspa.learning.tasks.base import Baseline, OfOutputs
from fedspa.learning.tasks.classification import MOST_FREQUENT
from fedspa.learning.tasks.measures import ClassCounts, LabelScores, Measure


class MultiLabel(OfOutputs):
    """Targets are 0 or 1, (examples, labels). An example's loss is the mean over its labels."""

    name = "multi-label"
    takes_logits = True
    headline = "auc"

    def __init__(self, width: int, *, weights: tuple[float, ...] | None = None) -> None:
        """`weights` are those of the ones, a number for each label, against 1 for the zeros."""
        if weights is not None and len(weights) != width:
            raise ConfigError(f"task.weights has {len(weights)} weights; the data has {width} labels: one for each")
        self.width, self.weights = width, weights

    def targets(self, y: Tree, what: str) -> Tree:
        if not isinstance(y, Tensor) or y.ndim not in (1, 2) or y[:1].numel() == 0:
            raise DataError(f"{what}: {self.name} needs a label 0 or 1 per example, or a row of them")
        strange = y[(y != 0) & (y != 1)]
        if len(strange):
            raise DataError(f"{what}: a label is {strange[0].item():g}; {self.name} needs 0 or 1")
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

    def strange(self, found: Tensor, y: Tree) -> Tensor | None:
        assert isinstance(y, Tensor)
        return ((y != 0) & (y != 1)).reshape(len(y), -1).any(dim=1)

    def measure(self) -> Measure:
        return LabelScores()

    def baseline(self, y: Tree) -> Baseline | None:
        return Baseline("one answer for all", 0.5)

    @staticmethod
    def answers(found: Tensor) -> Tensor:
        return (found.reshape(len(found), -1) > 0).to(torch.int64)


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

    def baseline(self, y: Tree) -> Baseline | None:
        assert isinstance(y, Tensor)
        ones = int((y == 1).sum())
        return Baseline(MOST_FREQUENT, max(ones, len(y) - ones) / len(y))

    @staticmethod
    def answers(found: Tensor) -> Tensor:
        return MultiLabel.answers(found)[:, 0]


class _Two(ClassCounts):
    """A logit is the second of two classes' scores, of which the first is zero."""

    def __init__(self) -> None:
        super().__init__(2)

    def add(self, found: Tensor, y: Tree) -> None:
        assert isinstance(y, Tensor)
        logit = found.reshape(-1)
        super().add(torch.stack([torch.zeros_like(logit), logit], dim=1), y.reshape(-1).to(torch.int64))
