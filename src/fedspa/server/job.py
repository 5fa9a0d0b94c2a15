"""What a server needs for a run: nothing of an agent, and of the records its own held-out ones."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedspa.algorithms import Algorithm, Terms
from fedspa.engine.task import Engine
from fedspa.learning.flat import FlatModel
from fedspa.mechanisms import Plan
from fedspa.server.optimizers import ServerOptimizer
from fedspa.wire.payload import Coding


@dataclass(frozen=True)
class ServerJob:
    """`terms` are those of the first round, but for the clip value, which starts at `clip_value` (None without a plan).

    `engine` scores the held-out records x and y where it can, on so many `threads`. Masks follow from `public_key`.
    """

    model: FlatModel
    algorithm: Algorithm
    optimizer: ServerOptimizer
    terms: Terms
    coding: Coding
    clip_value: float | None
    public_key: bytes
    x: Tensor
    y: Tensor
    classes: int
    engine: Engine
    threads: int

    @property
    def plan(self) -> Plan | None:
        return self.terms.plan
