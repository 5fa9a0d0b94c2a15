"""One release by itself: its sensitivity, its noise, its sampler, and attacks on it.

- The pair test releases two neighbouring batches with the same noise. The noise cancels, so what is left is the
  difference of the clipped sums. In units of the noise it must stay within the claimed μ for *every* pair, and reach it
  for the worst. There is no chance in it.
- The attacks tell which of two worst neighbours was used.
- A release of zero gradients, or of an empty batch, is pure noise: k independent Gaussians of the plan's σ, whatever
  the batch's size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import islice

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from fedspa.audit.bounds import epsilon_lower, mu_lower
from fedspa.audit.gaussian.target import Target
from fedspa.audit.questions import Floats, columns, law_question, noise_size, sampler_questions, threshold_attack
from fedspa.audit.result import UNBOUNDED, Question, certain
from fedspa.audit.rows import HUGE, row_pairs, worst_row
from fedspa.audit.setting import Setting
from fedspa.mechanisms.clipping import CLIP_MARGIN
from fedspa.mechanisms.gaussian.plan import CLIP_RATE, GaussianPlan
from fedspa.randomness.sampling import Indices

# Rounding of float32 gradients (6e-8), and the exact path's slack of 2⁻²⁰ in both grid and noise.
TOLERANCE = 1e-6
# Where ε is bounded: so large a δ leaves events frequent enough to be counted.
DELTA = 0.1
# More coordinates cost time and show nothing more: the attack sees one direction. Noise and pairs are tested on all k.
MOST_ATTACKED = 512
MOST_VALUES = 4_000_000


def pair_question(setting: Setting, target: Target, plan: GaussianPlan) -> Question:
    """Largest distance over all pairs and variants of the plan, relative to the plan's own claim."""
    generator = setting.generator()
    claimed, pairs = target.claimed_mu(plan), 0
    reached = []
    for variant, on_grid in target.variants(plan, setting.exact):
        batches = neighbouring_batches(variant, generator)
        distances = [_distance(setting, target, variant, on_grid, left, right) for left, right in batches]
        reached.append(min(max(distances), UNBOUNDED))
        pairs += len(distances)
    worst, slackest = max(reached), min(reached)
    within = worst <= claimed * (1 + TOLERANCE)
    attained = slackest >= claimed * (1 - TOLERANCE - CLIP_MARGIN)
    detail = f"{pairs} pairs of batches, the same noise on both"
    if not attained:
        detail += f"; the worst pair of one variant reaches {slackest:.6g} only: this test has lost its reach"
    return certain(f"pair, {plan.neighbours}", "mu", claimed, worst, detail, within and attained)


