"""The back end for any module that autograd can go through.

On a CPU each example by itself, which keeps examples apart to the bit; on a GPU `vmap(grad)` in micro-batches under a
memory budget, which does not (`separates_records`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from fedspa.engine.local import local_steps, rows_at_once
from fedspa.engine.task import LocalResult, LocalTask, strange_labels
from fedspa.learning.flat import FlatModel


class GenericEngine:
    name = "generic"

    def __init__(self, module: nn.Module, memory_budget: int | None = None) -> None:
        """`memory_budget` is in bytes of per-example gradients; what the device likes without it."""
        self._model = FlatModel(module)
        self._budget = memory_budget
        self._classes: int | None = None  # on a GPU, which must not be given a label outside of them
        self._maps = False

    @property
    def separates_records(self) -> bool:
        return all(parameter.device.type == "cpu" for parameter in self._model.module.parameters())

    def train(self, theta: Tensor, tasks: Sequence[LocalTask]) -> list[LocalResult]:
        return [local_steps(theta, task, self) for task in tasks]

    def rows(self, theta: Tensor, x: Tensor, y: Tensor, coordinates: Tensor | None) -> Iterator[Tensor]:
        microbatch = rows_at_once(theta, self._budget)
        gradients_of = self._model.gradients_alone if theta.device.type == "cpu" else self._on_gpu
        for x_part, y_part in zip(torch.split(x, microbatch), torch.split(y, microbatch)):
            gradients = gradients_of(theta, x_part, y_part)
            yield gradients if coordinates is None else gradients[:, coordinates]

    def mean(self, theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return self._model.gradient(theta, x, y)

    def _on_gpu(self, theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """There a label outside the classes would end the process: it is looked for first, and costs its record the
        gradient."""
        if self._classes is None:
            self._try(theta, torch.zeros_like(x[:1]))
        assert self._classes is not None
        strange = strange_labels(y, self._classes)
        together = self._maps and len(y) > 1
        gradients_of = self._model.per_example_gradients() if together else self._model.gradients_alone
        return gradients_of(theta, x, y.masked_fill(strange, 0)).masked_fill_(strange.unsqueeze(1), torch.nan)

    def _try(self, theta: Tensor, nothing: Tensor) -> None:
        """How many classes there are, and whether vmap can take this model: it has no rule for an LSTM, for example."""
        with torch.no_grad():
            self._classes = self._model.logits(theta, nothing).shape[1]
        try:
            label = torch.zeros(1, dtype=torch.int64, device=nothing.device)
            self._model.per_example_gradients()(theta, nothing, label)
            self._maps = True
        except RuntimeError:
            self._maps = False
