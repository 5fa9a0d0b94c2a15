"""What is trained, and by whom."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import get_args

from torch import nn

from brought.rows import ROWS as BROUGHT
from brought.rows import Row, built_in
from fedspa.engine import EngineName
from fedspa.engine.native import supports
from fedspa.privacy.event import Neighbours, Sampling


@dataclass(frozen=True)
class Case:
    """A model with its batch and mask. A turn of a rival has `slow_steps`, one of our agents `fast_steps` steps: turns
    take about as long then. In a short one, the start of threads would be what is measured."""

    title: str
    row: Row
    batch: int
    records: int
    compression: float
    slow_steps: int = 1
    fast_steps: int = 1
    device: str = "cpu"


MLP = built_in("mlp", 50_890, (1, 28, 28), "MLP")
LOGISTIC = built_in("logistic", 7_850, (1, 28, 28), "logistic")
CASES = {
    "mnist-p05": Case("MNIST CNN, p = .05", BROUGHT["mnist-cnn"], 10, 600, 0.05, 25, 300),
    "mnist-p100": Case("MNIST CNN, p = 1", BROUGHT["mnist-cnn"], 10, 600, 1.0, 25, 300),
    "cifar-p10": Case("CIFAR CNN, p = .1", BROUGHT["cifar10-cnn"], 50, 500, 0.1, 2, 5),
    "mlp-p100": Case("MLP, p = 1", MLP, 10, 600, 1.0, 50, 200),
    "logistic-p100": Case("logistic, p = 1", LOGISTIC, 10, 600, 1.0, 50, 400),
}
CLIP = {"coordinate": 1e-3, "l2": 1.0}
NOISE, LEARNING_RATE = 2.0, 0.01

# Threads of one process. The others get a process a core, except `sgd-threads`, which gets the cores as torch threads.
THREAD_SPLIT = ("native", "native-l2", "native-plain-sgd")
# Without `-l2` each coordinate is clamped.
PRIVATE = ("generic", "vmap", "opacus-hooks", "opacus-functorch", "opacus-ew")
PLAIN = ("sgd", "sgd-channels-last", "sgd-threads", "sgd-grouped")
CONTENDERS = (
    *(*THREAD_SPLIT, "generic-plain-sgd"),
    *(name + clip for clip in ("", "-l2") for name in PRIVATE),
    *("opacus-ghost-l2", *PLAIN),
)


def clipping(name: str) -> str:
    """How this contender clips."""
    return "l2" if name.endswith("-l2") else "coordinate"


def drawing(name: str) -> tuple[Sampling, Neighbours]:
    """How one of ours draws batches: each record by its own coin, or as many as the rivals take in every step."""
    return ("fixed", "replace-one") if "-fixed" in name else ("poisson", "add-remove")


def own_engine(name: str) -> EngineName | None:
    """Which of our engines this contender is: `native-l2` is the native one; None for the rivals."""
    return next((engine for engine in get_args(EngineName) if name.split("-")[0] == engine), None)


def available(name: str, case: Case) -> bool:
    if name.startswith("opacus") and importlib.util.find_spec("opacus") is None:
        return False
    if name in THREAD_SPLIT:
        return supports(case.row.build(), case.row.shape) is None
    if name == "opacus-ghost-l2":  # its norm is that of all coordinates: no mask
        return case.compression == 1
    return name != "sgd-channels-last" or any(isinstance(layer, nn.Conv2d) for layer in case.row.build().modules())