def neighbouring_batches(plan: GaussianPlan, generator: torch.Generator) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Chunked batches that differ in one example, which comes first or last; sizes around B, and none at all."""
    k = plan.active
    # A large model's rows are megabytes each: fewer of them.
    sizes = (0, 1, plan.batch, 3 * plan.batch + 1) if k * plan.batch < 1_000_000 else (0, 1, 4)
    for size in sizes:
        for scale in (0.0, plan.clip_value, HUGE):
            others = torch.randn(size, k, generator=generator) * scale
            others[size // 2 : size // 2 + 1] = math.nan  # one broken example among the others
            for row, other in row_pairs(plan, generator):
                left = _with(others, row, size % 2 == 0)
                right = others if plan.neighbours == "add-remove" else _with(others, other, size % 2 == 0)
                yield _chunks(left, generator), _chunks(right, generator)


def _with(others: Tensor, row: Tensor, last: bool) -> Tensor:
    return torch.cat([others, row[None]] if last else [row[None], others])


def _chunks(rows: Tensor, generator: torch.Generator) -> list[Tensor]:
    """The rows in blocks of a random size; now and then with an empty block among them."""
    if len(rows) == 0:
        return []
    size = int(torch.randint(1, len(rows) + 1, (1,), generator=generator))
    return [*(rows[start : start + size] for start in range(0, len(rows), size)), *([rows[:0]] if size % 2 else [])]


def _distance(
    setting: Setting, target: Target, plan: GaussianPlan, on_grid: bool, left: list[Tensor], right: list[Tensor]
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


def q_one(plan: GaussianPlan) -> GaussianPlan:
    """The plan with every record in every step: no amplification to hide behind."""
    return replace(plan, records=plan.batch)


def worst_neighbours(plan: GaussianPlan, generator: torch.Generator) -> tuple[Tensor, Tensor | None, Tensor]:
    """Two datasets that attain the accountant's dominating pair: the first gradient, what replaces it (None where it is
    missing), and each of the others.

    With fixed-size batches the others pull against the first: whenever it is left out, one of them is in.
    """
    row = worst_row(plan, generator)
    if plan.sampling == "fixed":
        return row, -row, -row
    return row, None if plan.neighbours == "add-remove" else -row, torch.zeros_like(row)


def mu_question(setting: Setting, target: Target, plan: GaussianPlan) -> Question:
    """One step with every record in it, told apart by a threshold half-way."""
    plan = _attacked(q_one(plan))
    # In units of the noise, centred between the two datasets.
    middle = 0.0 if plan.sampling == "poisson" and plan.neighbours == "replace-one" else 0.5 / plan.noise_multiplier
    if plan.sampling == "fixed":
        middle = (1 - plan.batch) / plan.noise_multiplier
    sides = _both(setting, target, plan, "mu")
    detail = "threshold attack on one step, q = 1"
    claimed = target.claimed_mu(plan)
    return threshold_attack(f"attack: μ, {plan.neighbours}", "mu", claimed, sides, middle, mu_lower, detail)


def epsilon_question(setting: Setting, target: Target, plan: GaussianPlan) -> Question:
    """One step on a sample: sampler and release together, against the verified ε at a large δ."""
    plan = _attacked(plan)
    q = plan.event.rate
    delta = DELTA if q >= 0.4 else DELTA * q
    claimed = target.claimed_epsilon(plan, 1, delta, plan.neighbours)
    sides = _both(setting, target, plan, "epsilon")
    best, bound = partial(_best_threshold, plan, setting.draws, delta), partial(epsilon_lower, delta)
    detail = f"one step, q = {q:.3g}, δ = {delta:.3g}"
    return threshold_attack(f"attack: ε, {plan.neighbours}", "epsilon", claimed, sides, best, bound, detail)


def _attacked(plan: GaussianPlan) -> GaussianPlan:
    """The plan, on no more coordinates than an attack needs."""
    return replace(plan, active=min(plan.active, MOST_ATTACKED))


def _both(setting: Setting, target: Target, plan: GaussianPlan, label: str) -> list[Floats]:
    """Releases along the first gradient, in units of the noise, with it and without."""
    first, first_else, others = worst_neighbours(plan, setting.generator())
    direction = (first / first.norm()).to(torch.float64)
    sides = []
    for side, one in (("in", first), ("out", first_else)):
        noise = setting.stream(label, plan.neighbours, side, "noise")
        batches = target.batches(plan, setting.stream(label, plan.neighbours, side, "batches"))
        drawn = (
            target.release(_rows(batch, one, others), plan, noise, setting.exact)[0]
            for batch in islice(batches, setting.draws)
        )
        sides.append((torch.stack(list(drawn)) @ direction / plan.sigma).numpy())
    return sides


def _rows(batch: Indices, first: Tensor | None, others: Tensor) -> Iterator[Tensor]:
    """The gradients of these records. Indices are sorted, so record 0 comes first where it was drawn."""
    rows = others.expand(len(batch), -1)
    if len(batch) > 0 and batch[0] == 0:
        rows = rows[1:] if first is None else torch.cat([first[None], rows[1:]])
    if len(rows):
        yield rows


@cache
def _best_threshold(plan: GaussianPlan, draws: int, delta: float, alpha: float) -> float:
    """Where the bound would be largest if the claim were true, by the two densities in units of the noise."""
    q, shift = plan.event.rate, 1 / plan.noise_multiplier
    base = -plan.batch * shift if plan.sampling == "fixed" else 0.0
    step = 2 * shift if plan.sampling == "fixed" else shift
    other_step = -shift if plan.sampling == "poisson" and plan.neighbours == "replace-one" else 0.0
    candidates = base + np.linspace(-2.0, step + 3.0, 101)

    def above(distance: float) -> Floats:
        tail: Floats = q * stats.norm.sf(candidates - base - distance) + (1 - q) * stats.norm.sf(candidates - base)
        return tail

    bounds = [
        epsilon_lower(delta, round(hit * draws), round(false * draws), draws, alpha)
        for hit, false in zip(above(step), above(other_step))
    ]
    return float(candidates[int(np.argmax(bounds))])


def noise_questions(setting: Setting, target: Target) -> list[Question]:
    """The size of the noise, its law, and the independence of coordinates."""
    plan = target.plan
    count = max(8, min(setting.draws, MOST_VALUES // plan.active))
    small = plan.active * plan.batch < 1_000_000
    sizes = np.resize([0, 1, plan.batch, 3 * plan.batch] if small else [0, 1, 3, 4], count)
    stream, zeros = setting.stream("variance"), torch.zeros(max(sizes), plan.active)
    draws = [target.release(iter([zeros[:n]] if n else ()), plan, stream, setting.exact)[0].numpy() for n in sizes]
    standard = np.stack(draws) / plan.sigma
    groups = [standard, *(standard[sizes == size] for size in np.unique(sizes)), *standard.T]
    largest = f"{standard.size} values; largest {np.abs(standard).max():.2f} σ"
    return [
        noise_size("noise: size", target.claimed_mu(plan), groups, f"{count} draws of zero gradients"),
        law_question("noise: law", stats.norm, [standard], f"distance from the normal law, {largest}"),
        columns("noise: coordinates", standard),
    ]


def direct_sampler_questions(setting: Setting, target: Target) -> list[Question]:
    """Batch after batch of the sampler, without an engine."""
    plan = target.plan
    pairs = max(50, min(setting.draws, MOST_VALUES // (2 * plan.records)))
    drawn = np.zeros((2 * pairs, plan.records), dtype=np.int64)
    for row, indices in zip(drawn, islice(target.batches(plan, setting.stream("batches")), 2 * pairs)):
        np.add.at(row, indices, 1)
    return sampler_questions("sampler", plan, drawn.reshape(pairs, 2, -1).swapaxes(0, 1))
