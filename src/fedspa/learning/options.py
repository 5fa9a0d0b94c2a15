"""What a config may say of a task. It needs no torch: configs and reports read this."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Error = Literal["mse", "mae", "huber"]


@dataclass(frozen=True, slots=True)
class Options:
    """What a config may say of a task beside its name: public numbers. `OF` says whose each is.

    `scale` follows from a table's schema: how much of the targets' own unit 1 is, in which errors are told.
    """

    weights: tuple[float, ...] | None = None
    label_smoothing: float = 0.0
    loss: Error = "mse"
    huber: float = 1.0
    ignore_index: int = -100
    scale: float = 1.0


# Option → the tasks that it belongs to.
OF: dict[str, tuple[str, ...]] = {
    "weights": ("classification", "binary", "multi-label"),
    "label_smoothing": ("classification",),
    "loss": ("regression",),
    "huber": ("regression",),
    "ignore_index": ("next-token", "token-classification"),
}
