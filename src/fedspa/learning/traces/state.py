"""What lies in a module between two forward passes, so that two states can be compared: attributes, buffers, and what
they hold in turn."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn


class Where(NamedTuple):
    """A layer's name, None for the task, and the variable; a number for those outside, which may share a name."""

    layer: str | None
    variable: str
    number: int = 0


State: TypeAlias = dict[Where, object]

ABSENT = object()
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
BOXES = (list, tuple, set, frozenset, deque)


class Drawn(NamedTuple):
    """How far a generator is."""

    state: object


def within(module: nn.Module) -> State:
    """All values that the module's layers hold."""
    layers = dict(module.named_modules())
    known = {id(layer) for layer in layers.values()}
    state: State = {}
    for name, layer in layers.items():
        for key, value in vars(layer).items():
            if key in ("_parameters", "_buffers"):
                for own, tensor in value.items():
                    gather(tensor, Where(name, own), state, known)
            elif key != "_modules":
                gather(value, Where(name, key), state, known)
    return state


def of_task(task: object) -> State:
    """All values that a task holds."""
    state: State = {}
    for key, value in vars(task).items():
        gather(value, Where(None, key), state, set())
    return state


def gather(value: object, where: Where, state: State, known: set[int]) -> None:
    """Put a value's own values into `state`, each under the way to it. `known` are objects seen before, by id."""
    if isinstance(value, PLAIN):
        state[where] = value
    elif isinstance(value, Tensor):
        state[where] = value.detach().clone() if value.layout is torch.strided else repr(value)
    elif isinstance(value, np.ndarray):
        state[where] = value.tobytes()
    elif isinstance(value, GENERATORS):
        state[where] = _drawn(value)
    elif id(value) not in known and not isinstance(value, type):
        known.add(id(value))
        path = where.variable
        if isinstance(value, Mapping):
            parts = [(f"{path}[{key!r}]", part) for key, part in value.items()]
        elif isinstance(value, set | frozenset):
            parts = [(path, repr(sorted(map(repr, value))))]
        elif isinstance(value, BOXES):
            parts = [(f"{path}[{place}]", part) for place, part in enumerate(value)]
        else:
            parts = [(f"{path}.{key}", part) for key, part in getattr(value, "__dict__", {}).items()]
        for named, part in parts:
            gather(part, where._replace(variable=named), state, known)


def _drawn(generator: object) -> Drawn:
    if isinstance(generator, torch.Generator):
        return Drawn(generator.get_state().numpy().tobytes())
    if isinstance(generator, np.random.Generator):
        return Drawn(repr(generator.bit_generator.state))
    if isinstance(generator, random.Random):
        return Drawn(generator.getstate())
    assert isinstance(generator, np.random.RandomState)
    kind, keys, *rest = generator.get_state()
    return Drawn((kind, np.asarray(keys).tobytes(), *rest))


def changed(before: State, after: State) -> list[Where]:
    """Where the two differ, one place per layer."""
    found: dict[str | None, Where] = {}
    for where in {**before, **after}:
        if where.layer not in found and not _equal(before.get(where, ABSENT), after.get(where, ABSENT)):
            found[where.layer] = where
    return list(found.values())


def same_bits(one: Tensor, other: Tensor) -> bool:
    """NaN equals NaN."""
    alike = one.dtype == other.dtype and one.shape == other.shape and one.device == other.device
    return alike and torch.equal(_bits(one), _bits(other))


def close(one: Tensor, other: Tensor, tolerance: float) -> bool:
    """Within that share of the largest number; NaN is near NaN."""
    if one.shape != other.shape or not one.is_floating_point():
        return torch.equal(one, other)
    scale = float(one.nan_to_num(0, 0, 0).abs().max()) if one.numel() else 0.0
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


def _bits(values: Tensor) -> Tensor:
    return values.detach().contiguous().reshape(-1).view(torch.uint8)


def _equal(one: object, other: object) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return same_bits(one, other)
    return type(one) is type(other) and (one == other or (one != one and other != other))


def parameter_at(module: nn.Module, where: Tensor) -> Where:
    """The first parameter with a coordinate in `where`."""
    trained = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    for (name, _), part in zip(trained, torch.split(where, [parameter.numel() for _, parameter in trained])):
        if part.any():
            return Where(name.rpartition(".")[0], name.rpartition(".")[2])
    return Where("", "its parameters")
