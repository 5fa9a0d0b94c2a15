"""Which back end runs a model: the fastest that can, or the one that `run.engine` forces."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import nn

from fedspa.engine import native, stacked
from fedspa.engine.flat import FlatModel
from fedspa.engine.generic import GenericEngine
from fedspa.engine.reference import ReferenceEngine
from fedspa.engine.task import Engine
from fedspa.errors import ConfigError

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
    chosen = _fast(device) if name == "auto" else name
    obstacle = _obstacle(chosen, module, input_shape, device, exact)
    if obstacle is not None and name != "auto":
        raise ConfigError(f"run.engine = {name!r} is not possible here: {obstacle}; use 'auto' or 'generic'")
    if chosen in ("reference", "generic") or obstacle is not None:
        _try_gradients(module, input_shape)
        return ReferenceEngine(module) if chosen == "reference" else GenericEngine(module)
    if chosen == "stacked":
        return stacked.StackedEngine(module, device, tf32=tf32)
    return native.NativeEngine(module, threads)


def _try_gradients(module: nn.Module, input_shape: tuple[int, ...]) -> None:
    """Refuse a forward that draws randomness or keeps state: what one example leaves behind would be in the next one's
    gradient, beyond any clip. vmap notices most of it, and only where examples are many; the rest shows when an example
    is asked for again after another."""
    model = FlatModel(module)
    theta = model.flatten()
    # Two records that are nowhere constant, for models that divide by a record's own spread; as tokens, 0 and 1.
    ramp = torch.linspace(0, 1, math.prod(input_shape), device=theta.device).view(input_shape)
    x = torch.stack([ramp, 1 - ramp])
    y = torch.zeros(2, dtype=torch.int64, device=theta.device)
    try:
        model.per_example_gradients()(theta, x, y)
        alone = [model.gradient(theta, x[i : i + 1], y[i : i + 1]) for i in (0, 1, 0)]
    except RuntimeError as error:
        raise ConfigError(
            f"model.name: torch.func cannot take one example's gradient ({str(error).splitlines()[0]}); the forward of "
            "the model must draw no randomness and change no state"
        ) from None
    # Not to the bit: on a GPU a gradient may be added up in another order each time.
    if not torch.allclose(alone[0], alone[2], rtol=1e-5, equal_nan=True):
        raise ConfigError(
            "model.name: an example has another gradient once another was seen; the forward of the model must draw no "
            "randomness and change no state"
        )


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
