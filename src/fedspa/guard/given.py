"""What a guard is given, looked at before anything is written: a slip is told where it was made, in one line."""

from __future__ import annotations

import os
from collections.abc import Iterable
from numbers import Real
from pathlib import Path

from fedspa.errors import ConfigError, quoted
from fedspa.privacy.event import MOST


def path(name: str, value: object) -> Path:
    if not isinstance(value, str | os.PathLike) or "\0" in str(value):
        raise ConfigError(f"{name} is {quoted(value)}; give the path of a file")
    return Path(value)


def number(name: str, value: object) -> float:
    if not isinstance(value, Real) or isinstance(value, bool):
        raise ConfigError(f"{name} is {quoted(value)}; it must be a number")
    return float(value)


def count(name: str, value: object) -> None:
    if type(value) is not int or not 1 <= value <= MOST:
        raise ConfigError(f"{name} is {quoted(value)}; it must be a whole number of at least 1, and at most {MOST:g}")


def texts(name: str, value: Iterable[str]) -> frozenset[str]:
    """Those of a list. A lone text would be taken for its letters, which nobody means."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ConfigError(f"{name} is {quoted(value)}; give a list of names, as [{quoted(value)}]")
    return frozenset(value)
