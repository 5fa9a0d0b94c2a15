"""The back end for any module that torch.func can trace: vmap(grad), in micro-batches under a memory budget."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from fedspa.engine.flat import FlatModel
from fedspa.engine.local import local_steps, rows_at_once
from fedspa.engine.task import LocalResult, LocalTask


class GenericEngine:
    name = "generic"

    def __init__(self, module: nn.Module, memory_budget: int | None = None) -> None:
        """`memory_budget` is in bytes of per-example gradients; what the device likes without it."""
        self._model = FlatModel(module)
        self._gradients = self._model.per_example_gradients()
        self._budget = memory_budget

    def train(self, theta: Tensor, tasks: Sequence[LocalTask]) -> list[LocalResult]:
        return [local_steps(theta, task, self) for task in tasks]

    def rows(self, theta: Tensor, x: Tensor, y: Tensor, coordinates: Tensor | None) -> Iterator[Tensor]:
        microbatch = rows_at_once(theta, self._budget)
        for x_part, y_part in zip(torch.split(x, microbatch), torch.split(y, microbatch)):
            # The exact mode asks for one example at a time, for which vmap would cost many times the gradient.
            alone = len(y_part) == 1
            gradients = self.mean(theta, x_part, y_part)[None] if alone else self._gradients(theta, x_part, y_part)
            yield gradients if coordinates is None else gradients[:, coordinates]

    def mean(self, theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return self._model.gradient(theta, x, y)
