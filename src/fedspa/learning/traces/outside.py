"""What lies outside of a module and is yet within reach of its forward pass and hooks: closures, globals of their file,
class attributes, defaults of arguments.

Copies of a module have their own attributes, but share all this. So it is saved before a trial and put back.
"""

from __future__ import annotations

import copy
import functools
import random
from collections import deque
from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fedspa.learning.traces.state import ABSENT, BOXES, GENERATORS, PLAIN, State, Where, changed, gather


class Outside:
    """The variables outside of a module and its task, and what lay there when this was made."""

    def __init__(self, module: nn.Module, task: object) -> None:
        reached = {(id(place.holder), place.key): place for place in _reach(module, task)}
        self._places = [place for place in reached.values() if _is_data(place.get())]
        self._before = [_copied(place.get()) for place in self._places]

    def state(self) -> State:
        state: State = {}
        for number, place in enumerate(self._places, start=1):
            gather(place.get(), place.where._replace(number=number), state, set())
        return state

    def restore(self) -> None:
        for place, before in zip(self._places, self._before):
            then: State = {}
            now: State = {}
            gather(before, place.where, then, set())
            gather(place.get(), place.where, now, set())
            if changed(then, now):
                place.restore(before)


class _Place(NamedTuple):
    """A variable: a key of a file's globals, or an attribute of a class, a function, a cell of a closure, an object."""

    where: Where
    holder: Any
    key: str

    def get(self) -> object:
        if isinstance(self.holder, dict):
            return self.holder.get(self.key, ABSENT)
        try:
            return getattr(self.holder, self.key)
        except (AttributeError, ValueError):  # ValueError: an empty cell
            return ABSENT

    def restore(self, before: object) -> None:
        """In place where it can be: others may hold the same object."""
        now = self.get()
        if type(now) is type(before) and _refill(now, before):
            return
        if isinstance(self.holder, dict):
            if before is ABSENT:
                self.holder.pop(self.key, None)
            else:
                self.holder[self.key] = _copied(before)
        elif before is ABSENT:
            delattr(self.holder, self.key)
        else:
            setattr(self.holder, self.key, _copied(before))


def _refill(now: Any, before: Any) -> bool:
    """Make `now` what `before` is; whether that is possible."""
    if isinstance(now, list | deque):
        now.clear()
        now.extend(_copied(before))
    elif isinstance(now, dict | set):
        now.clear()
        now.update(_copied(before))
    elif isinstance(now, torch.Generator):
        now.set_state(before.get_state())
    elif isinstance(now, np.random.Generator):
        now.bit_generator.state = before.bit_generator.state
    elif isinstance(now, np.random.RandomState):
        now.set_state(before.get_state())
    elif isinstance(now, random.Random):
        now.setstate(before.getstate())
    else:
        return False
    return True


def _copied(value: object) -> Any:
    if isinstance(value, torch.Generator):
        return value.clone_state()
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    return value if value is ABSENT else copy.deepcopy(value)


def _is_data(value: object) -> bool:
    """Values through and through: numbers, tensors, generators, and boxes of these."""
    if value is ABSENT or isinstance(value, (*PLAIN, np.ndarray, *GENERATORS)):
        return True
    if isinstance(value, Tensor):
        return value.is_leaf
    if isinstance(value, dict):
        return all(_is_data(part) for part in value.values())
    return isinstance(value, BOXES) and all(_is_data(part) for part in value)


def _reach(module: nn.Module, task: object) -> Iterator[_Place]:
    seen: set[object] = set()
    things: list[tuple[str | None, object]] = [*module.named_modules(), (None, task)]
    for name, thing in things:
        for kind in type(thing).__mro__:
            if not _of_torch(kind):
                yield from _of_class(kind, name, seen)
        for value in getattr(thing, "__dict__", {}).values():
            for function in _functions(value):
                yield from _of_function(function, name, seen)


def _of_class(kind: type, layer: str | None, seen: set[object]) -> Iterator[_Place]:
    if kind in seen:
        return
    seen.add(kind)
    for key, value in vars(kind).items():
        functions = list(_functions(getattr(value, "__func__", value)))
        for function in functions:
            yield from _of_function(function, layer, seen)
        if not functions and not key.startswith("__"):
            yield _Place(Where(layer, f"{kind.__name__}.{key}"), kind, key)


def _functions(value: object) -> Iterator[FunctionType]:
    """The functions that a value is or holds, as a hook does."""
    if isinstance(value, FunctionType):
        yield value
    elif isinstance(value, MethodType):
        yield from _functions(value.__func__)
    elif isinstance(value, functools.partial):
        yield from _functions(value.func)
    elif isinstance(value, dict):
        for part in value.values():
            yield from _functions(part)
    elif isinstance(value, BOXES):
        for part in value:
            yield from _functions(part)


def _of_function(function: FunctionType, layer: str | None, seen: set[object]) -> Iterator[_Place]:
    """Its variables that outlive a call, and those of the functions of its own file that it names."""
    if function in seen or _of_torch(function):
        return
    seen.add(function)
    for key in ("__defaults__", "__kwdefaults__", "__dict__"):
        yield _Place(Where(layer, f"{key} of {function.__name__}"), function, key)
    cells = zip(function.__code__.co_freevars, function.__closure__ or ())
    yield from (place for key, cell in cells for place in _behind(Where(layer, key), cell, "cell_contents", seen))
    for key in _names(function.__code__):
        value = function.__globals__.get(key)
        if not isinstance(value, FunctionType) or value.__globals__ is function.__globals__:
            yield from _behind(Where(layer, key), function.__globals__, key, seen)


def _behind(where: Where, holder: Any, key: str, seen: set[object]) -> Iterator[_Place]:
    """A variable, or the variables of the function or of the plain object that it holds."""
    place = _Place(where, holder, key)
    value = place.get()
    if isinstance(value, FunctionType):
        yield from _of_function(value, where.layer, seen)
    elif hasattr(value, "__dict__") and not isinstance(value, nn.Module | type | Tensor) and not callable(value):
        yield _Place(where, value, "__dict__")
    else:
        yield place


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield from _names(part)


def _of_torch(thing: type | FunctionType) -> bool:
    return thing is object or (thing.__module__ or "").partition(".")[0] == "torch"
