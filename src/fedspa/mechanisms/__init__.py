"""Mechanisms: what is released, each with its plan, its events and their privacy cost, and its noise.

A mechanism is known by the algorithm that uses it (`fedspa.registry`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache

from fedspa import registry
from fedspa.errors import PrivacyError
from fedspa.mechanisms.base import Mechanism, Plan, PlanRequest
from fedspa.privacy.event import Event

__all__ = ["Mechanism", "Plan", "PlanRequest", "UnknownKind", "event_of"]


class UnknownKind(PrivacyError):
    """An event of a kind that this version does not know."""


def event_of(text: str) -> Event:
    """Return the event whose `to_json` is `text`; anything that is not exactly such an event is a PrivacyError."""
    if not isinstance(text, str):  # a damaged ledger's columns have any type; and not all of them can be cached
        raise PrivacyError(f"not an event: {repr(text)[:200]} (it must be text)")
    return _event_of(text)


def _kinds() -> dict[str, Callable[..., Event]]:
    """Return how to make an event of each kind. A plug-in must not redefine a kind: entries of it that are in ledgers
    would silently get another privacy cost."""
    kinds: dict[str, Callable[..., Event]] = {}
    for algorithm in registry.every():
        make = None if algorithm.mechanism is None else algorithm.mechanism.event
        if make is not None and kinds.setdefault(make.kind, make) is not make:
            raise PrivacyError(
                f"algorithm {algorithm.name!r} redefines the event kind {make.kind!r}, which ledgers hold already; its "
                "mechanism must name its events otherwise"
            )
    return kinds


@lru_cache(maxsize=1024)  # a ledger reads the same few events again and again
def _event_of(text: str) -> Event:
    kinds = _kinds()
    try:
        fields = json.loads(text)
        kind = fields.pop("kind")
        if kind not in kinds:
            raise UnknownKind(f"event kind is {kind!r}; this version knows: {', '.join(kinds)}")
        event = kinds[kind](**fields)
        if event.to_json() != text:
            raise PrivacyError(f"event text is not canonical: {text[:200]!r}")
        return event
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        why = " ".join(str(error).split())  # it may quote a field's name, and with it a line's end
        raise PrivacyError(f"not an event: {text[:200]!r} ({why})") from None
