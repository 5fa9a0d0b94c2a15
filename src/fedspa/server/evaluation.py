"""The task's scores on the held-out examples, with every core and the same bits whatever their number.

The forward pass is the engine's where it has one of its own (native), else torch's; either has threads of its own.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fedspa.engine.task import Predicts
from fedspa.errors import ConfigError, first_line
from fedspa.examples import Examples, Tree, count, joined, moved, split
from fedspa.learning.forward import evaluating
from fedspa.learning.tasks.base import Measure, OfOutputs
from fedspa.learning.tasks.classification import ClassCounts
from fedspa.learning.threads import torch_threads
from fedspa.server.job import Metric, ServerJob

PART = 4096  # examples


class Evaluated(NamedTuple):
    """Scores by name, the headline first, and the mean loss, which may be NaN or ∞."""

    scores: dict[str, float | None]
    loss: float


class Evaluation:
    """The held-out examples of a run, split once, and what scores them."""

    def __init__(self, job: ServerJob, device: torch.device) -> None:
        x, y = (moved(tree, device) for tree in job.test)
        # An engine's own forward pass gives the outputs of the very task that it trains for.
        self._engine = job.engine if isinstance(job.engine, Predicts) else None
        self._parts = [Examples(*part) for part in zip(split(x, PART), split(y, PART))]
        self._at_once = 256 if device.type == "cpu" else PART  # through torch
        self._model, self._threads, self._metrics = job.model, job.threads, job.metrics
        self._examples = count(y)

    def __call__(self, theta: Tensor) -> Evaluated:
        measure, loss, outputs = self._measured(theta)
        mean = float(loss) / self._examples
        scores = measure.scores() or {"loss": mean}
        if self._metrics:
            found, y = torch.cat(outputs), moved(joined([part.y for part in self._parts]), "cpu")
            scores |= {name: _asked(name, metric, found, y) for name, metric in self._metrics.items()}
        return Evaluated(scores, mean)

    def by_class(self, theta: Tensor) -> list[float | None] | None:
        """Accuracy at θ on the examples of each class; None where the task has no classes."""
        measure, *_ = self._measured(theta)
        return measure.by_class() if isinstance(measure, ClassCounts) else None

    def _measured(self, theta: Tensor) -> tuple[Measure, Tensor, list[Tensor]]:
        """Scores, the sum of all losses, and the outputs where somebody's own metrics want them."""
        measure = self._model.task.measure()
        total, kept = torch.zeros((), dtype=torch.float64, device=theta.device), []
        threads = 1 if self._engine is not None else self._threads
        with torch_threads(threads), torch.no_grad(), evaluating(self._model.module):
            for x, y in self._parts:
                loss, found = self._evaluated(theta, x, y)
                total += loss  # reading a number off a GPU waits for it: not here
                if found is not None:
                    measure.add(found, y)
                    kept += [found.cpu()] if self._metrics else []
        return measure, total, kept

    def _evaluated(self, theta: Tensor, x: Tree, y: Tree) -> tuple[Tensor, Tensor | None]:
        task = self._model.task
        if isinstance(task, OfOutputs):
            found = self._outputs(theta, x)
            return task.total_loss(found, y), found
        few = zip(split(x, self._at_once), split(y, self._at_once))
        losses = [self._model.mean_loss(theta, *some).double() * count(some[1]) for some in few]
        return torch.stack(losses).sum(), self._outputs(theta, x) if self._metrics else None

    def _outputs(self, theta: Tensor, x: Tree) -> Tensor:
        found = None if self._engine is None or not isinstance(x, Tensor) else self._engine.logits(theta, x)
        # Where something overflows, what torch says counts: engines differ in which NaN survives a maximum.
        if found is None or not found.isfinite().all():
            found = torch.cat([self._model.outputs(theta, few) for few in split(x, self._at_once)])
        return found


def _asked(name: str, metric: Metric, found: Tensor, y: Tree) -> float | None:
    try:
        value = float(metric(found, y))
        return value if math.isfinite(value) else None
    except Exception as error:  # the user's function may raise anything
        raise ConfigError(f"the metric {name!r} failed ({type(error).__name__}: {first_line(error)})") from error
