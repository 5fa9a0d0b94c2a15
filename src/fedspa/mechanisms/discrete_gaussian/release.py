"""An agent's share of a sum: its clipped gradients, added up, at a point of the grid, and noise around that point.

From an example's clipped gradient on, everything is a whole number: the sum, the point of the grid, chosen at random
between the two nearest so that the mean is the value itself, and the draw around it. Floating point has no say in what
leaves, and the distances of docs/shares.md are distances of integers.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedspa.mechanisms.base import CLIP_UNITS
from fedspa.mechanisms.clipping import clip_rows
from fedspa.mechanisms.discrete_gaussian.event import FINE
from fedspa.mechanisms.discrete_gaussian.noise import discrete_gaussian
from fedspa.mechanisms.discrete_gaussian.plan import DiscreteGaussianPlan
from fedspa.mechanisms.gaussian.exact import integer_sum
from fedspa.mechanisms.gaussian.grid import Grid
from fedspa.randomness.streams import Stream

Integers = NDArray[np.int64]


def summed(rows: Iterable[Tensor], plan: DiscreteGaussianPlan) -> Integers:
    """The sum of the examples' clipped gradients, cut to the mask already, with `CLIP_UNITS` to the clip value."""
    grid = Grid("l2", plan.clip_value / CLIP_UNITS, 0, CLIP_UNITS, CLIP_UNITS**2)
    total = torch.zeros(plan.active, dtype=torch.int64)
    for block in rows:
        total += integer_sum(clip_rows(block, "l2", plan.clip_value), grid).cpu()
    return total.numpy()


def share(total: Integers, plan: DiscreteGaussianPlan, rounding: Stream, noise: Stream) -> Integers:
    """What may leave, masked, of a sum in which each example measures up to `CLIP_UNITS`."""
    return discrete_gaussian(placed(total, plan, rounding), noise)


def placed(total: Integers, plan: DiscreteGaussianPlan, rounding: Stream) -> Integers:
    """The sum on the grid: within the plan's reach, which moves no two apart, and rounded up or down at random."""
    inside = np.clip(total, -plan.reach, plan.reach)
    points: Integers = (inside * plan.bound + rounding.integers_below(len(inside), CLIP_UNITS)) // CLIP_UNITS
    return points


def mean_gradient(total: Integers, members: int, plan: DiscreteGaussianPlan) -> NDArray[np.float64]:
    """The server's unbiased estimate of the mean gradient over a cohort's records, from the sum of its shares."""
    return total.astype(np.float64) * (plan.clip_value / plan.bound * FINE / (members * plan.batch))
