"""Which engine runs a model: the fastest that can, or the one that `run.engine` forces; and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib.util import find_spec
from typing import Literal, cast, get_args

import torch
from torch import Tensor, nn

from fedspa.engine import EngineName, Unsupported, combine, native
from fedspa.engine.local import Engine, engine_rows
from fedspa.engine.optimizer import OptimizerName
from fedspa.engine.per_example import PerExampleEngine, float64_reference
from fedspa.errors import ConfigError, listed
from fedspa.examples import MOST_SLOTS, Examples, Tree, layout, leaves
from fedspa.learning.agreement import Disagreement, require_agreement, synthetic_examples
from fedspa.learning.flat import FlatModel
from fedspa.learning.tasks import Classification, PerPerson, Task
from fedspa.learning.tasks.base import OutputTask, tried
from fedspa.learning.validate import try_failures, try_gradients

# How far an engine must keep records apart: not at all, as in a simulation; each at its place, where neighbours have
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


@dataclass(frozen=True)
class EngineRequest:
    """What an engine is wanted for: the engine's name or `auto`, the module, and examples in the layout of `like`. The
    task is classification where none is given."""

    name: EngineName
    module: nn.Module
    like: Examples
    device: torch.device | str
    threads: int
    exact: bool
    tf32: bool = False
    task: Task | None = None
    isolation: RecordIsolation = "none"
    optimizer: OptimizerName = "sgd"

    @property
    def device_type(self) -> str:
        return torch.device(self.device).type

    @cached_property
    def draws(self) -> bool:
        """Return whether the model was seen to draw, in a trial that refuses what no engine may train."""
        drew = [try_gradients(self.module, *each) for each in tried(self.like, self.task)]
        return any(drew)

    @cached_property
    def traced(self) -> Engine | Unsupported:
        """Return the engine of the model's trace, or why there is none. The trial comes first: a trace would leave
        something behind in a model that keeps what it sees."""
        from fedspa.engine.traced import trace_engine  # what it needs of torch takes a while to load

        try:
            self.draws  # noqa: B018
        except ConfigError as error:
            return Unsupported(str(error))
        return trace_engine(self.module, self.like, self.task, self.threads, self.device, tf32=self.tf32)


def choose(request: EngineRequest) -> Engine:
    """Return the engine that `decide` takes."""
    return decide(request).make()


def decide(request: EngineRequest) -> Choice:
    """Return the engine for a request. `auto` never fails for want of a fast one; a forced engine that cannot run is an
    error."""
    if request.name not in get_args(EngineName):
        raise ConfigError(f"run.engine is {request.name!r}; allowed: {', '.join(get_args(EngineName))}")
    FlatModel(request.module, request.task)  # refuses what no engine takes
    return _fastest(request) if request.name == "auto" else _forced(request)


@dataclass(frozen=True)
class _Candidate:
    """An engine that `auto` tries on devices of that kind. `unsupported` yields all that keeps it from running a
    request."""

    name: EngineName
    tried_on: Literal["CPUs", "all", "none"]
    make: Callable[[EngineRequest], Engine]
    unsupported: Callable[[EngineRequest], Iterator[Unsupported]] = lambda request: iter(())

    def is_automatic(self, request: EngineRequest) -> bool:
        return self.tried_on == "all" or (self.tried_on == "CPUs" and request.device_type == "cpu")


def _fastest(request: EngineRequest) -> Choice:
    """Choose the fastest engine that can run the request."""
    passed: dict[EngineName, Unsupported] = {}
    for candidate in (each for each in _CANDIDATES if each.is_automatic(request)):
        reasons = list(candidate.unsupported(request))
        if not reasons:
            break
        passed[candidate.name] = combine(reasons)
    why = "; ".join(f"not {name}: {why_not}" for name, why_not in passed.items())
    fixes = [f"for {name}: {why_not.fix}" for name, why_not in passed.items() if why_not.fix]
    return Choice(
        candidate.name,
        why or "the fastest that can run this model here",
        passed,
        (*fixes, *_hints(candidate.name, request)),
        lambda: _made(candidate, request),
    )


def _forced(request: EngineRequest) -> Choice:
    name = request.name
    (candidate,) = (each for each in _CANDIDATES if each.name == name)
    reasons = list(candidate.unsupported(request))
    if reasons:
        unfit = combine(reasons)
        fix = f", or: {unfit.fix}" if unfit.fix else ""
        raise ConfigError(f"run.engine = {name!r} is not possible here: {unfit}; use 'auto' or 'generic'{fix}")
    first = next(each for each in _CANDIDATES if each.is_automatic(request))
    free = () if candidate is first else ("run.engine = 'auto' takes the fastest that can",)
    hints = (*free, *_hints(name, request))
    return Choice(name, f"run.engine = {name!r}", {}, hints, lambda: _made(candidate, request))


def _made(candidate: _Candidate, request: EngineRequest) -> Engine:
    """Return the engine, compared with plain autograd on the module, where that lies on the engine's device. A trace
    was compared where it was made; the reference draws other numbers in float64."""
    engine, model = candidate.make(request), FlatModel(request.module, request.task)
    compared = candidate.name not in ("traced", "reference") and model.device.type == request.device_type
    if not compared:
        return engine
    try:
        examples = synthetic_examples(request.like, request.module, request.task)
        require_agreement(model, examples, partial(engine_rows, engine))
    except Disagreement as error:
        fix = "" if candidate.name == "generic" else "; use run.engine = 'generic'"
        raise ConfigError(
            f"engine {engine.name!r} computes a different gradient from plain autograd for the parameters "
            f"{listed(error.parameters)}{fix}"
            if error.parameters
            else f"the module ({type(request.module).__name__}) has no finite gradient for any synthetic example"
        ) from error
    return engine


def _hints(taken: EngineName, request: EngineRequest) -> Iterator[str]:
    """Yield what would make the engine that was taken, or another, faster. Nothing is traced on a GPU to find out: a
    run that does not use a GPU puts nothing on it."""
    full_float32 = request.device_type == "cuda" and not request.tf32 and torch.cuda.is_available()
    if taken == "traced" and full_float32 and torch.cuda.get_device_capability(request.device) >= _FIRST_WITH_TF32:
        what = "rounds the factors of products to 10 bits of mantissa; the guarantee stays as it is"
        yield f"traced would be faster: run.tf32 = true {what}"
    able = taken in ("native", "traced") and not isinstance(request.task, PerPerson)
    unused = request.device_type == "cpu" and torch.cuda.device_count() > 0
    if able and unused and device_unsupported("cuda") is None:
        key = "run.device" if request.isolation == "none" else "device in the node-config"
        yield f"{key} = 'cuda': a GPU is there and not used, and traced can train this model on it"


_FIRST_WITH_TF32 = (8, 0)


def device_unsupported(device: torch.device | str) -> Unsupported | None:
    """Return why the traced engine cannot run on this device, or None if it can."""
    kind = torch.device(device).type
    if kind not in ("cpu", "cuda"):
        return Unsupported(f"it runs on CPUs and CUDA devices, and run.device is {kind!r}")
    if kind == "cuda" and find_spec("triton") is None:
        return Unsupported("its kernels need Triton, which is not installed", "pip install triton")
    return None


def _person_size(request: EngineRequest) -> Iterator[Unsupported]:
    """Yield why persons are too large to be taken whole."""
    if next(leaves(request.like.y)).shape[1] > MOST_SLOTS:
        why = f"it takes up to {MOST_SLOTS} records of a person, and data.person_records is higher"
        yield Unsupported(why, f"data.person_records = {MOST_SLOTS}, or less")


def _native(request: EngineRequest) -> Iterator[Unsupported]:
    kind = request.device_type
    if kind != "cpu":
        yield Unsupported(f"it runs on CPUs, and run.device is {kind!r}", "run.device = 'cpu'")
    if request.exact:
        why = "privacy.noise = 'exact' has no native implementation"
        yield Unsupported(why, "privacy.noise = 'secure', in floating point")
    if request.optimizer != "sgd":
        why = f"it takes plain gradient steps, and algorithm.local_optimizer is {request.optimizer!r}"
        yield Unsupported(why, "algorithm.local_optimizer = 'sgd'")
    task, x, leading = request.task, request.like.x, 1
    if isinstance(task, PerPerson):
        yield from _person_size(request)
        task, x, leading = task.task, cast(dict[str, Tree], x)["records"], 2
    if isinstance(task, Classification) and not task.plain:
        why = "it learns classes by plain cross-entropy, and the task has weights or label smoothing"
        yield Unsupported(why, "leave out task.weights and task.label_smoothing")
    elif task is not None and not isinstance(task, Classification):
        yield Unsupported(f"it learns classes by plain cross-entropy, and the task is {task.name}")
    if not isinstance(x, Tensor):
        yield Unsupported(f"it takes one tensor per example, and examples are {layout(x)}")
    elif (unknown := native.supports(request.module, tuple(x.shape[leading:]))) is not None:
        yield unknown


def _traced(request: EngineRequest) -> Iterator[Unsupported]:
    unfit = device_unsupported(request.device)
    if unfit is not None:
        yield unfit
    elif isinstance(request.task, PerPerson) and (reasons := list(_persons(request))):
        yield from reasons
    elif request.isolation == "per-example":
        why = "it takes records together, and under Poisson sampling a site must then state the most that it will hold"
        fix = "set max_records in the node-config: the most examples that this site will ever train on"
        yield Unsupported(why, fix)
    elif isinstance(request.traced, Unsupported):
        yield request.traced


def _persons(request: EngineRequest) -> Iterator[Unsupported]:
    """Yield what keeps the traced engine from examples that are persons."""
    if request.device_type != "cpu":
        yield Unsupported("it does not support person-level privacy on GPUs")
    if not isinstance(cast(PerPerson, request.task).task, OutputTask):
        yield Unsupported("it takes a person's records one by one, and the task's own loss may see them together")
    yield from _person_size(request)


def _by_trace(request: EngineRequest) -> Engine:
    assert not isinstance(request.traced, Unsupported)
    return request.traced


def _by_autograd(request: EngineRequest, kind: Callable[..., Engine]) -> Engine:
    # On a CPU every example has a seed of its own, whatever the trial saw: a model may draw for rare examples only.
    draws = request.draws or request.device_type == "cpu"
    for each in tried(request.like, request.task):  # these call the module, which may raise for a record
        try_failures(request.module, *each)
    return kind(request.module, request.task, draws=draws)


# In order of speed. The last that `auto` tries anywhere takes every request.
_CANDIDATES = (
    _Candidate("native", "CPUs", lambda request: native.NativeEngine(request.module, request.threads), _native),
    _Candidate("traced", "all", _by_trace, _traced),
    _Candidate("generic", "all", lambda request: _by_autograd(request, PerExampleEngine)),
    _Candidate("reference", "none", lambda request: _by_autograd(request, float64_reference)),
)


def device_named(name: str, key: str) -> torch.device:
    """Return the device that `key` names; raise a ConfigError where it cannot compute."""
    try:
        device = torch.device(name)
        torch.ones(1, device=device).item()  # some devices, such as meta, hold no values
    except Exception as cause:  # each backend of torch has its own way to say that it is not there
        raise ConfigError(f"{key} is {name!r}, which cannot compute on this machine; cpu can") from cause
    return device
