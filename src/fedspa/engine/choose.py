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

EngineName = Literal["auto", "native", "stacked", "generic", "reference"]
NO_EXAMPLES = "cpsgd needs each example's gradient, and it hands out none"


def choose(
    name: EngineName,
    module: nn.Module,
    input_shape: tuple[int, ...],
    device: torch.device | str,
    threads: int,
    exact: bool,
    tf32: bool = False,
    *,
    by_example: bool = False,
) -> Engine:
    """The engine for `name`; `auto` never fails for want of a fast one, a forced engine that cannot run is an error.

    `auto` does not take `stacked`: its kernels are younger than the tests that ran on a GPU. `by_example` asks for one
    that hands out each example's gradient.
    """
    if name not in get_args(EngineName):
        raise ConfigError(f"run.engine is {name!r}; allowed: {', '.join(get_args(EngineName))}")
    obstacle = None
    if by_example and name not in ("generic", "reference"):
        obstacle = NO_EXAMPLES
    elif name in ("auto", "native"):
        obstacle = native_obstacle(module, input_shape, device, exact)
    elif name == "stacked":
        obstacle = stacked.device_obstacle(device, exact) or stacked.supports(module, input_shape)
    if name in ("native", "stacked") and obstacle is not None:
        raise ConfigError(f"run.engine = {name!r} is not possible here: {obstacle}; use 'auto' or 'generic'")
    if name == "stacked":
        return stacked.StackedEngine(module, device, tf32=tf32)
    if name == "reference":
        return ReferenceEngine(module)
    if name == "generic" or obstacle is not None:
        return GenericEngine(module)
    return native.NativeEngine(module, threads)


def reason(
    name: EngineName,
    module: nn.Module,
    input_shape: tuple[int, ...],
    device: torch.device | str,
    exact: bool,
    *,
    by_example: bool = False,
) -> str:
    """Why `choose` takes what it takes, for the summary."""
    if name != "auto":
        return f"run.engine = {name!r}"
    obstacle = NO_EXAMPLES if by_example else native_obstacle(module, input_shape, device, exact)
    return "the fastest that can run this model here" if obstacle is None else f"not native: {obstacle}"


def native_obstacle(
    module: nn.Module, input_shape: tuple[int, ...], device: torch.device | str, exact: bool
) -> str | None:
    """Why the native back end cannot take this run, or None if it can."""
    kind = torch.device(device).type
    if kind != "cpu":
        return f"it runs on CPUs, and run.device is {kind!r}"
    if exact:
        return "privacy.noise = 'exact' has no native implementation"
    return native.supports(module, input_shape)
