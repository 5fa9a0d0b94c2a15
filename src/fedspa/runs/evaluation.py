"""Accuracy and loss on the held-out records, with every core and the same bits whatever their number.

Where the model is a chain of plain layers on a CPU (the native engine's), parts of the records go to threads with a
copy of the model each: torch's own threads wait for each other in every layer, which costs a third more on an idle
machine (MNIST's CNN, two cores) and many times the work on a busy one. Any other model gets torch's threads.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import repeat

import torch
from torch import Tensor
from torch.nn import functional

from fedspa.engine.flat import FlatModel
from fedspa.runs.setup import Job

Part = tuple[Tensor, Tensor]


class Evaluation:
    """The held-out records of a run, split once, and the models that score them."""

    def __init__(self, job: Job, device: torch.device) -> None:
        x, y = job.data.test_x.to(device), job.data.test_y.to(device)
        size = 256 if device.type == "cpu" else 4096
        self._parts: list[Part] = list(zip(torch.split(x, size), torch.split(y, size)))
        self._count = torch.bincount(job.data.test_y, minlength=job.data.classes)
        threads = min(job.config.run.threads, len(self._parts)) if job.engine.name == "native" else 1
        self._models = [job.model, *(FlatModel(copy.deepcopy(job.model.module)) for _ in range(threads - 1))]
        self._torch_threads = 1 if job.engine.name == "native" else job.config.run.threads

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
        with torch_threads(self._torch_threads):
            scores = self._in_threads(theta)
            found: list[float] = scores.sum(dim=0).tolist()  # reading a number off a GPU waits for it: once
        return found

    def _in_threads(self, theta: Tensor) -> Tensor:
        """Scores in the order of the records, whoever made them: a sum's last bits depend on it."""
        count, classes = len(self._models), len(self._count)
        if count == 1:
            return _score(self._models[0], theta, self._parts, classes)
        shares = [self._parts[first::count] for first in range(count)]
        scores = torch.empty(len(self._parts), classes + 1, dtype=torch.float64)
        with ThreadPoolExecutor(count) as pool:
            for first, score in enumerate(pool.map(_score, self._models, repeat(theta), shares, repeat(classes))):
                scores[first::count] = score
        return scores


@torch.no_grad()
def _score(model: FlatModel, theta: Tensor, parts: Sequence[Part], classes: int) -> Tensor:
    """For each part, how many are right in each class and the sum of all losses."""
    rows = []
    for x, y in parts:
        logits = model.logits(theta, x)
        row = torch.zeros(classes + 1, dtype=torch.float64, device=y.device)
        row.index_add_(0, y, (logits.argmax(dim=1) == y).double())  # whole numbers: exact in any order
        row[classes] = functional.cross_entropy(logits, y, reduction="sum").double()
        rows.append(row)
    return torch.stack(rows)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """One thread for the small tensors of local training: torch's barriers between two cost 10 times the work, wherever
    anything else wants the cores, and results must not depend on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
