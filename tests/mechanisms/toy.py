"""A third mechanism, whole, from outside the package: Laplace noise on the sum of a batch's clipped gradients.

One record moves the sum of d coordinates within ±c by at most 2·d·c in L1 (replace-one), so noise of scale s·d·c makes
a release (2/s, 0)-DP, and a batch of B of m records amplifies that (Balle, Barthe, Gaboardi 2018, Theorem 9).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from fedspa.algorithms import Agent, Algorithm, Terms
from fedspa.audit.result import Question
from fedspa.audit.run import Audited, Setting
from fedspa.audit.statistics import epsilon_lower, law_question, threshold_attack
from fedspa.engine.local import Gradients, seeded
from fedspa.engine.task import Engine
from fedspa.errors import PrivacyError
from fedspa.mechanisms.base import Aggregation, Asked, Clipping, ClipRule, Mechanism
from fedspa.mechanisms.clipping import clip_rows
from fedspa.privacy.event import Event, Neighbours, NoiseMode, Sampling, Step, Unit
from fedspa.randomness.sampling import draw_batch
from fedspa.randomness.streams import Stream, derive_key
from fedspa.wire.payload import Update


@dataclass(frozen=True, slots=True)
class LaplaceEvent(Event):
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

    @property
    def sampling(self) -> Sampling:
        return "fixed"

    def to_json(self) -> str:
        return self._canonical("laplace")

    def accountant(self, neighbours: Neighbours) -> str:
        if neighbours != "replace-one":
            raise PrivacyError("Laplace noise is priced under replace-one only")
        return "laplace"

    @property
    def step(self) -> Step | None:
        return None

    def step_epsilon(self, delta: float) -> float:
        return math.log1p(self.rate * math.expm1(2 / self.scale)) * (1 + 1e-12)


@dataclass(frozen=True, slots=True)
class LaplacePlan:
    aggregation: ClassVar[Aggregation | None] = None
    floor_event: ClassVar[Event | None] = None
    sampling: ClassVar[Sampling] = "fixed"
    neighbours: ClassVar[Neighbours] = "replace-one"
    clip: ClassVar[Clipping] = "coordinate"
    clip_rule: ClassVar[ClipRule] = "given"
    compression: ClassVar[float] = 1.0
    clip_growth: ClassVar[float] = 1.0
    local_steps: ClassVar[int] = 1

    dimension: int
    clip_value: float
    batch: int
    records: int
    participations: int
    scale: float
    delta: float
    unit: Unit = "record"

    @property
    def active(self) -> int:
        return self.dimension

    @property
    def clip_norm(self) -> float:
        return math.sqrt(self.dimension) * self.clip_value

    @property
    def width(self) -> float:
        """The noise's scale on the sum."""
        return self.scale * self.dimension * self.clip_value

    @property
    def sigma(self) -> float:
        return math.sqrt(2) * self.width / self.batch

    @property
    def noise_multiplier(self) -> float:
        return self.sigma * self.batch / self.clip_norm

    @property
    def event(self) -> LaplaceEvent:
        return LaplaceEvent(self.batch, self.records, 1, self.scale, unit=self.unit)

    def with_clip_value(self, clip_value: float) -> LaplacePlan:
        return replace(self, clip_value=clip_value)

    def update_noise(self, local_lr: float, scale: float) -> float:
        return local_lr * self.sigma

    def update_bound(self, local_lr: float, scale: float) -> float:
        return local_lr * (self.clip_value + 60 * self.width / self.batch)

    def require_sendable(self, *, exact: bool) -> None:
        if exact:
            raise PrivacyError("Laplace noise has no exact mode")

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


def of_event(event: Event, asked: Asked) -> LaplacePlan:
    assert isinstance(event, LaplaceEvent)
    steps = event.batch, event.records, asked.participations
    return LaplacePlan(asked.dimension, asked.clip_value, *steps, event.scale, asked.delta, event.unit)


def of_record(values: Mapping[str, Any]) -> LaplacePlan:
    return LaplacePlan(**{key: values[key] for key in ("dimension", "batch", *RECORD)})


RECORD = {
    "clip_value": float,
    "records": int,
    "participations": int,
    "scale": float,
    "delta": float,
    "unit": str,
}
LAPLACE = Mechanism(
    name="laplace",
    events={"laplace": LaplaceEvent},
    check=check,
    accountant=lambda config: "laplace",
    calibrated=calibrated,
    of_event=of_event,
    record=RECORD,
    of_record=of_record,
    limits={"scale": (1e-3, 1e6)},
)


def noise(count: int, plan: LaplacePlan, stream: Stream) -> NDArray[np.float64]:
    uniform = stream.uniform(count) - 0.5
    return np.asarray(-np.sign(uniform) * np.log1p(-2 * np.abs(uniform)) * plan.width)


def respond(theta: Tensor, terms: Terms, agents: Sequence[Agent], engine: Engine) -> Iterator[Update]:
    plan = terms.plan
    assert isinstance(plan, LaplacePlan)
    assert isinstance(engine, Gradients)
    for agent in agents:
        sampling, private, forward = (
            Stream(derive_key(agent.key, label)) for label in ("sampling", "noise", "forward")
        )
        chosen = draw_batch("fixed", plan.batch, 0.0, agent.records, sampling)
        x, y = agent.take(torch.from_numpy(chosen))
        x = seeded(x, engine, chosen, agent.records, forward)
        total = torch.zeros(plan.dimension, dtype=torch.float64)
        for rows in engine.rows(theta, x, y, None):
            total += clip_rows(rows, plan.clip, plan.clip_value).sum(dim=0, dtype=torch.float64)
        mean = (total.numpy() + noise(plan.dimension, plan, private)) / plan.batch
        values = (-terms.local_lr * mean).astype(np.float32)
        yield Update(terms.round, terms.dimension, terms.mask_seed or agent.mask_seed, values)


ALGORITHM = Algorithm(respond, LAPLACE, audit="toy:AUDIT")


@dataclass(frozen=True)
class Target:
    """A plan of one coordinate, whose noise is `share` of what it should be."""

    plan: LaplacePlan
    share: float = 1.0

    def releases(self, total: float, setting: Setting, label: str, draws: int) -> NDArray[np.float64]:
        return np.asarray(total + self.share * noise(draws, self.plan, setting.stream("laplace", label)))


def questions(setting: Setting, target: Target) -> Iterator[Question]:
    plan = target.plan
    silent = target.releases(0.0, setting, "silent", 16 * setting.draws)
    yield law_question("laplace: law", stats.laplace(scale=plan.width), [silent], "")
    # Two neighbours at either end of the bound: what one record of a batch without sampling can do.
    ends = plan.dimension * plan.clip_value
    sides = [target.releases(sign * ends, setting, f"end {sign}", setting.draws) for sign in (1, -1)]
    yield threshold_attack(
        "laplace: ε", "epsilon", 2 / plan.scale, sides, 1.0, partial(epsilon_lower, 0.0), "threshold"
    )


AUDIT = Audited(
    name="laplace",
    choices={},
    synthetic=lambda: Target(LaplacePlan(1, 1.0, 10, 100, 3, 2.0, 1e-3)),
    of_plan=lambda plan: Target(replace(plan, dimension=1)),
    questions=questions,
    faults={"noise": lambda target: replace(target, share=0.4)},
)
