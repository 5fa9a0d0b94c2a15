"""What is trained, and by whom."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from fedspa.engine.native import supports
from fedspa.learning.models import build


@dataclass(frozen=True)
class Case:
    """A model with its batch and mask. A turn of a rival has `slow_steps`, one of our agents `fast_steps` steps: turns
    take about as long then. In a short one, the start of threads would be what is measured."""

    title: str
    model: str
    shape: tuple[int, ...]
    batch: int
    records: int
    compression: float
    slow_steps: int
    fast_steps: int


CASES = {
    "mnist-p05": Case("MNIST CNN, p = .05", "mnist-cnn", (1, 28, 28), 10, 600, 0.05, 25, 300),
    "mnist-p100": Case("MNIST CNN, p = 1", "mnist-cnn", (1, 28, 28), 10, 600, 1.0, 25, 300),
    "cifar-p10": Case("CIFAR CNN, p = .1", "cifar10-cnn", (3, 32, 32), 50, 500, 0.1, 2, 5),
    "mlp-p100": Case("MLP, p = 1", "mlp", (1, 28, 28), 10, 600, 1.0, 50, 200),
    "logistic-p100": Case("logistic, p = 1", "logistic", (1, 28, 28), 10, 600, 1.0, 50, 400),
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


def available(name: str, case: Case) -> bool:
    if name.startswith("opacus") and importlib.util.find_spec("opacus") is None:
        return False
    if name in THREAD_SPLIT:
        return supports(build(case.model, case.shape, 10, 0), case.shape) is None
    if name == "opacus-ghost-l2":  # its norm is that of all coordinates: no mask
        return case.compression == 1
    return name != "sgd-channels-last" or case.model.endswith("cnn")
