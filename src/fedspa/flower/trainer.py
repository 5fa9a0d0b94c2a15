"""What trains a model at a site: an engine that keeps records apart, made once for each kind of examples and task."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from fedspa.engine import EngineName
from fedspa.engine.choose import Choice, EngineRequest, RecordIsolation
from fedspa.engine.local import Engine
from fedspa.engine.optimizer import OptimizerName
from fedspa.engine.per_example import Scores
from fedspa.errors import ConfigError
from fedspa.examples import Examples, Tree, layout, taken
from fedspa.learning import models
from fedspa.learning.features import Features
from fedspa.learning.flat import FlatModel, sketch
from fedspa.learning.models import require_fit
from fedspa.learning.tasks import PerPerson, Task
from fedspa.learning.validate import try_scores
from fedspa.runs.setup import Training

_MOST_SOURCES = 4  # of records, in a process: a site has one

logger = logging.getLogger("fedspa.agent")
_CPU = torch.device("cpu")


class SiteExamples(NamedTuple):
    """What an agent trains on: records or persons. They are those `rows` of `pool`, or all of it. `key` says where in
    a dict the targets lay, `record` is the layout of one record and its target, made of zeros."""

    pool: Examples
    rows: Tensor | None
    record: Examples
    key: str | None

    @property
    def examples(self) -> Examples:
        return self.select(self.pool)

    def select(self, pool: Examples) -> Examples:
        """Return the agent's examples of `pool`, or of what was made of it row by row."""
        return pool if self.rows is None else Examples(taken(pool.x, self.rows), taken(pool.y, self.rows))


@dataclass(eq=False)
class Trainer:
    """An engine, and the training it was chosen for. Features of a frozen body are made once in this process.
    `dimension` is the number of the model's parameters, and `constants` sketches its frozen values."""

    engine: Engine
    training: Training
    dimension: int
    constants: tuple[float, ...]
    persons: bool
    _features: list[tuple[Tree, Features]] = field(default_factory=list, init=False)
    _scores: bool = field(default=False, init=False)

    def examples(self, held: SiteExamples, *, strict: bool) -> Examples:
        """What the engine trains on. A record that the body fails on has features that are none, or, if `strict`, is an
        error."""
        split = self.training.split
        if split is None:
            return held.examples
        x = held.pool.x
        found = next((features for of, features in self._features if of is x), None)
        if found is None:
            found = Features(split, x, strict=strict, persons=self.persons, threads=self.training.request.threads)
            self._features = [*self._features[1 - _MOST_SOURCES :], (x, found)]
        return held.select(Examples(found.of(held.rows), held.pool.y))

    def scores(self, parameters: Tensor) -> Scores:
        """Return what scores a θ per row; a ConfigError where the model keeps something of a record in eval mode."""
        model = self.training.model
        if not self._scores:
            task = model.task
            try_scores(model.module, self.training.record, task.task if isinstance(task, PerPerson) else task)
            self._scores = True
        return Scores(model, parameters)


_MOST_TRAINERS = 4  # a server could ask for many kinds
_TRAINERS: dict[tuple[object, ...], Trainer] = {}


def trainer_for(
    name: str,
    record: Examples,
    task: Task,
    person_records: int | None,
    engine: EngineName,
    threads: int,
    exact: bool,
    seed: int = 0,
    device: torch.device = _CPU,
    isolation: RecordIsolation = "per-example",
    optimizer: OptimizerName = "sgd",
) -> Trainer:
    """Return the trainer of a model, task and kind of examples, made once. `person_records` is the most records of a
    person; None where an example is a record. θ comes from the server; of what `seed` draws, only frozen values are
    used."""
    kinds = layout(record.x), layout(record.y)
    options = sorted((key, repr(value)) for key, value in vars(task).items())
    asked = (engine, threads, exact, seed, device, isolation, optimizer)
    known = (name, kinds, f"{task.name} {options}", person_records, *asked)
    if known in _TRAINERS:
        return _TRAINERS[known]
    shape = tuple(record.x.shape[1:]) if isinstance(record.x, Tensor) else None
    module = models.build(name, shape, task.width, seed=seed)
    require_fit(FlatModel(module, task), record, f"model.name = {name!r}")
    request = EngineRequest(engine, module, record, device, threads, exact, False, task, isolation, optimizer)
    constants = sketch(module)
    training = Training.prepare(request, person_records)
    chosen = training.choice.make()
    _check_isolation(chosen, training.choice, device, isolation)
    logger.info("engine %s on %s: %s", chosen.name, device, training.choice.why)
    if len(_TRAINERS) >= _MOST_TRAINERS:
        _TRAINERS.clear()
    dimension = FlatModel(module).dimension
    _TRAINERS[known] = Trainer(chosen, training, dimension, constants, person_records is not None)
    return _TRAINERS[known]


def _check_isolation(engine: Engine, choice: Choice, device: torch.device, isolation: RecordIsolation) -> None:
    """Raise for an engine with which a server's θ could move a sum by more than the bound."""
    if engine.separates_records and not (isolation == "per-example" and engine.takes_slots):
        return
    passed = [f"for {name}: {unsupported.fix}" for name, unsupported in choice.passed.items() if unsupported.fix]
    fixes = [*passed, *([] if device.type == "cpu" else ['device="cpu" in the node-config'])]
    raise ConfigError(
        f"engine {engine.name!r} does not keep records apart on {device}; a site needs one that does ({choice.why})"
        + (f"; {', or '.join(fixes)}" if fixes else "")
    )
