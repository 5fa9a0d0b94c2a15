"""What trains a model at a site: an engine that keeps records apart, made once for each kind of examples and task."""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch
from torch import Tensor

from fedspa.data.persons import blank_person
from fedspa.engine.choose import Apart, Choice, EngineName, decide
from fedspa.engine.local import Together
from fedspa.engine.task import Engine
from fedspa.errors import ConfigError
from fedspa.examples import Examples, layout
from fedspa.learning import models
from fedspa.learning.fit import require_fit
from fedspa.learning.flat import FlatModel
from fedspa.learning.tasks import PerPerson, Task

logger = logging.getLogger("fedspa.agent")

_CPU = torch.device("cpu")
_MOST_ENGINES = 4  # a server could ask for many kinds
_ENGINES: dict[tuple[object, ...], Trainer] = {}


class Trainer(NamedTuple):
    """An engine, the number of parameters that it trains, and why it was taken."""

    engine: Engine
    dimension: int
    choice: Choice


def engine_for(
    name: str,
    record: Examples,
    task: Task,
    most: int | None,
    engine: EngineName,
    threads: int,
    exact: bool,
    device: torch.device = _CPU,
    apart: Apart = "alone",
) -> Trainer:
    """Made once for each model, task and kind of examples. `most` is how many records of a person it is tried with;
    None where an example is a record."""
    known = (name, layout(record.x), layout(record.y), _told(task), most, engine, threads, exact, device, apart)
    if known not in _ENGINES:
        shape = tuple(record.x.shape[1:]) if isinstance(record.x, Tensor) else None
        # θ comes from the server: these values are not used.
        module = models.build(name, shape, task.width, seed=0).to(device)
        require_fit(FlatModel(module, task), record, f"model.name = {name!r}")
        like, learned = (record, task) if most is None else (blank_person(record, most), PerPerson(task))
        choice = decide(engine, module, like, device, threads, exact, task=learned, apart=apart)
        chosen = choice.make()
        _require_apart(chosen, choice, device, apart)
        logger.info("engine %s on %s: %s", chosen.name, device, choice.why)
        if len(_ENGINES) >= _MOST_ENGINES:
            _ENGINES.clear()
        _ENGINES[known] = Trainer(chosen, FlatModel(module).dimension, choice)
    return _ENGINES[known]


def _require_apart(engine: Engine, choice: Choice, device: torch.device, apart: Apart) -> None:
    """With another engine a server's θ could move a sum by more than the bound."""
    if engine.separates_records and not (apart == "alone" and isinstance(engine, Together)):
        return
    passed = [f"for {name}: {obstacle.mend}" for name, obstacle in choice.passed.items() if obstacle.mend]
    mends = [*passed, *([] if device.type == "cpu" else ['device="cpu" in the node-config'])]
    raise ConfigError(
        f"engine {engine.name!r} does not keep records apart on {device}; a site needs one that does ({choice.why})"
        + (f"; {', or '.join(mends)}" if mends else "")
    )


def _told(task: Task) -> str:
    """A task by what it was made of."""
    return f"{task.name} {sorted((key, repr(value)) for key, value in vars(task).items())}"
