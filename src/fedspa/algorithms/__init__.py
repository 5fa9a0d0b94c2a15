"""The algorithms, by name. A new one is an `Algorithm` (algorithm.py), in this package or in anybody's.

What is to be known of an algorithm without running it needs no torch: configs and reports read this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedspa import registry
from fedspa.algorithms.algorithm import Algorithm, for_sums
from fedspa.errors import ConfigError
from fedspa.registry import ALGORITHMS

if TYPE_CHECKING:
    from fedspa.algorithms.base import Agent, Terms

__all__ = ["ALGORITHMS", "Agent", "Algorithm", "Terms", "against", "chosen", "for_sums"]


def chosen(name: str, adversary: str | None) -> Algorithm:
    """Return the algorithm of that name whose ε holds against `adversary`; a ConfigError where nobody offers it."""
    algorithm = registry.known(name)
    if algorithm is None:
        names = ", ".join(map(repr, registry.offered()))
        raise ConfigError(f"algorithm.name is {name[:200]!r}; it must be one of {names}, or package.module:NAME")
    return against(algorithm, adversary)


def against(algorithm: Algorithm, adversary: str | None) -> Algorithm:
    """Return the variant of `algorithm` whose ε holds against `adversary`; None, of a run without ε, is `local`."""
    if adversary in (None, "local"):
        return algorithm
    if algorithm.aggregated is None:
        able = ", ".join(name for name in registry.offered() if (registry.known(name) or algorithm).aggregated)
        raise ConfigError(f"privacy.adversary is {adversary!r}; {algorithm.name} is not run under it, only: {able}")
    return algorithm.aggregated


def __getattr__(name: str) -> Any:
    if name in ("Agent", "Terms"):
        from fedspa.algorithms import base

        return getattr(base, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


for _name in registry.BUILT_IN:
    registry.known(_name)
