"""The algorithms by name. A new one is a file with a `respond` in it, and an `Algorithm` here.

What is to be known of an algorithm without running it needs no torch: configs and reports read this.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn

from fedspa.algorithms.algorithm import Algorithm
from fedspa.errors import ConfigError, PrivacyError
from fedspa.mechanisms.binomial.mechanism import BINOMIAL
from fedspa.mechanisms.discrete_gaussian.mechanism import DISCRETE_GAUSSIAN
from fedspa.mechanisms.gaussian.mechanism import GAUSSIAN

if TYPE_CHECKING:
    from fedspa.algorithms.base import Agent, Terms

__all__ = ["ALGORITHMS", "CPSGD", "DP_FED", "FEDAVG", "FED_SPA", "Agent", "Algorithm", "Terms", "chosen", "summed"]


def _late(module: str, name: str) -> Callable[..., Any]:
    """A function that is imported when it is first called."""
    return lambda *arguments: getattr(import_module(f"fedspa.algorithms.{module}"), name)(*arguments)


def _masked_only(*arguments: object) -> NoReturn:
    raise PrivacyError("a share of a sum leaves its agent masked (fedspa.secagg), and is never encoded by itself")


def summed(algorithm: Algorithm, mean: Callable[..., Any], **other: Any) -> Algorithm:
    """`algorithm` for a server that sees sums only, with what is `other` there."""
    return replace(algorithm, mean=mean, encode=_masked_only, decode=_masked_only, **other)


# Noisy local steps, and values on their way.
_STEPS = _late("fedspa", "respond"), _late("base", "encode_values"), _late("base", "decode_values")

FED_SPA = Algorithm("fedspa", GAUSSIAN, True, "adam", *_STEPS)
# FedAvg (McMahan et al. 2017) is Fed-SPA's round with all coordinates active and no plan: nothing is clipped, noised or
# cut, batches are drawn as the config's `privacy.sampling` says, and equation (2) of the paper's Section 3.2 holds.
FEDAVG = Algorithm("fedavg", None, False, "average", *_STEPS)
# The paper's baseline, FedAvg whose local gradients carry Gaussian noise: Fed-SPA's round with all coordinates active.
DP_FED = Algorithm("dp-fed", GAUSSIAN, False, "average", *_STEPS)
CPSGD = Algorithm(
    "cpsgd",
    BINOMIAL,
    sparse=False,
    server="average",
    respond=_late("cpsgd", "respond"),
    encode=_late("cpsgd", "encode"),
    decode=_late("cpsgd", "decode"),
    mask="shared",  # agents that rotate do so alike, so that their numbers add up
)
# Under secure aggregation both have one step, and an agent's share of the noise on it.
_SHARES = {"respond": _late("aggregated", "respond"), "mechanism": DISCRETE_GAUSSIAN}
FED_SPA = replace(FED_SPA, aggregated=summed(FED_SPA, _late("aggregated", "mean_update"), **_SHARES))
DP_FED = replace(DP_FED, aggregated=summed(DP_FED, _late("aggregated", "mean_update"), **_SHARES))
CPSGD = replace(CPSGD, aggregated=summed(CPSGD, _late("cpsgd", "mean")))
ALGORITHMS: dict[str, Algorithm] = {algorithm.name: algorithm for algorithm in (FED_SPA, FEDAVG, DP_FED, CPSGD)}


def chosen(name: str, adversary: str | None) -> Algorithm:
    """The algorithm of that name whose ε holds against `adversary`; None, of a run without an ε, is `local`."""
    algorithm = ALGORITHMS[name]
    if adversary in (None, "local"):
        return algorithm
    if algorithm.aggregated is None:
        able = ", ".join(name for name, known in ALGORITHMS.items() if known.aggregated is not None)
        raise ConfigError(f"privacy.adversary is {adversary!r}; {name} is not run under it, only: {able}")
    return algorithm.aggregated


def __getattr__(name: str) -> Any:
    if name in ("Agent", "Terms"):
        return getattr(import_module("fedspa.algorithms.base"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
