"""The noise itself, read off a release of nothing: zero gradients, and batches of any size down to none.

What comes out is then pure noise and must be k independent Gaussians of the plan's σ, whatever the batch's size.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats

from fedspa.audit.bounds import cosine_limit, variance_limits
from fedspa.audit.result import UNBOUNDED, Check
from fedspa.audit.setting import Setting
from fedspa.audit.target import Target
from fedspa.privacy.plan import Plan

MOST_VALUES = 4_000_000
MOST_COORDINATES = 256


def noise_checks(setting: Setting, target: Target, alpha: float) -> list[Check]:
    """Three questions, each at chance `alpha`: the size of the noise, its law, and independence of coordinates."""
    plan = setting.plan
    sizes, draws = _draws(setting, target, plan)
    standard = draws / plan.sigma
    return [
        _size(target, plan, sizes, standard, alpha),
        _law(standard, alpha),
        _coordinates(standard, alpha),
    ]


def _draws(setting: Setting, target: Target, plan: Plan) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    count = max(8, min(setting.draws, MOST_VALUES // plan.active))
    small = plan.active * plan.batch < 1_000_000
    sizes = np.resize([0, 1, plan.batch, 3 * plan.batch] if small else [0, 1, 3, 4], count)
    stream = setting.stream("variance")
    zeros = torch.zeros(max(sizes), plan.active)
    rows = [
        target.release(iter([zeros[:size]] if size else ()), plan, stream, setting.exact)[0].numpy() for size in sizes
    ]
    return sizes, np.stack(rows)


def _size(target: Target, plan: Plan, sizes: NDArray[np.int64], standard: NDArray[np.float64], alpha: float) -> Check:
    """σ in all, for each size of the batch, and in each coordinate; two-sided, `alpha` shared among all of them.

    As a bound on μ: the least noise that was seen, at its upper confidence limit.
    """
    squares = standard**2
    groups = [squares, *(squares[sizes == size] for size in np.unique(sizes))]
    means = np.array([*(group.mean() for group in groups), *squares.mean(axis=0)])
    counts = np.array([*(group.size for group in groups), *[len(squares)] * plan.active])
    share = alpha / len(means)
    low, high = np.array([limits(int(count), share) for count in counts]).T
    claimed = target.claimed_mu(plan)
    # A mean square s of noise of variance v lies below v·low only by chance: v is at most s/low.
    most_noise = math.sqrt(float((means / low).min()))
    bound = min(UNBOUNDED, claimed / max(most_noise, 1e-300))
    holds = bool(((means >= low) & (means <= high)).all())
    return Check(
        "noise: size",
        "mu",
        claimed,
        bound,
        1 - alpha,
        holds,
        f"σ over claimed: {math.sqrt(means[0]):.4f} in all, {math.sqrt(means.min()):.4f} to "
        f"{math.sqrt(means.max()):.4f} by batch size and coordinate; {len(squares)} draws of zero gradients",
    )


@cache
def limits(count: int, alpha: float) -> tuple[float, float]:
    return variance_limits(count, alpha)


def _law(standard: NDArray[np.float64], alpha: float) -> Check:
    values = np.sort(standard.ravel())
    statistic = float(stats.kstest(values, "norm", method="asymp").statistic)
    largest = float(stats.kstwobign.isf(alpha)) / math.sqrt(values.size)
    detail = (
        f"Kolmogorov–Smirnov distance from the normal law, {values.size} values; largest {np.abs(values).max():.2f} σ"
    )
    return Check("noise: law", "deviation", largest, statistic, 1 - alpha, statistic <= largest, detail)


def _coordinates(standard: NDArray[np.float64], alpha: float) -> Check:
    """Cosines between the columns; of a large model evenly spread columns and their neighbours."""
    k = standard.shape[1]
    if k > MOST_COORDINATES:
        first = np.linspace(0, k - 2, MOST_COORDINATES // 2).astype(np.int64)
        standard = standard[:, np.unique(np.concatenate([first, first + 1]))]
    return cosines("noise: coordinates", standard.T, alpha, "pairs of coordinates")


def cosines(name: str, vectors: NDArray[np.float64], alpha: float, what: str) -> Check:
    """Whether these vectors look independent: their largest |cosine| against what chance gives."""
    units = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-300)
    above = np.triu_indices(len(units), 1)
    largest = float(np.abs((units @ units.T)[above]).max()) if len(above[0]) else 0.0
    pairs, length = max(1, len(above[0])), vectors.shape[1]
    allowed = cosine_limit(length, pairs, alpha)
    detail = f"largest |cosine| among {pairs} {what}, {length} values each"
    return Check(name, "correlation", allowed, largest, 1 - alpha, largest <= allowed, detail)


def binomial_law(name: str, numbers: NDArray[np.int64], trials: int, alpha: float) -> Check:
    """Draws [n, d] of what cpSGD releases of nothing: Binomial(m + 1, ½), in all and in each coordinate.

    By the distribution function (Dvoretzky, Kiefer & Wolfowitz; Massart 1990), `alpha` shared among all of them.
    """
    law = stats.binom(trials + 1, 0.5)
    share = alpha / (numbers.shape[1] + 1)
    worst = 0.0
    for values in (numbers.ravel(), *numbers.T):
        points, counts = np.unique(values, return_counts=True)
        reached = counts.cumsum() / len(values)
        below = np.concatenate([[0.0], reached[:-1]])
        distance = max(np.abs(reached - law.cdf(points)).max(), np.abs(below - law.cdf(points - 1)).max())
        worst = max(worst, float(distance) / math.sqrt(math.log(2 / share) / (2 * len(values))))
    detail = (
        f"distance from Binomial(m + 1, 1/2) over what chance allows, in all and by coordinate; {len(numbers)} draws"
    )
    return Check(name, "deviation", 1.0, worst, 1 - alpha, worst <= 1.0, detail)
