"""Local training: from θ and an agent's records to its update, by interchangeable engines.

This file needs no torch: a config is read, and the compiled library looked for, without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

EngineName = Literal["auto", "native", "traced", "generic", "reference"]  # what `run.engine` may be


@dataclass(unsafe_hash=True)
class Unsupported(Exception):
    """Why an engine does not run something; raised, or returned as a value. `reason` is one clause about the engine.
    `fix` says what a user could change; it is empty where only another model, task or unit of privacy would help."""

    reason: str
    fix: str = ""

    def __str__(self) -> str:
        return self.reason


def combine(found: Sequence[Unsupported]) -> Unsupported:
    """Return several as one. It has a fix if each of them has: to fix some of them gains nothing."""
    fixes = [each.fix for each in found]
    return Unsupported("; ".join(each.reason for each in found), "; ".join(fixes) if all(fixes) else "")
