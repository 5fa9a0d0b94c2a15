"""Errors that a user can act on.

Each carries one line: what was wrong, what is allowed, what to do. The command line prints that line and exits with 2;
anything else that escapes is a bug, and cli/screen.py keeps its traceback.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError
    from pydantic_core import ErrorDetails

# Whose frames lie between a warning and the line that it is about.
_WITHIN = (os.path.dirname(os.path.abspath(__file__)) + os.sep, functools.__file__)


class FedspaError(Exception):
    """Base of every error that fedspa raises on purpose."""

    def __str__(self) -> str:
        """One line, whatever it quotes: a file's name may hold line breaks and a terminal's control characters."""
        return printable(super().__str__())


class FedspaWarning(UserWarning):
    """Base of every warning of fedspa's."""


class SeededNoiseWarning(FedspaWarning):
    """A run whose noise follows from a seed: a simulation, of which nothing is private."""


class MixingWarning(FedspaWarning):
    """A model that gives an example another output in a batch than alone: it trains otherwise than it evaluates."""


class RunWarning(FedspaWarning):
    """What the reader of a finished run must know before believing ε or the score, as in the summary's `warnings`."""


def warn(text: str, kind: type[FedspaWarning]) -> None:
    """A warning at the line that called into this package, from however deep within it: Python's own filters then say
    it once for that line."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_WITHIN):
        frame = frame.f_back
    space = frame.f_globals
    where = frame.f_code.co_filename, frame.f_lineno, space.get("__name__", "<unknown>")
    warnings.warn_explicit(text, kind, *where, registry=space.setdefault("__warningregistry__", {}))


class ConfigError(FedspaError):
    """A config key, flag or combination of them is not allowed."""


class DataError(FedspaError):
    """A data file or a user's data function did not give what it should."""


class PrivacyError(FedspaError):
    """A guarantee was asked for that no sound accountant can give."""


class PayloadError(FedspaError):
    """Bytes that claim to be an update are not one, or not one that fits this round.

    `code` is one of `CODES`: a name for logs and counters that holds nothing of what the bytes said.
    """

    # fmt: off
    CODES = frozenset({
        "length", "magic", "version", "coding", "flags", "round", "dimension", "active", "seed", "replay", "checksum",
        "clip", "step", "scale", "body", "not-finite", "bound", "count", "attempt", "bits", "binding", "member",
    })
    # fmt: on

    def __init__(self, code: str, sentence: str) -> None:
        if code not in self.CODES:
            raise ValueError(f"{code!r} is not a code of PayloadError; allowed: {', '.join(sorted(self.CODES))}")
        super().__init__(sentence)
        self.code = code

    def __reduce__(self) -> tuple[type[PayloadError], tuple[str, str]]:
        """Two arguments in, two arguments on the way between processes."""
        return type(self), (self.code, str(self))


class LedgerError(FedspaError):
    """A ledger cannot be trusted or written; nothing may be released until that is fixed."""


class BudgetError(FedspaError):
    """A participation would pass an agent's own cap: refused before any data is touched."""


@contextmanager
def os_errors_as(kind: type[FedspaError], what: str, fix: str | None = None) -> Iterator[None]:
    """Within it, an error of the operating system becomes a `kind`: what failed, the system's reason, and a fix."""
    try:
        yield
    except OSError as error:
        raise kind(f"{what}: {error.strerror or error}" + ("" if fix is None else f"; {fix}")) from None


def printable(text: str) -> str:
    """`text` with every character that is not printed as itself written out as an escape."""
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


def first_line(error: BaseException) -> str:
    """Return what an error of somebody else's code says, in one line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].strip()


def one_line(error: BaseException) -> str:
    """A foreign exception in one line: its kind, the first line of what it says, and where in the user's code."""
    said, kind, place = first_line(error), type(error).__name__, place_of(error)
    return (kind if said == kind else f"{kind}: {said}") + ("" if place is None else f", at {place}")


def place_of(error: BaseException) -> str | None:
    """The last line of the user's own code on the way to the error, as file:line; None where there is none: fedspa's
    own lines and those of installed packages help nobody to fix theirs."""
    found = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        if not _is_installed(file := frame.f_code.co_filename):
            found = file, line
    return None if found is None else f"{_from_here(found[0])}:{found[1]}"


