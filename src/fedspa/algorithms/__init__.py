"""The algorithms by name. A new one is a file with a `respond` in it, and an `Algorithm` here.

What is to be known of an algorithm without running it needs no torch: configs and reports read this.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedspa.algorithms.algorithm import Algorithm
from fedspa.mechanisms.binomial.mechanism import BINOMIAL
from fedspa.mechanisms.gaussian.mechanism import GAUSSIAN

if TYPE_CHECKING:
    from fedspa.algorithms.base import Agent, Terms

__all__ = ["ALGORITHMS", "CPSGD", "DP_FED", "FEDAVG", "FED_SPA", "Agent", "Algorithm", "Terms"]


def _late(module: str, name: str) -> Callable[..., Any]:
    """A function that is imported when it is first called."""
    return lambda *arguments: getattr(import_module(f"fedspa.algorithms.{module}"), name)(*arguments)


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
ALGORITHMS: dict[str, Algorithm] = {algorithm.name: algorithm for algorithm in (FED_SPA, FEDAVG, DP_FED, CPSGD)}


def __getattr__(name: str) -> Any:
    if name in ("Agent", "Terms"):
        return getattr(import_module("fedspa.algorithms.base"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
