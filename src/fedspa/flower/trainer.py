"""What trains a model at a site: an engine that keeps records apart, made once for each kind of examples and task."""

from __future__ import annotations

from torch import Tensor

from fedspa.data.persons import blank_person
from fedspa.engine.choose import EngineName, choose
from fedspa.engine.task import Engine
from fedspa.errors import ConfigError
from fedspa.examples import Examples, layout
from fedspa.learning import models
from fedspa.learning.fit import require_fit
from fedspa.learning.flat import FlatModel
from fedspa.learning.tasks import PerPerson, Task

_MOST_ENGINES = 4  # a server could ask for many kinds
_ENGINES: dict[tuple[object, ...], tuple[Engine, int]] = {}


def engine_for(
    name: str, record: Examples, task: Task, most: int | None, engine: EngineName, threads: int, exact: bool
) -> tuple[Engine, int]:
    """Made once for each model, task and kind of examples. `most` is how many records of a person it is tried with;
    None where an example is a record."""
    known = (name, layout(record.x), layout(record.y), _told(task), most, engine, threads, exact)
    if known not in _ENGINES:
        shape = tuple(record.x.shape[1:]) if isinstance(record.x, Tensor) else None
        module = models.build(name, shape, task.width, seed=0)  # θ comes from the server: these values are not used
        require_fit(FlatModel(module, task), record, f"model.name = {name!r}")
        like, learned = (record, task) if most is None else (blank_person(record, most), PerPerson(task))
        chosen = choose(engine, module, like, "cpu", threads, exact, task=learned)
        if not chosen.separates_records:  # a server's θ could then move a sum by more than the bound
            raise ConfigError(f"run.engine = {chosen.name!r} does not keep records apart; a site needs one that does")
        if len(_ENGINES) >= _MOST_ENGINES:
            _ENGINES.clear()
        _ENGINES[known] = chosen, FlatModel(module).dimension
    return _ENGINES[known]


def _told(task: Task) -> str:
    """A task by what it was made of."""
    return f"{task.name} {sorted((key, repr(value)) for key, value in vars(task).items())}"