def _from_here(file: str) -> str:
    try:
        return str(Path(file).relative_to(Path.cwd()))
    except (OSError, ValueError):  # it lies elsewhere, or the current folder is gone
        return file


@cache
def _is_installed(file: str) -> bool:
    """Whether a file belongs to fedspa, to Python or to an installed package; what has no file is nobody's to edit."""
    if not Path(file).is_file():
        return True
    paths = sysconfig.get_paths()
    homes = {str(Path(__file__).parent), *(paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))}
    own = real_path(file)
    return any(own.is_relative_to(real_path(home)) for home in homes)


def real_path(path: str | os.PathLike[str]) -> Path:
    """The absolute path without symbolic links. `Path.resolve` raises a RuntimeError at a loop of links; here such a
    path stays as it is, and the system's own error follows where it is used."""
    return Path(os.path.realpath(path))


def listed(names: Sequence[str], most: int = 3) -> str:
    """Names in quotes, the first few of many."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(f"'{name}'" for name in names[:most]) + more


def quoted(value: object, most: int = 200) -> str:
    """A value of anybody's as an error quotes it: on one line, and no longer than helps."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # its own __repr__ fails, or an integer has more digits than Python writes
        text = f"a {type(value).__name__} that cannot be written out"
    return text if len(text) <= most else f"{text[: most // 2]} … {text[-most // 4 :]}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return " (did you mean 'x'?)" for the name among those known that is spelt most like this one; "" without one."""
    found = get_close_matches(name, list(known), 1)
    return f" (did you mean {found[0]!r}?)" if found else ""


def describe_invalid(error: ValidationError, model: type[BaseModel], prefix: str = "") -> str:
    """Say in one line what pydantic found wrong with the keys of `model`: each key, what it is, and what is allowed."""
    return first_of([describe_detail(item, model, prefix) for item in error.errors(include_url=False)])


def first_of(sentences: Sequence[str], most: int = 10) -> str:
    """Join the first sentences of an error, and say how many more there are."""
    rest = len(sentences) - most
    return "; ".join([*sentences[:most], *([f"and {rest} more"] if rest > 0 else [])])


def describe_detail(item: ErrorDetails, model: type[BaseModel], prefix: str = "") -> str:
    """Say in one line what is wrong with one key; `prefix` stands before it, as in "flower."."""
    location, owner = item["loc"], model
    key = prefix + ".".join(map(str, location))
    message = item["msg"].removeprefix("Value error, ").replace("Input should be", "it must be", 1)
    if item["type"] == "extra_forbidden":
        for part in location[:-1]:
            found: Any = owner.model_fields[str(part)].annotation
            owner = found
        names = sorted(field.alias or name for name, field in owner.model_fields.items())
        return f"unknown key {key}; allowed: {', '.join(names)}{did_you_mean(str(location[-1]), names)}"
    if item["type"] == "missing":
        return f"{key} is missing"
    if not location:
        return message if item["type"] == "value_error" else f"{prefix.rstrip('.') or 'the config'}: {message}"
    value, allowed = item["input"], re.findall("'([^']+)'", message) if item["type"] == "literal_error" else []
    return f"{key} is {quoted(value)}; {message}{did_you_mean(value, allowed) if isinstance(value, str) else ''}"


@dataclass(frozen=True)
class Check:
    """The outcome of one check. `passed` is None for plain information; a failure that is not `required` is reported
    and does not change the verdict."""

    subject: str
    passed: bool | None
    detail: str
    required: bool = True


def run_checks(
    checks: Mapping[str, Callable[[], Iterable[Check]]], expected: type[Exception] = FedspaError
) -> list[Check]:
    """Run every check, in order. One that raises an `expected` exception has failed, with its message as the detail."""
    found: list[Check] = []
    for subject, check in checks.items():
        try:
            found += check()
        except expected as error:
            detail = str(error) if isinstance(error, FedspaError) else f"{type(error).__name__}: {error}"
            found.append(Check(subject, False, detail))
    return found


def failures(checks: Iterable[Check]) -> list[Check]:
    """Return the required checks that failed."""
    return [check for check in checks if check.required and check.passed is False]
