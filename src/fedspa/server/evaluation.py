"""Accuracy and loss on the held-out records, with every core and the same bits whatever their number.

The forward pass is the engine's where it has one of its own (native), else torch's; either has threads of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from fedspa.engine.task import Predicts
from fedspa.learning.threads import torch_threads
from fedspa.server.job import ServerJob

Part = tuple[Tensor, Tensor]
PART = 4096  # records


class Evaluation:
    """The held-out records of a run, split once, and what scores them."""

    def __init__(self, job: ServerJob, device: torch.device) -> None:
        x, y = job.x.to(device), job.y.to(device)
        self._engine = job.engine if isinstance(job.engine, Predicts) else None
        self._parts: list[Part] = list(zip(torch.split(x, PART), torch.split(y, PART)))
        self._at_once = 256 if device.type == "cpu" else PART  # through torch
        self._count = torch.bincount(job.y, minlength=job.classes)
        self._model, self._threads = job.model, job.threads

    def __call__(self, theta: Tensor) -> tuple[float, float]:
        """Accuracy and mean loss at θ; the loss may be NaN or ∞."""
        *right, loss = self._totals(theta)
        records = int(self._count.sum())
        return sum(right) / records, loss / records

    def by_class(self, theta: Tensor) -> list[float | None]:
        """Accuracy at θ on the records of each class; None where there are none."""
        *right, _ = self._totals(theta)
        return [hits / count if count else None for hits, count in zip(right, self._count.tolist())]

    def _totals(self, theta: Tensor) -> list[float]:
        """How many are right in each class, and the sum of all losses."""
        with torch_threads(1 if self._engine is not None else self._threads), torch.no_grad():
            logits = self._logits(theta)
            scores = torch.stack([_score(each, y, len(self._count)) for each, (_, y) in zip(logits, self._parts)])
            found: list[float] = scores.sum(dim=0).tolist()  # reading a number off a GPU waits for it: once
        return found

    def _logits(self, theta: Tensor) -> Iterator[Tensor]:
        for x, _ in self._parts:
            found = None if self._engine is None else self._engine.logits(theta, x)
            # Where something overflows, what torch says counts: engines differ in which NaN survives a maximum.
            if found is None or not found.isfinite().all():
                found = torch.cat([self._model.logits(theta, few) for few in torch.split(x, self._at_once)])
            yield found


def _score(logits: Tensor, y: Tensor, classes: int) -> Tensor:
    """How many are right in each class and the sum of all losses."""
    row = torch.zeros(classes + 1, dtype=torch.float64, device=y.device)
    row.index_add_(0, y, (logits.argmax(dim=1) == y).double())  # whole numbers: exact in any order
    row[classes] = functional.cross_entropy(logits, y, reduction="sum").double()
    return row
