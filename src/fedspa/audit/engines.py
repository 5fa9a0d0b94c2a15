"""Engines with one mistake each, in what they clip and add up by themselves. They are never used to train."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from fedspa.audit.probe import MakeEngine
from fedspa.audit.setting import Setting
from fedspa.engine.local import CLIP_UNITS, ClippedSums
from fedspa.engine.task import Engine, LocalResult, LocalTask
from fedspa.errors import ConfigError
from fedspa.mechanisms.base import Clipping


class ClippingEngine(Engine, ClippedSums, Protocol):
    """An engine that clips by itself."""


@dataclass(frozen=True, slots=True)
class Longer:
    """An engine that adds up examples of up to twice the bound, in units of the right one."""

    engine: ClippingEngine
    name: str = "longer"
    separates_records: bool = False
    threads: int = 1

    def train(self, theta: Tensor, tasks: Sequence[LocalTask]) -> list[LocalResult]:
        return self.engine.train(theta, tasks)

    def clipped_sum(
        self, theta: Tensor, x: Tensor, y: Tensor, clip: Clipping, clip_value: float, *places: Tensor | None
    ) -> tuple[Tensor, int]:
        total, zeroed = self.engine.clipped_sum(theta, x, y, clip, 2 * clip_value, *places)
        return 2 * total, zeroed


class Overlooks(Longer):
    """An engine whose clip does not see the last two coordinates: their sizes, or their part in a norm."""

    def clipped_sum(
        self, theta: Tensor, x: Tensor, y: Tensor, clip: Clipping, clip_value: float, *places: Tensor | None
    ) -> tuple[Tensor, int]:
        total, zeroed = self.engine.clipped_sum(theta, x, y, clip, clip_value)
        if clip == "coordinate":
            total[-2:] = 1000 * self.engine.clipped_sum(theta, x, y, clip, 1000 * clip_value)[0][-2:]
            return total, zeroed
        rows = torch.stack(
            [self.engine.clipped_sum(theta, *one, clip, clip_value)[0] for one in zip(x[:, None], y[:, None])]
        )
        norms, counted = (part.double().norm(dim=1).clamp(min=1) for part in (rows, rows[:, :-2]))
        factors = torch.where(norms > 0.999 * CLIP_UNITS, CLIP_UNITS / counted, 1.0)
        return (rows * factors[:, None]).long().sum(dim=0), zeroed


def engine_with(broken: type[Longer]) -> MakeEngine:
    """The engine of a run, with that mistake."""

    def make_engine(setting: Setting, module: nn.Module, input_shape: tuple[int, ...]) -> Engine:
        engine = setting.make_engine(module, input_shape)
        if not isinstance(engine, ClippedSums):
            raise ConfigError(
                f"--plant engine-clip and engine-norm break an engine that clips by itself; {engine.name!r} does not: "
                "use --plant clip"
            )
        return broken(engine)

    return make_engine
