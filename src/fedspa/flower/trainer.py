"""What trains a model at a site: an engine that keeps records apart, made once for each kind of examples and task."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from fedspa.data.persons import blank_person
from fedspa.engine import EngineName
from fedspa.engine.choose import Choice, RecordIsolation, decide
from fedspa.engine.local import BatchedGradients
from fedspa.engine.scores import Scores
from fedspa.engine.task import Engine
from fedspa.errors import ConfigError
from fedspa.examples import Examples, Tree, layout, taken
from fedspa.learning import models
from fedspa.learning.backbone import Split, split
from fedspa.learning.features import Features
from fedspa.learning.fit import require_fit
from fedspa.learning.flat import FlatModel, copied, sketch
from fedspa.learning.tasks import PerPerson, Task
from fedspa.learning.tasks.wrappers import tried
from fedspa.learning.validate import try_gradients, try_scores

_MOST_SOURCES = 4  # of records, in a process: a site has one

logger = logging.getLogger("fedspa.agent")
_CPU = torch.device("cpu")


class Held(NamedTuple):
    """What an agent trains on: records or persons. They are those `rows` of `among`, or all of it. `key` says where in
    a dict the targets lay, `record` is the layout of one record and its target, made of zeros."""

    among: Examples
    rows: Tensor | None
    record: Examples
    key: str | None

    @property
    def examples(self) -> Examples:
        return self.own(self.among)

    def own(self, among: Examples) -> Examples:
        """The agent's, of `among` or of what was made of that, row by row."""
        return among if self.rows is None else Examples(taken(among.x, self.rows), taken(among.y, self.rows))


@dataclass(eq=False)
class Trainer:
    """An engine for a model of so many parameters, and why it was taken. Where a frozen body was split off, the engine
    trains what is left of the model, on features that are made once in this process. `model` is what it trains, on
    records made as `record` is, or on persons of such. `constants` sketches what the whole model does not learn."""

    engine: Engine
    model: FlatModel
    record: Examples
    dimension: int
    choice: Choice
    constants: tuple[float, ...]
    split: Split | None
    persons: bool
    threads: int
    _features: list[tuple[Tree, Features]] = field(default_factory=list, init=False)
    _scores: bool = field(default=False, init=False)

    def examples(self, held: Held, *, strict: bool) -> Examples:
        """What the engine trains on. A record that the body fails on has features that are none, or, if `strict`, is an
        error."""
        if self.split is None:
            return held.examples
        x = held.among.x
        found = next((features for of, features in self._features if of is x), None)
        if found is None:
            found = Features(self.split, x, strict=strict, persons=self.persons, threads=self.threads)
            self._features = [*self._features[1 - _MOST_SOURCES :], (x, found)]
        return held.own(Examples(found.of(held.rows), held.among.y))

    def scores(self, parameters: Tensor) -> Scores:
        """What scores a θ per row; a ConfigError where the model keeps something of a record in eval mode."""
        if not self._scores:
            task = self.model.task
            try_scores(self.model.module, self.record, task.task if isinstance(task, PerPerson) else task)
            self._scores = True
        return Scores(self.model, parameters)


_MOST_TRAINERS = 4  # a server could ask for many kinds
_TRAINERS: dict[tuple[object, ...], Trainer] = {}


def trainer_for(
    name: str,
    record: Examples,
    task: Task,
    most: int | None,
    engine: EngineName,
    threads: int,
    exact: bool,
    seed: int = 0,
    device: torch.device = _CPU,
    apart: RecordIsolation = "per-example",
) -> Trainer:
    """Made once for each model, task and kind of examples. `most` is how many records of a person it is tried with;
    None where an example is a record. θ comes from the server; of what `seed` draws, only frozen values are used."""
    kinds = layout(record.x), layout(record.y)
    known = (name, kinds, _task_key(task), most, engine, threads, exact, seed, device, apart)
    if known in _TRAINERS:
        return _TRAINERS[known]
    shape = tuple(record.x.shape[1:]) if isinstance(record.x, Tensor) else None
    module = models.build(name, shape, task.width, seed=seed)
    require_fit(FlatModel(module, task), record, f"model.name = {name!r}")
    constants = sketch(module)
    # Whether there is a split may not depend on the records, nor on how many there are.
    found = split(module, record, task) if engine != "reference" else ""
    trained, features = (found.head, Examples(found.like, record.y)) if isinstance(found, Split) else (module, record)
    whole, like = (each if most is None else blank_person(each, most) for each in (record, features))
    learned = task if most is None else PerPerson(task)
    if isinstance(found, Split):  # an engine tries what it trains, which is the head
        for each in tried(whole, learned):
            try_gradients(module, *each)
    if device.type != "cpu":  # a copy: what a head shares with the body stays with it
        trained = copied(trained).to(device)
    choice = decide(engine, trained, like, device, threads, exact, task=learned, isolation=apart)
    chosen = choice.make()
    _require_apart(chosen, choice, device, apart)
    logger.info("engine %s on %s: %s", chosen.name, device, choice.why)
    body = found if isinstance(found, Split) else None
    if len(_TRAINERS) >= _MOST_TRAINERS:
        _TRAINERS.clear()
    model = FlatModel(trained, learned)
    dimension = FlatModel(module).dimension
    _TRAINERS[known] = Trainer(chosen, model, features, dimension, choice, constants, body, most is not None, threads)
    return _TRAINERS[known]


def _require_apart(engine: Engine, choice: Choice, device: torch.device, apart: RecordIsolation) -> None:
    """With another engine a server's θ could move a sum by more than the bound."""
    if engine.separates_records and not (apart == "per-example" and isinstance(engine, BatchedGradients)):
        return
    passed = [f"for {name}: {obstacle.fix}" for name, obstacle in choice.passed.items() if obstacle.fix]
    fixes = [*passed, *([] if device.type == "cpu" else ['device="cpu" in the node-config'])]
    raise ConfigError(
        f"engine {engine.name!r} does not keep records apart on {device}; a site needs one that does ({choice.why})"
        + (f"; {', or '.join(fixes)}" if fixes else "")
    )


def _task_key(task: Task) -> str:
    """A task by what it was made of."""
    return f"{task.name} {sorted((key, repr(value)) for key, value in vars(task).items())}"
