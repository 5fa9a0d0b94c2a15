"""Attacks on one release: tell which of two worst neighbours was used, and bound μ or ε from below by the error rates.

The thresholds are fixed beforehand from the claim, never from the draws, so that the bounds hold at their confidence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from fedspa.audit.bounds import epsilon_lower, mu_lower
from fedspa.audit.pairs import q_one, worst_row
from fedspa.audit.result import Check
from fedspa.audit.setting import Setting
from fedspa.audit.target import Target
from fedspa.mechanism.streams import Stream
from fedspa.privacy.plan import Plan

# Where ε is bounded: so large a δ leaves events frequent enough to be counted.
DELTA = 0.1
# More coordinates cost time and show nothing more: the attack sees one direction. Noise and pairs are tested on all k.
MOST_COORDINATES = 512


@dataclass(frozen=True, slots=True)
class Neighbours:
    """Two datasets of m gradients that differ in the first: `others` in every other place; None where it is missing."""

    first: Tensor
    first_else: Tensor | None
    others: Tensor


def worst_neighbours(plan: Plan, generator: torch.Generator) -> Neighbours:
    """The pair that attains the accountant's dominating pair.

    With fixed-size batches the others pull against the first: whenever it is left out, one of them is in.
    """
    row = worst_row(plan, generator)
    if plan.sampling == "fixed":
        return Neighbours(row, -row, -row)
    return Neighbours(row, None if plan.neighbours == "add-remove" else -row, torch.zeros_like(row))


def mu_check(setting: Setting, target: Target, plan: Plan, alpha: float) -> Check:
    """One step with every record in it, told apart by a threshold half-way."""
    plan = attacked(q_one(plan))
    claimed, draws = target.claimed_mu(plan), setting.draws
    seen, seen_else = _both(setting, target, plan, draws, "mu")
    # In units of the noise, centred between the two datasets.
    middle = 0.0 if plan.sampling == "poisson" and plan.neighbours == "replace-one" else 0.5 / plan.noise_multiplier
    if plan.sampling == "fixed":
        middle = (1 - plan.batch) / plan.noise_multiplier
    bound = mu_lower(int((seen > middle).sum()), int((seen_else > middle).sum()), draws, alpha)
    detail = f"threshold attack on one step, q = 1, {draws} draws a side"
    return Check(f"attack: μ, {plan.neighbours}", "mu", claimed, bound, 1 - alpha, bound <= claimed, detail)


def epsilon_check(setting: Setting, target: Target, plan: Plan, alpha: float) -> Check:
    """One step on a sample: sampler and release together, against the verified ε at a large δ."""
    plan = attacked(plan)
    draws, q = setting.draws, plan.event.rate
    delta = DELTA if q >= 0.4 else DELTA * q
    claimed = target.claimed_epsilon(plan, 1, delta, plan.neighbours)
    seen, seen_else = _both(setting, target, plan, draws, "epsilon")
    threshold = _best_threshold(plan, draws, delta, alpha)
    bound = epsilon_lower(int((seen > threshold).sum()), int((seen_else > threshold).sum()), draws, delta, alpha)
    detail = f"one step, q = {q:.3g}, δ = {delta:.3g}, {draws} draws a side"
    return Check(f"attack: ε, {plan.neighbours}", "epsilon", claimed, bound, 1 - alpha, bound <= claimed, detail)


def attacked(plan: Plan) -> Plan:
    """The plan, on no more coordinates than an attack needs."""
    return replace(plan, active=min(plan.active, MOST_COORDINATES))


def _both(
    setting: Setting, target: Target, plan: Plan, draws: int, label: str
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    generator = torch.Generator().manual_seed(setting.seed)
    pair = worst_neighbours(plan, generator)
    direction = (pair.first / pair.first.norm()).to(torch.float64)
    sides = []
    for side, first in (("in", pair.first), ("out", pair.first_else)):
        batches = target.batches(plan, setting.stream(label, plan.neighbours, side, "batches"))
        noise = setting.stream(label, plan.neighbours, side, "noise")
        drawn = islice(_releases(target, plan, batches, noise, first, pair.others, setting.exact), draws)
        sides.append(torch.stack(list(drawn)) @ direction / plan.sigma)
    return sides[0].numpy(), sides[1].numpy()


def _releases(
    target: Target,
    plan: Plan,
    batches: Iterator[NDArray[np.int64]],
    noise: Stream,
    first: Tensor | None,
    others: Tensor,
    on_grid: bool,
) -> Iterator[Tensor]:
    everyone = others.repeat(plan.records, 1)
    for batch in batches:
        # Indices are sorted, so record 0 comes first where it was drawn.
        drawn = len(batch) > 0 and batch[0] == 0
        rows = everyone[: len(batch)]
        if drawn:
            rows = rows[1:] if first is None else torch.cat([first[None], rows[1:]])
        yield target.release(iter([rows] if len(rows) else ()), plan, noise, on_grid)[0]


@cache
def _best_threshold(plan: Plan, draws: int, delta: float, alpha: float) -> float:
    """Where the bound would be largest if the claim were true, by the two densities in units of the noise."""
    q, shift = plan.event.rate, 1 / plan.noise_multiplier
    base = -plan.batch * shift if plan.sampling == "fixed" else 0.0
    step = 2 * shift if plan.sampling == "fixed" else shift
    other_step = -shift if plan.sampling == "poisson" and plan.neighbours == "replace-one" else 0.0
    candidates = base + np.linspace(-2.0, step + 3.0, 101)

    def above(distance: float) -> NDArray[np.float64]:
        tail = q * stats.norm.sf(candidates - base - distance) + (1 - q) * stats.norm.sf(candidates - base)
        return np.asarray(tail, dtype=np.float64)

    bounds = [
        epsilon_lower(round(hit * draws), round(false * draws), draws, delta, alpha)
        for hit, false in zip(above(step), above(other_step))
    ]
    return float(candidates[int(np.argmax(bounds))])
