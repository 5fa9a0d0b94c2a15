"""Records and models made to break an engine's bound, and what one record adds to a step.

The record is swapped for one that counts as zero (a NaN), under the same noise: the difference of the two updates over
the step size is the record's clipped gradient, nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from unittest.mock import patch

import torch
from torch import Tensor, nn

from fedspa.engine.local import LocalTask
from fedspa.mechanisms.gaussian.plan import GaussianPlan

Train = Callable[[LocalTask], Tensor]


def contribution(train: Train, theta: Tensor, x: Tensor, clip_value: float, mask: Tensor | None = None) -> float:
    """The norm of what the one record x adds to the sum of a step from θ, over the clip value (l2)."""
    d = len(theta)
    k = d if mask is None else len(mask)
    # A step so long that θ's rounding is nothing beside it.
    step = 2.0**24 * max(float(theta.abs().max()), 1.0) / clip_value
    deltas = []
    # GaussianPlan refuses the smallest of these clips; the engine must hold them all the same.
    with patch("fedspa.mechanisms.base.SMALLEST_CLIP", 0.0):
        plan = GaussianPlan(d, k, "l2", clip_value, "fixed", 1, 1, 1, 1, 1e-9, "replace-one", 1e-3)
        for record in (x, torch.full_like(x, math.nan)):
            task = LocalTask(record, torch.zeros(1, dtype=torch.int64), mask, 1.0, step, plan, bytes(32))
            deltas.append(train(task).double())
    return float((deltas[0] - deltas[1]).norm()) / step / clip_value


def all_but_sure(gap: float) -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    """Model, θ, record, mask: so sure of the label that derivatives are e^-gap (3e-20 at 45, 9e-27 at 60)."""
    theta = torch.zeros(10)
    theta[8] = gap
    mask = torch.tensor([4, 5, 6, 7, 9])  # the other class: 1 - p of the label itself rounds to 0
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), theta, torch.ones(1, 1, 2, 2), mask


def cancelling(side: int, kernel: int, channels: int, size: float, seed: int) -> tuple[nn.Module, Tensor, Tensor, int]:
    """A convolution's gradient of large terms whose sum is all rounding: model, θ, record, how many weights it has."""
    generator = torch.Generator().manual_seed(seed)
    units = (side - kernel + 1) ** 2
    module = nn.Sequential(
        nn.Conv2d(1, channels, kernel, bias=False), nn.Flatten(), nn.Linear(channels * units, 2, bias=False)
    )
    weights = channels * kernel**2
    head = torch.randn(2, channels * units, generator=generator)
    # No convolution weight: logits 0, derivatives half the difference of the head's rows whatever the data.
    theta = torch.cat([torch.zeros(weights), head.flatten()])
    slopes = (head[0] - head[1]).double().view(channels, side - kernel + 1, side - kernel + 1)
    # The record is made orthogonal to every window's slopes: the gradient in exact arithmetic is 0.
    placed = [
        nn.functional.pad(slopes[c], (j, kernel - 1 - j, i, kernel - 1 - i)).flatten()
        for c in range(channels)
        for i in range(kernel)
        for j in range(kernel)
    ]
    x = size * torch.randn(side * side, dtype=torch.float64, generator=generator)
    if side * side > weights:
        basis = torch.linalg.qr(torch.stack(placed, 1)).Q
        x = x - basis @ (basis.T @ x)
    return module, theta, x.float().view(1, 1, side, side), weights
