"""One or more numbers per example: squared, absolute or Huber's error."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from fedspa.errors import ConfigError, DataError
from fedspa.examples import Tree
from fedspa.learning.tasks.base import OfOutputs

Error = Literal["mse", "mae", "huber"]


class Regression(OfOutputs):
    """Targets are floats, (examples,) or (examples, numbers). An example's loss is the mean over its numbers."""

    name = "regression"
    headline = "rmse"

    def __init__(self, width: int = 1, *, loss: Error = "mse", huber: float = 1.0) -> None:
        """Huber's error is squared up to `huber` and absolute beyond."""
        self.width, self.error, self.huber = width, loss, huber

    def targets(self, y: Tree, what: str) -> Tree:
        if not isinstance(y, Tensor) or y.ndim not in (1, 2):
            raise DataError(f"{what}: regression needs one number per example, or one row of numbers")
        return y.to(torch.float32)

    def mean_loss(self, found: Tensor, y: Tree) -> Tensor:
        return self._each(found, y).mean()

    def total_loss(self, found: Tensor, y: Tree) -> Tensor:
        return self._each(found, y).double().sum()

    def _each(self, found: Tensor, y: Tree) -> Tensor:
        assert isinstance(y, Tensor)
        wanted, given = y.reshape(len(y), -1), found.reshape(len(y), -1)
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
        return Errors()


class Errors:
    """Sums from which the mean errors and R² follow, in float64."""

    def __init__(self) -> None:
        self._sums = torch.zeros(5, dtype=torch.float64)

    def add(self, found: Tensor, y: Tree) -> None:
        assert isinstance(y, Tensor)
        wanted, given = y.flatten().double(), found.flatten().double()
        error = given - wanted
        ones = torch.ones_like(wanted)
        parts = torch.stack([error.square(), error.abs(), wanted, wanted.square(), ones]).sum(dim=1)
        self._sums = self._sums.to(parts) + parts

    def scores(self) -> dict[str, float | None]:
        squared, absolute, total, total_squared, count = self._sums.tolist()
        spread = total_squared - total**2 / count
        return {
            "rmse": math.sqrt(squared / count),
            "mae": absolute / count,
            "r2": 1 - squared / spread if spread > 0 else None,
        }
