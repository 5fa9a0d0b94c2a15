"""Which back end runs a model: the fastest that can, or the one that `run.engine` forces."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import nn

from fedspa.engine import native, stacked
from fedspa.engine.generic import GenericEngine
from fedspa.engine.reference import ReferenceEngine
from fedspa.engine.task import Engine
from fedspa.errors import ConfigError
from fedspa.learning.flat import FlatModel
from fedspa.learning.trial import try_gradients

EngineName = Literal["auto", "native", "stacked", "generic", "reference"]


def choose(
    name: EngineName,
    module: nn.Module,
    input_shape: tuple[int, ...],
    device: torch.device | str,
    threads: int,
    exact: bool,
    tf32: bool = False,
) -> Engine:
    """The engine for `name`; `auto` never fails for want of a fast one, a forced engine that cannot run is an error."""
    if name not in get_args(EngineName):
        raise ConfigError(f"run.engine is {name!r}; allowed: {', '.join(get_args(EngineName))}")
    FlatModel(module)  # refuses what no back end takes
    chosen = _fast(device) if name == "auto" else name
    obstacle = _obstacle(chosen, module, input_shape, device, exact)
    if obstacle is not None and name != "auto":
        raise ConfigError(f"run.engine = {name!r} is not possible here: {obstacle}; use 'auto' or 'generic'")
    if chosen in ("reference", "generic") or obstacle is not None:
        try_gradients(module, input_shape)
        return ReferenceEngine(module) if chosen == "reference" else GenericEngine(module)
    if chosen == "stacked":
        return stacked.StackedEngine(module, device, tf32=tf32)
    return native.NativeEngine(module, threads)


def reason(
    name: EngineName,
    module: nn.Module,
    input_shape: tuple[int, ...],
    device: torch.device | str,
    exact: bool,
) -> str:
    """Why `choose` takes what it takes, for the summary."""
    if name != "auto":
        return f"run.engine = {name!r}"
    fast = _fast(device)
    obstacle = _obstacle(fast, module, input_shape, device, exact)
    return "the fastest that can run this model here" if obstacle is None else f"not {fast}: {obstacle}"


def _fast(device: torch.device | str) -> EngineName:
    """The back end to try first on a device."""
    return "native" if torch.device(device).type == "cpu" else "stacked"


def _obstacle(
    name: EngineName,
    module: nn.Module,
    input_shape: tuple[int, ...],
    device: torch.device | str,
    exact: bool,
) -> str | None:
    """Why that back end cannot take this run, or None if it can."""
    if name == "stacked":
        return stacked.device_obstacle(device, exact) or stacked.supports(module, input_shape)
    if name != "native":
        return None
    kind = torch.device(device).type
    if kind != "cpu":
        return f"it runs on CPUs, and run.device is {kind!r}"
    if exact:
        return "privacy.noise = 'exact' has no native implementation"
    return native.supports(module, input_shape)
