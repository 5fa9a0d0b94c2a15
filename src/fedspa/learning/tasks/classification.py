"""One class of several per example: cross-entropy."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from fedspa.errors import ConfigError, DataError
from fedspa.examples import Tree
from fedspa.learning.tasks.base import Baseline, OfOutputs
from fedspa.learning.tasks.measures import ClassCounts

MOST_FREQUENT = "the most frequent class"


class Classification(OfOutputs):
    """Targets are whole numbers 0 … classes - 1."""

    name = "classification"
    takes_logits = True
    headline = "accuracy"

    def __init__(
        self, classes: int | None = None, *, weights: tuple[float, ...] | None = None, label_smoothing: float = 0.0
    ) -> None:
        """`classes` may be left out where nothing is evaluated."""
        if weights is not None and classes is not None and len(weights) != classes:
            raise ConfigError(f"task.weights has {len(weights)} weights; the data has {classes} classes: one for each")
        self.classes = self.width = classes
        self.weights, self.label_smoothing = weights, label_smoothing

    @property
    def plain(self) -> bool:
        """Whether the loss is cross-entropy and nothing else, which every engine knows."""
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

    def strange(self, found: Tensor, y: Tree) -> Tensor | None:
        assert isinstance(y, Tensor)
        return (y < 0) | (y >= found.shape[-1])

    def measure(self) -> ClassCounts:
        assert self.classes is not None
        return ClassCounts(self.classes)

    def baseline(self, y: Tree) -> Baseline:
        assert isinstance(y, Tensor)
        return Baseline(MOST_FREQUENT, int(y.bincount().max()) / len(y))

    @staticmethod
    def answers(found: Tensor) -> Tensor:
        return found.argmax(dim=-1)
