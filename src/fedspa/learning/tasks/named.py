"""Tasks by name, or by a function of the user's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from torch import Tensor

from fedspa.data import plugin
from fedspa.errors import ConfigError, DataError
from fedspa.examples import Tree, layout
from fedspa.learning.tasks.base import Task
from fedspa.learning.tasks.classification import Classification
from fedspa.learning.tasks.own import Loss, Own
from fedspa.learning.tasks.regression import Regression


def resolve(asked: str | Loss | Task, y: Tree, classes: int | None, key: str | None) -> Task:
    """The task of that name for such targets, or the user's function, given or named as `package.module:function`."""
    if isinstance(asked, Task):
        return asked
    if not isinstance(asked, str):
        if not callable(asked):
            raise ConfigError(f"task is a {type(asked).__name__}; give a name, or a function loss(module, example)")
        return Own(asked, key)
    if plugin.is_plugin(asked):
        return Own(cast(Loss, plugin.resolve(asked, key="task.name", error=ConfigError)), key)
    if asked not in _SHIPPED:
        allowed = ", ".join(_SHIPPED)
        raise ConfigError(f"task.name = {asked!r} is unknown: choose one of {allowed}, or 'package.module:function'")
    return _SHIPPED[asked](y, classes)


def _classification(y: Tree, classes: int | None) -> Task:
    if classes is None:
        raise DataError(
            f"the targets are no classes 0, 1, 2 … ({_why_none(y)}): mend them, or name the task, as in "
            "task='regression'"
        )
    return Classification(classes)


def _why_none(y: Tree) -> str:
    if not isinstance(y, Tensor) or y.ndim != 1:
        return f"each is {layout(y)}, and one whole number is needed"
    if y.is_floating_point() and not bool((y == y.floor()).all()):
        return "they are not whole numbers"
    low, high = int(y.min()), int(y.max())
    if low < 0:
        return f"one is {low}"
    return "all are 0" if high == 0 else f"label {high} among {len(y)} records"


def _regression(y: Tree, classes: int | None) -> Task:
    return Regression(y[0].numel() if isinstance(y, Tensor) else 1)


_SHIPPED: dict[str, Callable[[Tree, int | None], Task]] = {
    "classification": _classification,
    "regression": _regression,
}
