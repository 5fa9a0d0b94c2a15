"""One or more numbers per example: squared, absolute or Huber's error."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from fedspa.errors import ConfigError, DataError
from fedspa.examples import Tree
from fedspa.learning.options import Error
from fedspa.learning.tasks.base import Baseline, OfOutputs
from fedspa.learning.tasks.measures import Errors


class Regression(OfOutputs):
    """Targets are floats, (examples,) or (examples, numbers). An example's loss is the mean over its numbers."""

    name = "regression"

    def __init__(self, width: int = 1, *, loss: Error = "mse", huber: float = 1.0, scale: float = 1.0) -> None:
        """Huber's error is squared up to `huber` and absolute beyond. Scores are told in the targets' own unit, of
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
        return Errors(self.headline, self.scale)

    def baseline(self, y: Tree) -> Baseline:
        assert isinstance(y, Tensor)
        each = y.reshape(len(y), -1).double() * self.scale
        if self.headline == "mae":
            return Baseline("the median target", float((each - each.median(dim=0).values).abs().mean()))
        return Baseline("the mean target", math.sqrt(float((each - each.mean(dim=0)).square().mean())))

    @staticmethod
    def answers(found: Tensor) -> Tensor:
        rows = found.reshape(len(found), -1)
        return rows[:, 0] if rows.shape[1] == 1 else rows
