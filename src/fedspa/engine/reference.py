"""The slow, obvious back end: one example at a time, ordinary autograd, float64.

It exists to be read and to be agreed with: every faster back end is tested against it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from fedspa.engine.local import local_steps
from fedspa.engine.task import LocalResult, LocalTask
from fedspa.learning.flat import FlatModel, copied
from fedspa.learning.threads import one_example_a_time


class ReferenceEngine:
    name = "reference"
    separates_records = True

    def __init__(self, module: nn.Module) -> None:
        self._model = FlatModel(copied(module).to("cpu", torch.float64))

    def train(self, theta: Tensor, tasks: Sequence[LocalTask]) -> list[LocalResult]:
        return [local_steps(theta.to("cpu", torch.float64), task, self) for task in tasks]

    def rows(self, theta: Tensor, x: Tensor, y: Tensor, coordinates: Tensor | None) -> Iterator[Tensor]:
        for i in range(len(y)):
            try:
                with one_example_a_time():
                    gradient = self.mean(theta, x[i : i + 1].clone(), y[i : i + 1].clone())
            except MemoryError:
                raise
            except Exception:  # what the model raises for an example costs it its gradient
                gradient = torch.full_like(theta, torch.nan)
            yield (gradient if coordinates is None else gradient[coordinates]).unsqueeze(0)

    def mean(self, theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
        x, y = x.to("cpu", torch.float64) if x.is_floating_point() else x.cpu(), y.cpu()
        return self._model.gradient(theta.to("cpu", torch.float64), x, y)
