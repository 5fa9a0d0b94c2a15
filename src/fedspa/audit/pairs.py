"""The deterministic pair test: two neighbouring batches, the same noise on both, and the distance between the releases.

The noise cancels, so what is left is the difference of the clipped sums: without chance, and in units of the noise it
must stay within the claimed μ for *every* pair, and reach it for the worst.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from fedspa.audit.result import UNBOUNDED, Check
from fedspa.audit.setting import Setting
from fedspa.audit.target import Target
from fedspa.mechanism.clipping import CLIP_MARGIN
from fedspa.mechanism.release import CLIP_RATE
from fedspa.privacy.plan import Plan

# Rounding of float32 gradients (6e-8), and the exact path's slack of 2⁻²⁰ in both grid and noise.
TOLERANCE = 1e-6
HUGE = 1e30


def pair_check(setting: Setting, target: Target, plan: Plan) -> Check:
    """Largest distance over all pairs and variants of the plan, relative to the plan's own claim."""
    generator = torch.Generator().manual_seed(setting.seed)
    claimed = target.claimed_mu(plan)
    worst, slackest, pairs = 0.0, math.inf, 0
    for variant, on_grid in setting.variants(plan):
        reached = 0.0
        for left, right in neighbouring_batches(variant, generator):
            distance = _distance(setting, target, variant, on_grid, left, right)
            reached = max(reached, min(distance, UNBOUNDED))
            pairs += 1
        worst, slackest = max(worst, reached), min(slackest, reached)
    within = worst <= claimed * (1 + TOLERANCE)
    attained = slackest >= claimed * (1 - TOLERANCE - CLIP_MARGIN)
    detail = f"{pairs} pairs of batches, the same noise on both"
    if not attained:
        detail += f"; the worst pair of one variant reaches {slackest:.6g} only: this test has lost its reach"
    return Check(f"pair, {plan.neighbours}", "mu", claimed, worst, 1.0, within and attained, detail)


def worst_row(plan: Plan, generator: torch.Generator) -> Tensor:
    """A gradient on the bound: ±c in every coordinate, or norm C."""
    signs = torch.randint(0, 2, (plan.active,), generator=generator) * 2.0 - 1
    return signs * (plan.clip_value if plan.clip == "coordinate" else plan.clip_value / math.sqrt(plan.active))


def neighbouring_batches(plan: Plan, generator: torch.Generator) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Chunked batches that differ in one example, which comes first or last; sizes around B, and none at all."""
    k = plan.active
    # A large model's rows are megabytes each: fewer of them.
    sizes = (0, 1, plan.batch, 3 * plan.batch + 1) if k * plan.batch < 1_000_000 else (0, 1, 4)
    for size in sizes:
        for scale in (0.0, plan.clip_value, HUGE):
            others = torch.randn(size, k, generator=generator) * scale
            others[size // 2 : size // 2 + 1] = math.nan  # one broken example among the others
            for row, other in _rows(plan, generator):
                left = _with(others, row, size % 2 == 0)
                right = others if plan.neighbours == "add-remove" else _with(others, other, size % 2 == 0)
                yield _chunks(left, generator), _chunks(right, generator)


def _rows(plan: Plan, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """(an example, what replaces it)."""
    k = plan.active
    worst = worst_row(plan, generator)
    axis = torch.zeros(k)
    axis[int(torch.randint(k, (1,), generator=generator))] = plan.clip_norm
    yield worst, -worst
    # Just within the bound against far beyond it: a private clip counts the first and not the second.
    yield (1 - 2e-7) * worst, -HUGE * worst
    yield axis, -axis
    yield HUGE * torch.randn(k, generator=generator), torch.zeros(k)
    yield torch.randn(k, generator=generator) * plan.clip_value, torch.randn(k, generator=generator)
    yield torch.full((k,), torch.finfo(torch.float32).max), torch.full((k,), math.nan)
    yield torch.where(torch.arange(k) == k - 1, math.inf, worst), worst


def _with(others: Tensor, row: Tensor, last: bool) -> Tensor:
    return torch.cat([others, row[None]] if last else [row[None], others])


def _chunks(rows: Tensor, generator: torch.Generator) -> list[Tensor]:
    """The rows in blocks of a random size; now and then with an empty block among them."""
    if len(rows) == 0:
        return []
    size = int(torch.randint(1, len(rows) + 1, (1,), generator=generator))
    return [*(rows[start : start + size] for start in range(0, len(rows), size)), *([rows[:0]] if size % 2 else [])]


def _distance(
    setting: Setting, target: Target, plan: Plan, on_grid: bool, left: list[Tensor], right: list[Tensor]
) -> float:
    """Between the two releases, in standard deviations of the noise; a private clip's count is one more coordinate."""
    (mean, clip), (other_mean, other_clip) = (
        target.release(iter(batch), plan, setting.stream("pair"), on_grid) for batch in (left, right)
    )
    squared = float(((mean - other_mean) / plan.sigma).square().sum())
    if plan.clip_rule == "quantile":
        count = math.log(clip / other_clip) / CLIP_RATE * plan.batch
        squared += (count / plan.count_noise) ** 2
    return math.sqrt(squared) if math.isfinite(squared) else math.inf


def q_one(plan: Plan) -> Plan:
    """The plan with every record in every step: no amplification to hide behind."""
    return replace(plan, records=plan.batch)
