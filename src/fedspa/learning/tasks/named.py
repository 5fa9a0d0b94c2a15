"""Tasks by name, or by a function of the user's own; and the score that a run of one is judged by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from typing import Any, cast

from torch import Tensor

from fedspa.data import plugin
from fedspa.data.columns import Schema
from fedspa.errors import ConfigError, DataError, did_you_mean
from fedspa.examples import Tree, layout
from fedspa.learning.tasks.base import CustomLoss, Loss, Metric, ModuleLoss, Task
from fedspa.learning.tasks.outputs import Binary, Classification, MultiLabel, NextToken, Regression, TokenClassification
from fedspa.learning.tasks.totals import Totals, layout_of

Given = Mapping[str, Any]  # a checked [task.options]


def resolve(
    asked: str | Loss | Task,
    y: Tree,
    classes: int | None,
    key: str | None,
    options: Given | None = None,
    code: str | None = None,
    schema: Schema | None = None,
    scale: float = 1.0,
) -> Task:
    """Return the task of that name for such targets, or the user's function, given or named as
    `package.module:function` (in the folder `code` too, the config's run.code). `key` is the Dataset's: where in a dict
    its targets lay; `schema` is a table's, and `scale` how much of the targets' own unit 1 is. The weights among the
    options are numbers."""
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
    if asked == Totals.name:
        return Totals(layout_of(options or {}, schema))
    if asked not in _SHIPPED:
        allowed = ", ".join(_SHIPPED)
        raise ConfigError(
            f"task.name = {asked!r} is unknown{did_you_mean(asked, _SHIPPED)}: choose one of {allowed}, or "
            "'package.module:function'"
        )
    more = {"scale": scale} if asked == Regression.name else {}
    return _SHIPPED[asked]({**(options or {}), **more}, y, classes, key)


def _classification(options: Given, y: Tree, classes: int | None, key: str | None) -> Task:
    if classes is None:
        raise DataError(
            f"the targets are no classes 0, 1, 2 … ({_why_none(y)}): fix them, or name the task, as in {_other(y)}"
        )
    return Classification(classes, **options)


def _width(y: Tree) -> int:
    """Return how many numbers the target of an example has."""
    return max(1, y[0].numel()) if isinstance(y, Tensor) else 1


def _other(y: Tree) -> str:
    """Return a task, or some, that such targets may be for."""
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


_SHIPPED: dict[str, Callable[[Given, Tree, int | None, str | None], Task]] = {
    "classification": _classification,
    "binary": lambda options, y, classes, key: Binary(_width(y), **options),
    "multi-label": lambda options, y, classes, key: MultiLabel(_width(y), **options),
    "regression": lambda options, y, classes, key: Regression(_width(y), **options),
    "next-token": lambda options, y, classes, key: NextToken(**options),
    "token-classification": lambda options, y, classes, key: TokenClassification(**options),
    "module": lambda options, y, classes, key: ModuleLoss(key),
}
NAMES = tuple(_SHIPPED)
_KINDS: tuple[type[Task], ...] = (Classification, Binary, MultiLabel, Regression, NextToken, TokenClassification)


def kind_of(name: str) -> type[Task]:
    """Return the class of the task that a summary has by this name; `Task` for a loss of the user's own."""
    return next((kind for kind in _KINDS if kind.name == name), Task)


def judged_by(
    asked: str | None, task: Task, y: Tree, metrics: Mapping[str, Metric], code: str | None = None
) -> tuple[Task, dict[str, Metric]]:
    """Return the task with its headline, and the functions that score it beside its own measure. `asked` is the
    config's task.metric: a score of the task, one of the user's `metrics`, or `package.module:function`. Without it
    the held-out targets `y` decide, which are public."""
    found, task, own = dict(metrics), copy(task), task.on_request()
    if asked is None:
        task.headline, task.headline_note = task.fair_headline(y)
        return task, found
    known = (*task.measured, *own, *metrics)
    task.headline = asked
    if plugin.is_plugin(asked):
        found[asked] = cast(Metric, plugin.resolve(asked, key="task.metric", error=ConfigError, code=code))
    elif asked in own and asked not in task.measured:
        found.setdefault(asked, own[asked])
    elif asked not in known:
        names = dict.fromkeys(known)
        raise ConfigError(
            f"task.metric is {asked!r}, which task {task.name!r} has no score for; choose one of {', '.join(names)}"
            f"{did_you_mean(asked, names)}, a function of outputs and targets as 'package.module:function', or leave "
            "it out"
        )
    return task, found
