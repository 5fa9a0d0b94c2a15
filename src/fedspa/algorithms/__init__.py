"""The algorithms, by name. A new one is an `Algorithm` (algorithm.py), in this package or in anybody's.

What is to be known of an algorithm without running it needs no torch: configs and reports read this.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedspa import registry
from fedspa.algorithms.algorithm import Algorithm, for_sums
from fedspa.registry import ALGORITHMS, against, chosen

if TYPE_CHECKING:
    from fedspa.algorithms.base import Agent, Terms
    from fedspa.engine.local import Engine
    from fedspa.randomness.streams import derive_key
    from fedspa.wire.payload import Update

# What an algorithm of somebody's own imports.
__all__ = [
    "ALGORITHMS",
    "Agent",
    "Algorithm",
    "Engine",
    "Terms",
    "Update",
    "against",
    "chosen",
    "derive_key",
    "for_sums",
]
_LATER = {  # which need torch
    "Agent": "fedspa.algorithms.base",
    "Terms": "fedspa.algorithms.base",
    "Engine": "fedspa.engine.local",
    "Update": "fedspa.wire.payload",
    "derive_key": "fedspa.randomness.streams",
}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(import_module(_LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


for _name in registry.BUILT_IN:
    registry.known(_name)
