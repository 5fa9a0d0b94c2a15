"""What an agent makes of its noisy gradients: plain steps, a heavy ball, or Adam (Kingma and Ba 2015), as torch.optim.

A gradient carries its noise when it comes here, so that whatever is made of it is post-processing and costs no ε. State
is fresh in each participation, and of the active coordinates alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedspa.mechanisms.base import Plan

OptimizerName = Literal["sgd", "momentum", "adam"]


@dataclass(frozen=True, slots=True)
class LocalOptimizer:
    """`beta1` is of momentum and Adam, `beta2` and `kappa` (torch's eps) are of Adam."""

    name: OptimizerName = "sgd"
    beta1: float = 0.9
    beta2: float = 0.999
    kappa: float = 1e-8

    def start(self) -> Callable[[Tensor], Tensor]:
        """Return a function from each step's noisy gradient to the direction that the rate is multiplied with."""
        if self.name == "sgd":
            return lambda gradient: gradient
        return self._momentum() if self.name == "momentum" else self._adam()

    def update_noise(self, plan: Plan, local_lr: float, scale: float) -> float:
        """Return the standard deviation of the noise in each value of Δ. Adam's steps are as long as the rate whatever
        the noise is: there it is that of τ independent ones, which only decides how finely values are coded."""
        if self.name == "adam":
            return local_lr * scale * math.sqrt(plan.local_steps)
        noise = plan.update_noise(local_lr, scale)
        return noise if self.name == "sgd" else noise * _momentum_gain(self.beta1, plan.local_steps)

    def update_bound(self, plan: Plan, local_lr: float, scale: float) -> float:
        """Return the largest plausible value of Δ: an honest agent's does not exceed it."""
        if self.name == "adam":  # and the rounding of its coding, which is a part of the noise
            longest = local_lr * scale * plan.local_steps * _longest_step(self.beta1, self.beta2, plan.local_steps)
            return longest + self.update_noise(plan, local_lr, scale)
        bound = plan.update_bound(local_lr, scale)
        return bound if self.name == "sgd" else bound / (1 - self.beta1)

    def _momentum(self) -> Callable[[Tensor], Tensor]:
        ball: Tensor | None = None

        def direction(gradient: Tensor) -> Tensor:
            nonlocal ball
            ball = gradient if ball is None else self.beta1 * ball + gradient
            return ball

        return direction

    def _adam(self) -> Callable[[Tensor], Tensor]:
        steps, first, second = 0, torch.zeros(()), torch.zeros(())

        def direction(gradient: Tensor) -> Tensor:
            nonlocal steps, first, second
            steps += 1
            first = self.beta1 * first.to(gradient) + (1 - self.beta1) * gradient
            second = self.beta2 * second.to(gradient) + (1 - self.beta2) * gradient**2
            mean, square = first / (1 - self.beta1**steps), second / (1 - self.beta2**steps)
            return mean / (square.sqrt() + self.kappa)

        return direction


SGD = LocalOptimizer()


@lru_cache(maxsize=64)
def _momentum_gain(beta: float, steps: int) -> float:
    """Return how many times the noise of τ plain steps a heavy ball's is: the gradient of step s enters the last τ − s
    steps, each time less."""
    ages = np.arange(1, steps + 1)
    return float(np.sqrt(np.mean(((1 - beta**ages) / (1 - beta)) ** 2)))


@lru_cache(maxsize=64)
def _longest_step(beta1: float, beta2: float, steps: int) -> float:
    """Return the largest direction that Adam can take within τ steps, whatever the gradients: by Cauchy and Schwarz, of
    the weights that mean and square give to each step."""
    ages = np.arange(1, steps + 1)
    ratio = beta1**2 / beta2
    sums = ages.astype(float) if ratio == 1 else (1 - ratio**ages) / (1 - ratio)
    mean, square = (1 - beta1) / (1 - beta1**ages), (1 - beta2) / (1 - beta2**ages)
    return float(np.sqrt(np.max(mean**2 / square * sums)))
