"""The server's step: from the mean update of a round to the next θ. Chosen by name.

`adam` is the paper's (Algorithm 1, lines 13–15), as printed: v is fed with u² (not with Δ²), v₋₁ = κ², no bias
correction. `average` is FedAvg's θ + η·mean Δ, `momentum` the same with a heavy ball. Any of them can be followed by an
exponential average of the iterates: agents train from θ, the model that is evaluated and kept is the average. It
smooths noise, and is post-processing: free.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Self

import torch
from torch import Tensor

from fedspa.algorithms.base import ServerStep

ScheduleName = Literal["constant", "sqrt", "linear", "cosine"]


@dataclass(frozen=True, slots=True)
class Schedule:
    """How the rates of agents and server depend on the round, counted from 0: up in a line for `warmup` rounds, then as
    the name says until all `rounds` are over. `sqrt` is the paper's 1/√t, counted from 1."""

    name: ScheduleName = "constant"
    warmup: int = 0
    rounds: int = 1

    def rate(self, first: float, round_number: int) -> float:
        """Return the rate of a round, where `first` is what the config says."""
        if round_number < self.warmup:
            return first * (round_number + 1) / (self.warmup + 1)
        after = round_number - self.warmup
        share = after / max(1, self.rounds - self.warmup)
        if self.name == "sqrt":
            return float(first / (after + 1) ** 0.5)
        if self.name == "linear":
            return first * (1 - share)
        return first * (1 + math.cos(math.pi * share)) / 2 if self.name == "cosine" else first


@dataclass(frozen=True, slots=True)
class ServerOptimizer:
    """How the server moves θ. `server_lr` is η_g; `ema` is the average's memory, 0 for none."""

    step: ServerStep
    server_lr: float
    beta1: float
    beta2: float
    kappa: float
    ema: float = 0.0
    schedule: Schedule = Schedule()

    def start(self, theta: Tensor) -> ServerState:
        """u₋₁ = 0, v₋₁ = κ² (only what the chosen step needs)."""
        moments: dict[str, Tensor] = {}
        if self.step in ("adam", "momentum"):
            moments["u"] = torch.zeros_like(theta)
        if self.step == "adam":
            moments["v"] = torch.full_like(theta, self.kappa**2)
        if self.ema > 0:
            moments["average"] = theta.clone()
        return ServerState(theta, 0, moments)

    def apply(self, state: ServerState, mean_update: Tensor) -> ServerState:
        """θ_{t+1} from θ_t and the mean of the round's updates."""
        moved = self._moved(state, mean_update)
        if self.ema > 0:
            moved.moments["average"] = self.ema * state.moments["average"] + (1 - self.ema) * moved.theta
        return moved

    def _moved(self, state: ServerState, mean_update: Tensor) -> ServerState:
        rate = self.schedule.rate(self.server_lr, state.round)
        theta, moments = state.theta, state.moments
        if self.step == "average":
            return ServerState(theta + rate * mean_update, state.round + 1, {})
        if self.step == "momentum":
            u = self.beta1 * moments["u"] + mean_update
            return ServerState(theta + rate * u, state.round + 1, {"u": u})
        u = self.beta1 * moments["u"] + (1 - self.beta1) * mean_update  # line 13
        v = self.beta2 * moments["v"] + (1 - self.beta2) * u**2  # line 14
        theta = theta + rate * u / (v.sqrt() + self.kappa)  # line 15
        return ServerState(theta, state.round + 1, {"u": u, "v": v})


@dataclass(frozen=True, slots=True)
class ServerState:
    """All that the server carries from round to round."""

    theta: Tensor
    round: int
    moments: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, Tensor], round_number: int) -> Self:
        """Return the state whose `tensors` these are: what was saved, back again."""
        return cls(tensors["theta"], round_number, {name: each for name, each in tensors.items() if name != "theta"})

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name, each of θ's length: the content of a checkpoint."""
        return {"theta": self.theta, **self.moments}

    @property
    def model(self) -> Tensor:
        """The parameters that are evaluated and kept: the average of the iterates where there is one, else θ."""
        return self.moments.get("average", self.theta)
