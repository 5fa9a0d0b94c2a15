"""An agent's own records: from `package.module:function`, or from an `.npz` with the arrays x and y.

The name is written in the agent's node-config, never taken from the server. What one record holds must never show in
whether or how the agent answers, so no record can spoil the reading: one with features that are no finite numbers, or
with a target that the site's task cannot take, is *bad*. It stays among the records, whose number it does not change,
and is filled with NaN, at which a gradient counts as zero. That depends on the record and on the site's own settings
alone. Only what all records share is refused: an array that is none, other shapes, no records.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedspa.data import plugin
from fedspa.data.datasets import Dataset
from fedspa.errors import DataError


@dataclass(frozen=True, eq=False)
class Records:
    """x: float32, NaN in bad records. y: int64 within the site's classes, or float32 where it has none; 0 in bad
    records. `bad`: their numbers."""

    x: Tensor
    y: Tensor
    bad: tuple[int, ...]


def load(
    name: str,
    node: Mapping[str, Any],
    classes: int,
    transform: Callable[[Tensor], Tensor] | None = None,
    *,
    zero_or_one: bool = False,
) -> Records:
    """The site's records. A function is called with the node-config where it takes an argument, else without.

    Without classes (0) a target is a number or a row of numbers, where asked for zeros and ones.
    `transform` maps all records, each by itself; of a bad one it sees zeros.
    """
    made: Any = _npz(Path(name)) if name.endswith(".npz") else _users(name, node)
    if isinstance(made, Dataset):
        made = made.train_x, made.train_y
    if not (isinstance(made, tuple) and len(made) == 2):
        raise DataError(f"data = {name!r} gave a {type(made).__name__}; the pair (x, y) or a Dataset is needed")
    features, labels = (_numbers(part, f"data = {name!r}: {what}") for part, what in zip(made, ("x", "y")))
    row = labels.ndim == 2 and labels.size > 0 and not classes
    if (
        features.ndim < 2
        or labels.shape[:1] != features.shape[:1]
        or not (row or labels.ndim == 1)
        or not features.size
    ):
        raise DataError(
            f"data = {name!r} has x of shape {features.shape} and y of shape {labels.shape}; (records, ...) and "
            f"(records,){'' if classes else ' or (records, numbers)'} are needed, and at least one record"
        )
    with np.errstate(over="ignore", invalid="ignore"):
        x = features.astype(np.float32)
        targets = labels if classes else labels.astype(np.float32)
        known = np.isin(targets, np.arange(classes or 2)) if classes or zero_or_one else np.isfinite(targets)
        good = np.isfinite(x).reshape(len(x), -1).all(axis=1) & known.reshape(len(x), -1).all(axis=1)
    x[~good] = 0
    y = np.where(good.reshape(-1, *[1] * (labels.ndim - 1)), targets, 0).astype(np.int64 if classes else np.float32)
    ready = torch.from_numpy(x) if transform is None else transform(torch.from_numpy(x))
    ready[torch.from_numpy(~good)] = torch.nan
    return Records(ready, torch.from_numpy(y), tuple(np.flatnonzero(~good).tolist()))


def _numbers(values: Any, what: str) -> NDArray[Any]:
    """An array of real numbers. Text, objects and complex numbers, which one strange cell makes of a whole array, are
    read one by one; what is no real number becomes NaN."""
    try:
        if isinstance(values, Tensor):
            values = values.detach().cpu().to_dense()
            values = values.float() if values.is_floating_point() else values  # numpy knows no bfloat16
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{what} is not an array of numbers ({plugin.one_line(error)})") from error
    if array.dtype.kind in "OSU":
        array = np.array([_number(cell) for cell in array.reshape(-1)]).reshape(array.shape)
    if array.dtype.kind == "c":
        array = np.where(array.imag == 0, array.real, np.nan)
    if array.dtype.kind not in "biuf":
        raise DataError(f"{what} is an array of {array.dtype}; real numbers are needed")
    return array


def _number(cell: Any) -> float:
    try:
        return float(cell)
    except (TypeError, ValueError, OverflowError):
        return np.nan


def _npz(path: Path) -> tuple[Any, Any]:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return arrays["x"], arrays["y"]
    except KeyError as error:
        raise DataError(f"data = '{path}' lacks {error}; an agent's .npz has the arrays x and y") from error
    except Exception as error:  # numpy and zipfile raise a dozen kinds on what is no .npz
        raise DataError(f"data = '{path}' cannot be read ({plugin.one_line(error)})") from error


def _users(name: str, node: Mapping[str, Any]) -> object:
    function = plugin.resolve(name, key="data", error=DataError)
    try:
        return function(dict(node)) if inspect.signature(function).parameters else function()
    except (DataError, KeyboardInterrupt):
        raise
    except BaseException as error:  # the user's code may raise anything, and a script exits
        raise DataError(f"data = {name!r} failed ({plugin.one_line(error)})") from error
