"""The server's step: from the mean update of a round to the next θ. Chosen by name.

`adam` is the paper's (Algorithm 1, lines 13–15), as printed: v is fed with u² (not with Δ²), v₋₁ = κ², no bias
correction. `average` is FedAvg's θ + η·mean Δ, `momentum` the same with a heavy ball. Any of them can be followed by an
exponential average of the iterates: agents train from θ, the model that is evaluated and kept is the average. It
smooths noise, and is post-processing: free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Self

import torch
from torch import Tensor

from fedspa.algorithms.base import ServerStep

Decay = Literal["none", "sqrt"]


def decayed(rate: float, decay: Decay, round_number: int) -> float:
    """η_t = η/√(t+1) for `sqrt` (the paper's 1/√t, counted from 1), η for `none`."""
    return rate / (round_number + 1) ** 0.5 if decay == "sqrt" else rate


@dataclass(frozen=True, slots=True)
class ServerOptimizer:
    """How the server moves θ. `server_lr` is η_g; `ema` is the average's memory, 0 for none."""

    step: ServerStep
    server_lr: float
    beta1: float
    beta2: float
    kappa: float
    lr_decay: Decay
    ema: float = 0.0

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
        rate = decayed(self.server_lr, self.lr_decay, state.round)
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
        """The state whose `tensors` these are: what was saved, back again."""
        return cls(tensors["theta"], round_number, {name: each for name, each in tensors.items() if name != "theta"})

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All of them by name, of θ's length each: what a checkpoint keeps, whatever a step came to need."""
        return {"theta": self.theta, **self.moments}

    @property
    def model(self) -> Tensor:
        """What is evaluated and kept: the average of the iterates where there is one, else θ."""
        return self.moments.get("average", self.theta)
