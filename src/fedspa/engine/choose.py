"""Which back end runs a model: the fastest that can, or the one that `run.engine` forces."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from fedspa.engine import native, stacked
from fedspa.engine.generic import GenericEngine
from fedspa.engine.reference import ReferenceEngine
from fedspa.engine.task import Engine
from fedspa.errors import ConfigError
from fedspa.examples import Examples, layout
from fedspa.learning.flat import FlatModel
from fedspa.learning.tasks import Classification, PerPerson, Task
from fedspa.learning.tasks.person import tried
from fedspa.learning.trial import try_gradients

EngineName = Literal["auto", "native", "stacked", "generic", "reference"]


def choose(
    name: EngineName,
    module: nn.Module,
    like: Examples,
    device: torch.device | str,
    threads: int,
    exact: bool,
    tf32: bool = False,
    task: Task | None = None,
) -> Engine:
    """The engine for `name`, for examples that are made as those `like` which one is given. `auto` never fails for want
    of a fast one; a forced engine that cannot run is an error. The task is classification where none is given."""
    if name not in get_args(EngineName):
        raise ConfigError(f"run.engine is {name!r}; allowed: {', '.join(get_args(EngineName))}")
    FlatModel(module, task)  # refuses what no back end takes
    chosen = _fast(device) if name == "auto" else name
    obstacle = _obstacle(chosen, module, like, device, exact, task)
    if obstacle is not None and name != "auto":
        raise ConfigError(f"run.engine = {name!r} is not possible here: {obstacle}; use 'auto' or 'generic'")
    if chosen in ("reference", "generic") or obstacle is not None:
        drew = [try_gradients(module, *each) for each in tried(like, task)]
        kind = ReferenceEngine if chosen == "reference" else GenericEngine
        # On a CPU every example has a seed of its own, whatever the trial saw: a model may draw for rare examples only.
        return kind(module, task, draws=any(drew) or torch.device(device).type == "cpu")
    if chosen == "stacked":
        return stacked.StackedEngine(module, device, tf32=tf32)
    return native.NativeEngine(module, threads)


def reason(
    name: EngineName,
    module: nn.Module,
    like: Examples,
    device: torch.device | str,
    exact: bool,
    task: Task | None = None,
) -> str:
    """Why `choose` takes what it takes, for the summary."""
    if name != "auto":
        return f"run.engine = {name!r}"
    fast = _fast(device)
    obstacle = _obstacle(fast, module, like, device, exact, task)
    return "the fastest that can run this model here" if obstacle is None else f"not {fast}: {obstacle}"


def _fast(device: torch.device | str) -> EngineName:
    """The back end to try first on a device."""
    return "native" if torch.device(device).type == "cpu" else "stacked"


def _obstacle(
    name: EngineName,
    module: nn.Module,
    like: Examples,
    device: torch.device | str,
    exact: bool,
    task: Task | None,
) -> str | None:
    """Why that back end cannot take this run, or None if it can."""
    if name in ("generic", "reference", "auto"):
        return None
    if isinstance(task, PerPerson):
        return "it takes one record per example, and here an example is a person"
    if task is not None and not (isinstance(task, Classification) and task.plain):
        return f"it learns classes by plain cross-entropy, and the task is {task.name}"
    if not isinstance(like.x, Tensor):
        return f"it takes one tensor per example, and examples are {layout(like.x)}"
    shape = tuple(like.x.shape[1:])
    if name == "stacked":
        return stacked.device_obstacle(device, exact) or stacked.supports(module, shape)
    kind = torch.device(device).type
    if kind != "cpu":
        return f"it runs on CPUs, and run.device is {kind!r}"
    if exact:
        return "privacy.noise = 'exact' has no native implementation"
    return native.supports(module, shape)
