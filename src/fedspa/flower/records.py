"""An agent's own records: from `package.module:function`, or from an `.npz` with the arrays x and y.

The name is written in the agent's node-config, never taken from the server.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from fedspa.errors import DataError
from fedspa.federation import plugin
from fedspa.federation.datasets import Dataset, from_arrays


def load(name: str, node: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """x and y, checked. A function is called with the node-config where it takes an argument, else without."""
    made = _npz(Path(name)) if name.endswith(".npz") else _users(name, node)
    if isinstance(made, Dataset):
        return made.train_x, made.train_y
    if not (isinstance(made, tuple) and len(made) == 2):
        raise DataError(f"data = {name!r} gave a {type(made).__name__}; the pair (x, y) or a Dataset is needed")
    checked = from_arrays(*made, *made, name=name)
    return checked.train_x, checked.train_y


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
