"""The algorithms by name: those of the package, those of installed packages, and a user's own.

Each is named by the reference of its `fedspa.algorithms.Algorithm`, `package.module:NAME`; the package's have short
names besides. Only what the package or an installed package offers is imported because of its name. A name that a
server announced, or that stands in somebody's file, is no reason to import anything else.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from fedspa.errors import ConfigError, did_you_mean, one_line

if TYPE_CHECKING:
    from fedspa.algorithms.algorithm import Algorithm

BUILT_IN = {
    "fedspa": "fedspa.algorithms.algorithm:FED_SPA",
    "fedavg": "fedspa.algorithms.algorithm:FEDAVG",
    "dp-fed": "fedspa.algorithms.algorithm:DP_FED",
    "cpsgd": "fedspa.algorithms.cpsgd:CPSGD",
}
# Installed packages offer algorithms as entry points of this group, whose value is the reference.
GROUP = "fedspa.algorithms"
# Those that this process has loaded.
ALGORITHMS: dict[str, Algorithm] = {}


@cache
def offered() -> dict[str, str]:
    """Return the names that may be imported because somebody says them, with their references."""
    return BUILT_IN | {entry.value: entry.value for entry in entry_points(group=GROUP)}


def known(name: str) -> Algorithm | None:
    """Return the algorithm of that name; None where nobody offers it and this process has not loaded it. One that an
    installed package offers and that cannot be imported is a ConfigError."""
    if name not in ALGORITHMS and name in offered():
        module, _, variable = offered()[name].partition(":")
        try:
            add(name, getattr(import_module(module), variable))
        except Exception as error:  # somebody's module may raise anything
            raise ConfigError(f"algorithm {name!r} is installed and cannot be loaded ({one_line(error)})") from error
    return ALGORITHMS.get(name)


def add(name: str, algorithm: Algorithm) -> Algorithm:
    """Make an algorithm known to this process under the name that its config gives it."""
    aggregated = algorithm.aggregated
    named = replace(algorithm, name=name, aggregated=None if aggregated is None else replace(aggregated, name=name))
    ALGORITHMS[name] = named
    return named


def every() -> list[Algorithm]:
    """Return all that this process can load, each followed by its variant for sums."""
    found: list[Algorithm] = []
    for name in {**offered(), **ALGORITHMS}:
        with suppress(ConfigError):  # a broken package must not keep a ledger from being read
            algorithm = known(name)
            found += [each for each in (algorithm, algorithm and algorithm.aggregated) if each is not None]
    return found


def chosen(name: str, adversary: str | None) -> Algorithm:
    """Return the algorithm of that name whose ε holds against `adversary`; a ConfigError where nobody offers it."""
    algorithm = known(name)
    if algorithm is None:
        names = ", ".join(map(repr, offered()))
        like = did_you_mean(name, offered())
        raise ConfigError(f"algorithm.name is {name[:200]!r}{like}; it must be one of {names}, or package.module:NAME")
    return against(algorithm, adversary)


def against(algorithm: Algorithm, adversary: str | None) -> Algorithm:
    """Return the variant of `algorithm` whose ε holds against `adversary`; None, of a run without ε, is `local`."""
    if adversary in (None, "local"):
        return algorithm
    if algorithm.aggregated is None:
        able = ", ".join(name for name in offered() if (known(name) or algorithm).aggregated)
        raise ConfigError(f"privacy.adversary is {adversary!r}; {algorithm.name} is not run under it, only: {able}")
    return algorithm.aggregated
