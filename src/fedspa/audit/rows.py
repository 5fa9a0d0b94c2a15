"""Gradients that are hard on a clip: pairs of neighbours for any mechanism."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from fedspa.mechanisms import Plan

HUGE = 1e30


def worst_row(plan: Plan, generator: torch.Generator) -> Tensor:
    """A gradient on the bound: ±c in every coordinate, or norm C."""
    signs = torch.randint(0, 2, (plan.active,), generator=generator) * 2.0 - 1
    return signs * (plan.clip_value if plan.clip == "coordinate" else plan.clip_value / math.sqrt(plan.active))


def row_pairs(plan: Plan, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """(an example, what replaces it): on the bound and against each other, beyond it, broken, random."""
    k, worst = plan.active, worst_row(plan, generator)
    axis = torch.zeros(k)
    axis[int(torch.randint(k, (1,), generator=generator))] = plan.clip_norm
    yield worst, -worst
    # Just within the bound against far beyond it: a private clip counts the first and not the second.
    yield (1 - 2e-7) * worst, -HUGE * worst
    yield HUGE * worst, -HUGE * worst
    yield axis, -axis
    yield HUGE * torch.randn(k, generator=generator), -worst
    yield torch.randn(k, generator=generator) * plan.clip_value, torch.randn(k, generator=generator)
    yield torch.full((k,), torch.finfo(torch.float32).max), torch.full((k,), math.nan)
    yield torch.where(torch.arange(k) == k - 1, math.inf, worst), worst
    yield torch.where(torch.arange(k) == 0, math.inf, worst), -worst
