"""Tasks by name, or by a function of the user's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from torch import Tensor

from fedspa.data import plugin
from fedspa.errors import ConfigError, DataError
from fedspa.examples import Tree, layout
from fedspa.learning.options import Options
from fedspa.learning.tasks.base import CustomLoss, Loss, ModuleLoss, Task
from fedspa.learning.tasks.outputs import Binary, Classification, MultiLabel, Regression
from fedspa.learning.tasks.tokens import NextToken, TokenClassification


def resolve(
    asked: str | Loss | Task,
    y: Tree,
    classes: int | None,
    key: str | None,
    options: Options | None = None,
    code: str | None = None,
) -> Task:
    """The task of that name for such targets, or the user's function, given or named as `package.module:function` (in
    the folder `code` too, the config's run.code). `key` is the Dataset's: where in a dict its targets lay."""
    if isinstance(asked, Task):
        return asked
    if not isinstance(asked, str):
        if not callable(asked):
            raise ConfigError(f"task is a {type(asked).__name__}; give a name, or a function loss(module, example)")
        called = getattr(asked, "__name__", type(asked).__name__)
        return CustomLoss(asked, key, classes, f"task = {called}")
    if plugin.is_plugin(asked):
        function = plugin.resolve(asked, key="task.name", error=ConfigError, code=code)
        return CustomLoss(cast(Loss, function), key, classes, f"task.name = {asked!r}")
    if asked not in _SHIPPED:
        allowed = ", ".join(_SHIPPED)
        raise ConfigError(f"task.name = {asked!r} is unknown: choose one of {allowed}, or 'package.module:function'")
    return _SHIPPED[asked](options or Options(), y, classes, key)


def _classification(options: Options, y: Tree, classes: int | None, key: str | None) -> Task:
    if classes is None:
        raise DataError(
            f"the targets are no classes 0, 1, 2 … ({_why_none(y)}): mend them, or name the task, as in {_other(y)}"
        )
    return Classification(classes, weights=options.weights, label_smoothing=options.label_smoothing)


def _width(y: Tree) -> int:
    """Numbers per example."""
    return max(1, y[0].numel()) if isinstance(y, Tensor) else 1


def _other(y: Tree) -> str:
    """A task, or some, that such targets may be for."""
    if isinstance(y, Tensor) and not y.is_floating_point():
        if y.ndim == 2 and y.shape[1] > 1:
            return "task='next-token', 'token-classification' or 'multi-label'"
        if y.ndim > 2:  # a label for each pixel, and no task by name has a loss for it
            return "a loss of your own: task=lambda module, example: cross_entropy(module(example[0]), example[1])"
    return "task='regression'"


def _why_none(y: Tree) -> str:
    if not isinstance(y, Tensor) or y.ndim != 1:
        return f"each is {layout(y)}, and one whole number is needed"
    if y.is_floating_point() and not bool((y == y.floor()).all()):
        return "they are not whole numbers"
    low, high = int(y.min()), int(y.max())
    if low < 0:
        return f"one is {low}"
    return "all are 0" if high == 0 else f"label {high} among {len(y)} records"


_SHIPPED: dict[str, Callable[[Options, Tree, int | None, str | None], Task]] = {
    "classification": _classification,
    "binary": lambda options, y, classes, key: Binary(_width(y), weights=options.weights),
    "multi-label": lambda options, y, classes, key: MultiLabel(_width(y), weights=options.weights),
    "regression": lambda options, y, classes, key: Regression(
        _width(y), loss=options.loss, huber=options.huber, scale=options.scale
    ),
    "next-token": lambda options, y, classes, key: NextToken(ignore_index=options.ignore_index),
    "token-classification": lambda options, y, classes, key: TokenClassification(ignore_index=options.ignore_index),
    "module": lambda options, y, classes, key: ModuleLoss(key),
}
NAMES = tuple(_SHIPPED)


def answers(name: str, found: Tensor) -> Tensor:
    """What a module's outputs answer in the task that a summary has by this name."""
    kinds: tuple[type[Task], ...] = (Classification, Binary, MultiLabel, Regression, NextToken, TokenClassification)
    return next((kind for kind in kinds if kind.name == name), Task).answers(found)
