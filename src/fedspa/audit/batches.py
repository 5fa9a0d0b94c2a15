"""The sampler against what accountants assume of it: batch sizes, each record's share, steps that start afresh."""

from __future__ import annotations

import math
from itertools import islice

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from fedspa.audit.result import Check
from fedspa.audit.setting import Setting
from fedspa.audit.target import Target
from fedspa.privacy.binomial_plan import AnyPlan

MOST_INDICATORS = 4_000_000


def sampler_checks(setting: Setting, target: Target, alpha: float) -> list[Check]:
    """Three questions, each at chance `alpha`."""
    plan = setting.plan
    steps = 2 * max(50, min(setting.draws, MOST_INDICATORS // (2 * plan.records)))
    chosen = np.zeros((steps, plan.records), dtype=np.int64)
    for row, indices in zip(chosen, islice(target.batches(plan, setting.stream("batches")), steps)):
        row[indices] = 1
    both = int((chosen[0::2] & chosen[1::2]).sum())
    return [
        sizes_check("sampler: batch sizes", plan, chosen.sum(axis=1), 1, alpha),
        shares_check("sampler: records", plan, chosen.sum(axis=0), steps, alpha),
        overlap_check("sampler: steps", plan, both, steps // 2, alpha),
    ]


def sizes_check(name: str, plan: AnyPlan, sizes: NDArray[np.int64], steps: int, alpha: float) -> Check:
    """Sizes (each a total over `steps` steps): Binomial(m, q) by χ² for Poisson; exactly B for fixed."""
    if plan.sampling == "fixed":
        off = int((sizes != steps * plan.batch).sum())
        return Check(name, "count", 0.0, float(off), 1.0, off == 0, f"batches of another size than B, of {len(sizes)}")
    law = stats.binom(steps * plan.records, plan.event.rate)
    # Cells of about equal mass, at least ten expected in each.
    cells = max(2, min(20, len(sizes) // 10))
    edges = np.unique(law.ppf(np.arange(1, cells) / cells))
    expected = len(sizes) * np.diff(np.concatenate([[0.0], law.cdf(edges), [1.0]]))
    observed = np.bincount(np.searchsorted(edges, sizes), minlength=len(edges) + 1)
    keep = expected > 0
    statistic = float(((observed - expected)[keep] ** 2 / expected[keep]).sum())
    allowed = float(stats.chi2.isf(alpha, max(1, int(keep.sum()) - 1)))
    detail = f"χ² against Binomial(m, q); mean size {sizes.mean() / steps:.3g}, variance {sizes.var() / steps:.3g}"
    return Check(name, "deviation", allowed, statistic, 1 - alpha, statistic <= allowed, detail)


def shares_check(name: str, plan: AnyPlan, counts: NDArray[np.int64], steps: int, alpha: float) -> Check:
    """How often each record was drawn: Binomial(steps, q) under either sampling. The most and the least often drawn."""
    law = stats.binom(steps, plan.event.rate)
    chance = 2 * plan.records * min(float(law.sf(counts.max() - 1)), float(law.cdf(counts.min())))
    return _unlikely(name, chance, alpha, f"most drawn {counts.max()}, least {counts.min()} times in {steps} steps")


def overlap_check(name: str, plan: AnyPlan, both: int, pairs: int, alpha: float) -> Check:
    """Records drawn in both of two successive steps, over disjoint pairs of steps: a share q² if steps are fresh."""
    q, m = plan.event.rate, plan.records
    expected = pairs * m * q * q
    if plan.sampling == "poisson":
        law = stats.binom(pairs * m, q * q)
        chance = 2 * min(float(law.cdf(both)), float(law.sf(both - 1)))
    else:
        # A pair's overlap is hypergeometric; over many pairs the sum is normal.
        deviation = math.sqrt(pairs * float(stats.hypergeom(m, plan.batch, plan.batch).var()))
        chance = 2 * float(stats.norm.sf(abs(both - expected) / deviation)) if deviation > 0 else 1.0
    return _unlikely(name, chance, alpha, f"drawn twice in a row: {both}, expected {expected:.0f}")


def _unlikely(name: str, chance: float, alpha: float, detail: str) -> Check:
    """A p-value as −log₁₀, so that more is worse."""
    surprise = -math.log10(max(chance, 1e-300))
    allowed = -math.log10(alpha)
    holds = surprise <= allowed
    return Check(name, "deviation", allowed, max(0.0, surprise), 1 - alpha, holds, f"{detail}; −log₁₀ of its chance")
