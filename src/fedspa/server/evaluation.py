"""The task's scores on the held-out examples, with every core and the same bits whatever their number.

The forward pass is the engine's where it has one of its own (native), else torch's; either has threads of its own.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fedspa.errors import ConfigError, one_line, quoted
from fedspa.examples import Examples, Tree, count, joined, moved, split, zero_examples
from fedspa.learning.features import Features
from fedspa.learning.flat import FlatModel
from fedspa.learning.forward import evaluating, torch_threads
from fedspa.learning.tasks.base import Measure, Metric, OutputTask

if TYPE_CHECKING:
    from fedspa.server.coordinator import ServerJob

PART = 4096  # examples
MOST_OUTPUTS = 2**26  # numbers that are held at a time: a language model gives many for each example


class Evaluated(NamedTuple):
    """Scores by name, the headline first, and the mean loss, which may be NaN or ∞."""

    scores: dict[str, float | None]
    loss: float


class Closing(NamedTuple):
    """What only the last model is asked: accuracy by class, and whether it has one answer for all (`Measure`)."""

    by_class: list[float | None] | None
    constant_prediction: int | None


class Evaluation:
    """The held-out examples of a run, split once, and what scores them."""

    def __init__(self, job: ServerJob, device: torch.device) -> None:
        self._model, self._threads, self._metrics = job.model, job.threads, job.metrics
        x, y = job.test
        if job.scored is not None:
            self._model = FlatModel(job.scored.head, job.model.task)
            x = Features(job.scored, x, strict=True, per_example=False, threads=job.threads).of()
        x, y = (moved(tree, device) for tree in (x, y))
        # An engine's own forward pass gives the outputs of the very task that it trains for.
        self._engine = job.engine if job.engine_scores and job.engine.predicts else None
        size = PART if self._engine is not None else min(PART, max(1, MOST_OUTPUTS // self._outputs_each(x)))
        self._parts = [Examples(*part) for part in zip(split(x, size), split(y, size))]
        self._at_once = min(size, 256 if device.type == "cpu" else PART)  # through torch
        self._examples = count(y)

    def __call__(self, theta: Tensor) -> Evaluated:
        measure, loss, outputs = self._measured(theta)
        mean = float(loss) / self._examples
        scores = measure.scores() or {"loss": mean}
        if self._metrics:
            found, y = torch.cat(outputs), moved(joined([part.y for part in self._parts]), "cpu")
            for name, metric in self._metrics.items():
                if name in (*scores, "loss"):
                    raise ConfigError(f"the metric {name!r} has the name of a score of the task; call it otherwise")
                scores[name] = _asked(name, metric, found, y)
        first = [name for name in (self._model.task.headline,) if name in scores]
        return Evaluated({name: scores[name] for name in (*first, *scores)}, mean)

    def closing(self, theta: Tensor) -> Closing:
        measure, *_ = self._measured(theta)
        return Closing(measure.by_class(), measure.constant_prediction())

    def _outputs_each(self, x: Tree) -> int:
        """Numbers that the module gives for an example. A task of the user's own may take one that gives none."""
        try:
            with torch.no_grad(), evaluating(self._model.module), torch.random.fork_rng(devices=[]):
                return max(1, self._model.outputs(self._model.flatten(), zero_examples(x)).numel())
        except Exception:
            return 1

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
        if isinstance(task, OutputTask):
            found = self._outputs(theta, x)
            return task.total_loss(found, y), found
        few = zip(split(x, self._at_once), split(y, self._at_once))
        losses = [self._model.mean_loss(theta, *some).double() * count(some[1]) for some in few]
        return torch.stack(losses).sum(), self._outputs(theta, x) if self._metrics else None

    def _outputs(self, theta: Tensor, x: Tree) -> Tensor:
        found = None if self._engine is None or not isinstance(x, Tensor) else self._engine.logits(theta, x)
        # Where something overflows, what torch says counts: engines differ in which NaN survives a maximum.
        if found is None or not found.isfinite().all():
            parts = [(self._model.outputs(theta, few), count(few)) for few in split(x, self._at_once)]
            # `.squeeze()` drops the dimension of a batch of one, which the last part may be.
            found = torch.cat([one.reshape(size, *parts[0][0].shape[1:]) for one, size in parts])
        return found


def _asked(name: str, metric: Metric, found: Tensor, y: Tree) -> float | None:
    try:
        given = metric(found, y)
    except Exception as error:  # the user's function may raise anything
        raise ConfigError(f"the metric {name!r} failed ({one_line(error)})") from error
    try:
        value = None if isinstance(given, str | bytes) else float(given)
    except Exception:  # float() runs the code of whatever was given
        value = None
    if value is None:
        raise ConfigError(f"the metric {name!r} gave {quoted(given, 60)}; it must give one number")
    return value if math.isfinite(value) else None
