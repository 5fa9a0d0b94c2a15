"""A mechanism and its algorithm from outside the package: Laplace noise on the sum of a batch's clipped gradients.

One record moves the sum of d coordinates within ±c by at most 2·d·c in L1 (replace-one), so noise of scale s·d·c makes
a release (2/s, 0)-DP, and a batch of B of m records amplifies that (Balle, Barthe, Gaboardi 2018, Theorem 9).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedspa.algorithms import Agent, Algorithm, Terms
from fedspa.engine.local import Gradients, seeded
from fedspa.engine.task import Engine
from fedspa.errors import PrivacyError
from fedspa.mechanisms.base import Asked, Clipping, Mechanism, PlanDefaults
from fedspa.mechanisms.clipping import clip_rows
from fedspa.privacy.event import Event, Neighbours, NoiseMode, Sampling, Unit
from fedspa.randomness.sampling import draw_batch
from fedspa.randomness.streams import Stream, derive_key
from fedspa.wire.payload import Update


@dataclass(frozen=True, slots=True)
class LaplaceEvent(Event):
    """What a participation does, and its cost."""

    sampling: ClassVar[Sampling] = "fixed"
    step: ClassVar[None] = None

    batch: int
    records: int
    steps: int
    scale: float
    noise: NoiseMode | None = None
    unit: Unit = "record"

    def __post_init__(self) -> None:
        self._make_whole("batch", "records", "steps")
        self._check_sampled()
        if not 1e-3 <= self.scale <= 1e6:
            raise PrivacyError(f"scale is {self.scale}; it must lie between 1e-3 and 1e6")

    def to_json(self) -> str:
        return self._canonical("laplace")

    def accountant(self, neighbours: Neighbours) -> str:
        if neighbours != "replace-one":
            raise PrivacyError("Laplace noise has a cost under replace-one only")
        return "laplace"

    def step_epsilon(self, delta: float) -> float:
        return math.log1p(self.rate * math.expm1(2 / self.scale)) * (1 + 1e-12)


@dataclass(frozen=True, slots=True)
class LaplacePlan(PlanDefaults):
    """The terms of every agent; its fields are what a server announces."""

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
    event = property(lambda self: LaplaceEvent(self.batch, self.records, 1, self.scale, unit=self.unit))

    def update_noise(self, local_lr: float, scale: float) -> float:
        return float(local_lr * self.sigma)

    def update_bound(self, local_lr: float, scale: float) -> float:
        return float(local_lr * (self.clip_value + 60 * self.width / self.batch))

    def summary(self) -> Mapping[str, Any]:
        return {"laplace_scale": self.scale}

    def report_rows(self) -> list[tuple[str, str, str]]:
        return [("s", f"{self.scale:.4g}", "Laplace noise over the L1 bound of an example")]


def check(config: Mapping[str, Any]) -> None:
    if config["privacy.noise_multiplier"] is None or config["privacy.sampling"] != "fixed":
        raise ValueError("laplace takes privacy.noise_multiplier, and batches of a fixed size")


def calibrated(asked: Asked) -> LaplacePlan:
    scale = asked.options["privacy.noise_multiplier"]
    return of_event(LaplaceEvent(asked.batch, asked.records, 1, scale, unit=asked.unit), asked)


def of_event(event: Any, asked: Asked) -> LaplacePlan:
    steps = event.batch, event.records, asked.participations
    return LaplacePlan(asked.dimension, asked.clip_value, *steps, event.scale, asked.delta, event.unit)


LAPLACE = Mechanism(
    "laplace", {"laplace": LaplaceEvent}, check, calibrated, of_event, LaplacePlan, {"scale": (1e-3, 1e6)},
    accountant=lambda config: "laplace",
)  # fmt: skip


def noise(count: int, plan: LaplacePlan, stream: Stream) -> NDArray[np.float64]:
    uniform = stream.uniform(count) - 0.5
    return np.asarray(-np.sign(uniform) * np.log1p(-2 * np.abs(uniform)) * plan.width)


def respond(theta: Tensor, terms: Terms, agents: Sequence[Agent], engine: Engine) -> Iterator[Update]:
    """The algorithm: one step of every agent."""
    plan: Any = terms.plan
    assert isinstance(engine, Gradients)
    for agent in agents:
        sampling, private, forward = (Stream(derive_key(agent.key, each)) for each in ("sampling", "noise", "forward"))
        chosen = draw_batch("fixed", plan.batch, 0.0, agent.records, sampling)
        x, y = agent.take(torch.from_numpy(chosen))
        total = torch.zeros(plan.dimension, dtype=torch.float64)
        for rows in engine.rows(theta, seeded(x, engine, chosen, agent.records, forward), y, None):
            total += clip_rows(rows, plan.clip, plan.clip_value).sum(dim=0, dtype=torch.float64)
        values = -terms.local_lr * (total.numpy() + noise(plan.dimension, plan, private)) / plan.batch
        yield Update(terms.round, terms.dimension, terms.mask_seed or agent.mask_seed, values.astype(np.float32))


ALGORITHM = Algorithm(respond, LAPLACE, audit="toy_audit:AUDIT")
