"""A mechanism and its algorithm from outside the package: Laplace noise on the sum of a batch's clipped gradients.

One record moves d coordinates within ±c by at most 2·d·c in L1 (replace-one): noise of scale s·d·c is (2/s, 0)-DP, and
a batch of B of m records amplifies that (Balle, Barthe, Gaboardi 2018, Theorem 9).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import torch

from fedspa.algorithms import Agent, Algorithm, Terms
from fedspa.engine.local import seeded
from fedspa.mechanisms.base import Clipping, Mechanism, Plan, make_plan
from fedspa.mechanisms.clipping import clip_rows
from fedspa.privacy.event import Event, Limits, Neighbours, NoiseMode, PureStep, Sampling, Unit
from fedspa.randomness.streams import Stream, derive_key, draw_batch
from fedspa.wire.payload import Update


@dataclass(frozen=True, slots=True)
class LaplaceEvent(Event):
    """What a participation does, and its cost."""

    kind: ClassVar[str] = "laplace"
    relations: ClassVar[tuple[Neighbours, ...]] = ("replace-one",)
    sampling: ClassVar[Sampling] = "fixed"
    batch: int
    records: int
    steps: int
    scale: Annotated[float, Limits(1e-3, 1e6)]
    noise: NoiseMode | None = None
    unit: Unit = "record"

    @property
    def step(self) -> PureStep:
        return PureStep(math.log1p(self.rate * math.expm1(2 / self.scale)) * (1 + 1e-12))


@dataclass(frozen=True, slots=True)
class LaplacePlan(Plan):
    """The terms of every agent; its fields are what a server announces."""

    event_type = LaplaceEvent
    sampling: ClassVar[Sampling] = "fixed"
    neighbours: ClassVar[Neighbours] = "replace-one"
    clip: ClassVar[Clipping] = "coordinate"
    local_steps: ClassVar[int] = 1
    dimension: int
    clip_value: float
    batch: int
    records: int
    participations: int
    scale: float
    delta: float
    unit: Unit = "record"

    active = property(lambda self: self.dimension)
    width = property(lambda self: self.scale * self.dimension * self.clip_value, doc="The noise's scale on the sum.")
    sigma = property(lambda self: math.sqrt(2) * self.width / self.batch)
    noise_multiplier = property(lambda self: self.sigma * self.batch / self.clip_norm)

    def summary(self) -> Mapping[str, Any]:
        return {"laplace_scale": self.scale}


def check(config: Mapping[str, Any]) -> None:
    if config["privacy.noise_multiplier"] is None or config["privacy.sampling"] != "fixed":
        raise ValueError("laplace takes privacy.noise_multiplier, and batches of a fixed size")


LAPLACE = Mechanism(
    "laplace", LaplacePlan, check, lambda it: make_plan(LaplacePlan, it, scale=it.options["privacy.noise_multiplier"])
)


def noise(count: int, plan: LaplacePlan, stream: Stream) -> np.ndarray:
    uniform = stream.uniform(count) - 0.5
    return np.asarray(-np.sign(uniform) * np.log1p(-2 * np.abs(uniform)) * plan.width)


def respond(theta: torch.Tensor, terms: Terms, agents: Sequence[Agent], engine: Any) -> Iterator[Update]:
    plan: Any = terms.plan
    for agent in agents:
        sampling, private, forward = (Stream(derive_key(agent.key, each)) for each in ("sampling", "noise", "forward"))
        chosen = draw_batch("fixed", plan.batch, 0.0, agent.records, sampling)
        x, y = agent.take(torch.from_numpy(chosen))
        blocks = engine.rows(theta, seeded(x, engine, chosen, agent.records, forward), y, None)
        total = torch.cat([clip_rows(rows, plan.clip, plan.clip_value) for rows in blocks]).double().sum(dim=0)
        values = -terms.local_lr * (total.numpy() + noise(plan.dimension, plan, private)) / plan.batch
        yield Update(terms.round, terms.dimension, terms.mask_seed or agent.mask_seed, values.astype(np.float32))


ALGORITHM = Algorithm(respond, LAPLACE, audit="toy_audit:AUDIT")
