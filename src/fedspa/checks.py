"""A list of checks with their outcomes: `fedspa doctor`, `fedspa site check` and the server's start share it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from fedspa.errors import FedspaError


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
