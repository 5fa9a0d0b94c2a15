"""What a server needs for a run: nothing of an agent, and of the records its own held-out ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from fedspa.algorithms import Algorithm, Terms
from fedspa.engine.task import Engine
from fedspa.examples import Examples, Tree
from fedspa.learning.backbone import Split
from fedspa.learning.flat import FlatModel
from fedspa.mechanisms import Plan
from fedspa.server.optimizers import ServerOptimizer
from fedspa.wire.payload import Coding

Metric = Callable[[Tensor, Tree], float]


@dataclass(frozen=True)
class ServerJob:
    """`terms` are those of the first round, but for the clip value, which starts at `clip_value` (None without a plan).

    `engine` scores the held-out examples `test` where it can and `engine_scores`, on so many `threads`; `metrics` are
    the user's own, of outputs and targets. Masks follow from `public_key`. Where there is a split of the model to be
    `scored`, in eval mode, features of the held-out examples are made once.
    """

    model: FlatModel
    algorithm: Algorithm
    optimizer: ServerOptimizer
    terms: Terms
    coding: Coding
    clip_value: float | None
    public_key: bytes
    test: Examples
    engine: Engine
    threads: int
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    scored: Split | None = None
    engine_scores: bool = True

    @property
    def plan(self) -> Plan | None:
        return self.terms.plan
