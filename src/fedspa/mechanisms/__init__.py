"""Mechanisms: what is released, each in a room with its plan, its events and their prices, its noise and its codec.

A new one is a folder with a `Mechanism` in it, and a line here.
"""

from __future__ import annotations

import json
from functools import lru_cache

from fedspa.errors import PrivacyError
from fedspa.mechanisms.base import Asked, Mechanism, Plan
from fedspa.mechanisms.binomial.mechanism import BINOMIAL
from fedspa.mechanisms.discrete_gaussian.mechanism import DISCRETE_GAUSSIAN
from fedspa.mechanisms.gaussian.mechanism import GAUSSIAN
from fedspa.privacy.event import Event

MECHANISMS: dict[str, Mechanism] = {mechanism.name: mechanism for mechanism in (GAUSSIAN, BINOMIAL, DISCRETE_GAUSSIAN)}

__all__ = ["MECHANISMS", "Asked", "Mechanism", "Plan", "UnknownKind", "event_of"]


class UnknownKind(PrivacyError):
    """An event of a kind that this version does not know."""


def event_of(text: str) -> Event:
    """The event whose `to_json` is `text`; anything that is not exactly such an event is a PrivacyError."""
    if not isinstance(text, str):  # a damaged ledger's columns have any type; and not all of them can be cached
        raise PrivacyError(f"not an event: {repr(text)[:200]} (it must be text)")
    return _event_of(text)


@lru_cache(maxsize=1024)  # a ledger reads the same few events again and again
def _event_of(text: str) -> Event:
    kinds = {kind: make for mechanism in MECHANISMS.values() for kind, make in mechanism.events.items()}
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
