"""One private release: the noisy mean of clipped per-example gradients (Algorithm 1, the g + b of line 9).

Everything that decides privacy in a local step happens in `noisy_mean`, and nowhere else: this is the function that
the audit attacks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from fedspa.mechanism.clipping import clip_rows, share_below
from fedspa.mechanism.noise import add_noise
from fedspa.mechanism.streams import Stream
from fedspa.privacy.plan import Plan

# The quantile that a private clip steers to, and how fast (Andrew et al. 2021): a step moves log C by about RATE times
# the noisy share's distance from it. At the paper's settings that share has a standard deviation of 0.46 a step;
# RATE = 0.02 averages over some hundred steps.
CLIP_QUANTILE = 0.5
CLIP_RATE = 0.02


def noisy_mean(chunks: Iterable[Tensor], plan: Plan, noise: Stream) -> tuple[Tensor, float]:
    """Noisy mean gradient on the k active coordinates (float64), and the clip value for the next step.

    `chunks` are the sampled examples' gradients, already cut to the mask, as [b, k] blocks: any number of blocks of any
    size, none included. The sum is divided by the plan's public B, never by the number of rows.
    """
    total = torch.zeros(plan.active, dtype=torch.float64)
    centred_share = 0.0
    for rows in chunks:
        total += clip_rows(rows, plan.clip, plan.clip_value).sum(dim=0, dtype=torch.float64).cpu()
        if plan.clip_rule == "quantile":
            centred_share += float((share_below(rows, plan.clip, plan.clip_value) - 0.5).sum())
    noisy = add_noise(total, plan.gradient_noise_multiplier * plan.clip_norm, noise) / plan.batch
    if plan.clip_rule != "quantile":
        return noisy, plan.clip_value
    return noisy, _next_clip_value(centred_share, plan, noise)


def _next_clip_value(centred_share: float, plan: Plan, noise: Stream) -> float:
    """Geometric step towards the quantile, from the noisy share of examples that the bound left alone.

    Each example adds its share minus ½, a number in [−½, ½], which is the sensitivity that `count_noise` pays for.
    """
    noisy_share = 0.5 + (centred_share + plan.count_noise * float(noise.gaussian(1)[0])) / plan.batch
    return plan.clip_value * math.exp(-CLIP_RATE * (noisy_share - CLIP_QUANTILE))
