"""What an entry may say: names that can be read, and one unit for all of an agent's."""

from __future__ import annotations

from collections.abc import Iterable

from fedspa.errors import LedgerError
from fedspa.privacy.event import Event


def check_unit(agent: str, spent: Iterable[Event], event: Event) -> None:
    for other in spent:
        if other.unit != event.unit:
            raise LedgerError(
                f"agent {agent!r} has entries that protect each {other.unit}, and this one protects each {event.unit}: "
                f"their ε do not add up; take a run whose unit is the {other.unit}, or an agent's name of its own for "
                "records that this agent never used (docs/persons.md)"
            )


def check_name(name: str, value: str) -> None:
    if not (isinstance(value, str) and 0 < len(value) <= 200 and value.isprintable()):
        raise LedgerError(f"{name} is {str(value)[:50]!r}; it must be 1 to 200 printable characters")
