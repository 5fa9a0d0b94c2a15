"""Which back end runs a model: the fastest that can, or the one that `run.engine` forces; and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from fedspa.engine import EngineName, Unsupported, combine, native, stacked
from fedspa.engine.local import engine_rows
from fedspa.engine.per_example import PerExampleEngine, float64_reference
from fedspa.engine.task import Engine
from fedspa.errors import ConfigError, listed
from fedspa.examples import Examples, layout
from fedspa.learning.agreement import FLOAT32_UNIT, TF32_UNIT, Disagreement, require_agreement
from fedspa.learning.flat import FlatModel
from fedspa.learning.synthetic import synthetic_examples
from fedspa.learning.tasks import Classification, PerPerson, Task
from fedspa.learning.tasks.wrappers import tried
from fedspa.learning.validate import try_failures, try_gradients

# How far a back end must keep records apart: not at all, as in a simulation; each at its place, where neighbours have
# equally many places (`SlotAssignment`); or each by itself.
RecordIsolation = Literal["none", "fixed-slot", "per-example"]


@dataclass(frozen=True)
class Choice:
    """The engine that is taken. `passed` are the faster ones and what keeps each from running; `hints` say what a user
    could change to make it faster. `make` builds it, and refuses a model that no engine may train."""

    engine: EngineName
    why: str
    passed: dict[EngineName, Unsupported]
    hints: tuple[str, ...]
    make: Callable[[], Engine] = field(repr=False, compare=False)


def choose(
    name: EngineName,
    module: nn.Module,
    like: Examples,
    device: torch.device | str,
    threads: int,
    exact: bool,
    tf32: bool = False,
    task: Task | None = None,
    isolation: RecordIsolation = "none",
) -> Engine:
    """The engine that `decide` takes."""
    return decide(name, module, like, device, threads, exact, tf32, task, isolation).make()


def decide(
    name: EngineName,
    module: nn.Module,
    like: Examples,
    device: torch.device | str,
    threads: int,
    exact: bool,
    tf32: bool = False,
    task: Task | None = None,
    isolation: RecordIsolation = "none",
) -> Choice:
    """The engine for `name`, for examples that are made as those `like` which one is given. `auto` never fails for want
    of a fast one; a forced engine that cannot run is an error. The task is classification where none is given."""
    if name not in get_args(EngineName):
        raise ConfigError(f"run.engine is {name!r}; allowed: {', '.join(get_args(EngineName))}")
    FlatModel(module, task)  # refuses what no back end takes
    case = _Case(module, like, torch.device(device), threads, exact, tf32, task, isolation)
    return _fastest(case) if name == "auto" else _forced(name, case)


@dataclass(frozen=True)
class _Case:
    """What a back end is asked to run."""

    module: nn.Module
    like: Examples
    device: torch.device
    threads: int
    exact: bool
    tf32: bool
    task: Task | None
    isolation: RecordIsolation

    @cached_property
    def draws(self) -> bool:
        """Whether the model was seen to draw, in a trial that refuses what no engine may train."""
        drew = [try_gradients(self.module, *each) for each in tried(self.like, self.task)]
        return any(drew)

    @cached_property
    def traced(self) -> Engine | Unsupported:
        """The engine of the model's trace, or why there is none. The trial comes first: a trace would leave something
        behind in a model that keeps what it sees."""
        from fedspa.engine.traced import trace_engine  # what it needs of torch takes a while to load

        try:
            self.draws  # noqa: B018
        except ConfigError as error:
            return Unsupported(str(error))
        return trace_engine(self.module, self.like, self.task, self.threads, self.device, tf32=self.tf32)


@dataclass(frozen=True)
class _Candidate:
    """`auto` tries it on devices of that kind. `obstacles` are all that keep it from running a case; `slows` is what
    keeps it from running one as fast as it could."""

    name: EngineName
    tried_on: Literal["CPUs", "GPUs", "all", "none"]
    make: Callable[[_Case], Engine]
    obstacles: Callable[[_Case], Iterator[Unsupported]] = lambda case: iter(())
    slows: Callable[[_Case], Unsupported | None] = lambda case: None

    def by_itself(self, device: torch.device) -> bool:
        return self.tried_on in ("all", "CPUs" if device.type == "cpu" else "GPUs")


def _fastest(case: _Case) -> Choice:
    """The first in the order of speed that nothing keeps from running."""
    passed: dict[EngineName, Unsupported] = {}
    for candidate in (each for each in _CANDIDATES if each.by_itself(case.device)):
        obstacles = list(candidate.obstacles(case))
        if not obstacles:
            break
        passed[candidate.name] = combine(obstacles)
    why = "; ".join(f"not {name}: {obstacle}" for name, obstacle in passed.items())
    fixes = [f"for {name}: {obstacle.fix}" for name, obstacle in passed.items() if obstacle.fix]
    return Choice(
        candidate.name,
        why or "the fastest that can run this model here",
        passed,
        (*fixes, *_own_hints(candidate, case), *_gpu_hints(case, candidate.name)),
        lambda: _made(candidate, case),
    )


def _forced(name: EngineName, case: _Case) -> Choice:
    (candidate,) = (each for each in _CANDIDATES if each.name == name)
    obstacles = list(candidate.obstacles(case))
    if obstacles:
        unfit = combine(obstacles)
        mend = f", or: {unfit.fix}" if unfit.fix else ""
        raise ConfigError(f"run.engine = {name!r} is not possible here: {unfit}; use 'auto' or 'generic'{mend}")
    first = next(each for each in _CANDIDATES if each.by_itself(case.device))
    free = () if candidate is first else ("run.engine = 'auto' takes the fastest that can",)
    hints = (*free, *_own_hints(candidate, case))
    return Choice(name, f"run.engine = {name!r}", {}, hints, lambda: _made(candidate, case))


def _made(candidate: _Candidate, case: _Case) -> Engine:
    """The engine, compared with plain autograd on the module, where that lies on the engine's device. A trace was
    compared where it was made; the reference draws other numbers in float64; persons are trained as the records are
    that the module was tried with."""
    engine, model = candidate.make(case), FlatModel(case.module, case.task)
    compared = candidate.name not in ("traced", "reference") and model.device.type == case.device.type
    if not compared or isinstance(case.task, PerPerson):
        return engine
    unit = TF32_UNIT if getattr(engine, "tf32", False) else FLOAT32_UNIT
    try:
        examples = synthetic_examples(case.like, case.module, case.task)
        require_agreement(model, examples, partial(engine_rows, engine), unit=unit)
    except Disagreement as error:
        fix = "" if candidate.name == "generic" else "; use run.engine = 'generic'"
        raise ConfigError(
            f"engine {engine.name!r} computes another gradient than plain autograd on the module for the parameters "
            f"{listed(error.parameters)}{fix}"
            if error.parameters
            else f"the module ({type(case.module).__name__}) has no finite gradient for any synthetic example"
        ) from error
    return engine


def _own_hints(candidate: _Candidate, case: _Case) -> Iterator[str]:
    slow = candidate.slows(case)
    if slow is not None and slow.fix:
        yield f"{candidate.name} would be faster: {slow.fix}"


def _gpu_hints(case: _Case, taken: EngineName) -> Iterator[str]:
    """A GPU that is there and not used, where a back end that is made for GPUs could train this model on it. Nothing is
    traced there to find out: a run that does not use a GPU puts nothing on it."""
    if case.device.type != "cpu" or torch.cuda.device_count() == 0:
        return
    there = replace(case, device=torch.device("cuda"))
    able = "stacked" if not any(_stacked(there)) else taken
    if able == "stacked" or (able == "traced" and stacked.device_obstacle(there.device, exact=False) is None):
        key = "run.device" if case.isolation == "none" else "device in the node-config"
        yield f"{key} = 'cuda': a GPU is there and not used, and {able} can train this model on it"


def _of_layers(case: _Case) -> Iterator[Unsupported]:
    """What back ends do not take that read a model by its layers."""
    task = case.task
    if isinstance(task, PerPerson):
        yield Unsupported("it takes one record per example, and here an example is a person")
        return
    if isinstance(task, Classification) and not task.plain:
        why = "it learns classes by plain cross-entropy, and the task has weights or label smoothing"
        yield Unsupported(why, "leave out task.weights and task.label_smoothing")
    elif task is not None and not isinstance(task, Classification):
        yield Unsupported(f"it learns classes by plain cross-entropy, and the task is {task.name}")
    if not isinstance(case.like.x, Tensor):
        yield Unsupported(f"it takes one tensor per example, and examples are {layout(case.like.x)}")


def _native(case: _Case) -> Iterator[Unsupported]:
    kind = case.device.type
    if kind != "cpu":
        yield Unsupported(f"it runs on CPUs, and run.device is {kind!r}", "run.device = 'cpu'")
    if case.exact:
        why = "privacy.noise = 'exact' has no native implementation"
        yield Unsupported(why, "privacy.noise = 'secure', in floating point")
    yield from _of_layers(case)
    yield from _of_model(case, native.supports)


def _stacked(case: _Case) -> Iterator[Unsupported]:
    unfit = stacked.device_obstacle(case.device, case.exact)
    if unfit is not None:
        yield unfit
    if case.isolation != "none" and case.device.type != "cpu":
        yield Unsupported("on a GPU it does not keep records apart, and a site needs that")
    yield from _of_layers(case)
    yield from _of_model(case, stacked.supports)


def _of_model(
    case: _Case, supports: Callable[[nn.Module, tuple[int, ...]], Unsupported | None]
) -> Iterator[Unsupported]:
    if isinstance(case.like.x, Tensor) and not isinstance(case.task, PerPerson):
        unknown = supports(case.module, tuple(case.like.x.shape[1:]))
        if unknown is not None:
            yield unknown


def _traced(case: _Case) -> Iterator[Unsupported]:
    unfit = stacked.device_obstacle(case.device, exact=False)
    if unfit is not None:
        yield unfit
    elif isinstance(case.task, PerPerson):
        yield Unsupported("it takes examples of one size, and persons have different numbers of records")
    elif case.isolation == "per-example":
        why = "it takes records together, and under Poisson sampling a site must then say for how many it has room"
        yield Unsupported(why, "name room in the node-config: the most examples that this site will ever train on")
    elif isinstance(case.traced, Unsupported):
        yield case.traced


def _by_trace(case: _Case) -> Engine:
    assert not isinstance(case.traced, Unsupported)
    return case.traced


def _by_autograd(case: _Case, kind: Callable[..., Engine]) -> Engine:
    # On a CPU every example has a seed of its own, whatever the trial saw: a model may draw for rare examples only.
    draws = case.draws or case.device.type == "cpu"
    for each in tried(case.like, case.task):  # these call the module, which may raise for a record
        try_failures(case.module, *each)
    return kind(case.module, case.task, draws=draws)


# In order of speed. The last that `auto` tries anywhere takes every case.
_CANDIDATES = (
    _Candidate("native", "CPUs", lambda case: native.NativeEngine(case.module, case.threads), _native),
    _Candidate(
        "stacked",
        "GPUs",
        lambda case: stacked.StackedEngine(case.module, case.device, tf32=case.tf32),
        _stacked,
        lambda case: stacked.slows(case.device, case.tf32),
    ),
    _Candidate("traced", "all", _by_trace, _traced, lambda case: stacked.slows(case.device, case.tf32)),
    _Candidate("generic", "all", lambda case: _by_autograd(case, PerExampleEngine)),
    _Candidate("reference", "none", lambda case: _by_autograd(case, float64_reference)),
)


def device_named(name: str, key: str) -> torch.device:
    """The device that `key` names, or a ConfigError where it cannot compute."""
    try:
        device = torch.device(name)
        torch.ones(1, device=device).item()  # some devices, such as meta, hold no values
    except Exception as cause:  # each backend of torch has its own way to say that it is not there
        raise ConfigError(f"{key} is {name!r}, which cannot compute on this machine; cpu can") from cause
    return device
