"""The audit of Gaussian noise (fedspa, dp-fed): one release by itself. `training.py` attacks whole training by it.

- The pair test releases two neighbouring batches with the same noise. The noise cancels, so what is left is the
  difference of the clipped sums. In units of the noise it must stay within the claimed μ for *every* pair, and reach it
  for the worst. There is no chance in it.
- The attacks tell which of two worst neighbours was used.
- A release of zero gradients, or of an empty batch, is pure noise: k independent Gaussians of the plan's σ, whatever
  the batch's size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from hashlib import blake2b
from itertools import islice
from typing import get_args

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from fedspa.algorithms import Agent, Terms
from fedspa.algorithms.fedspa import respond
from fedspa.audit.probes import HUGE, MakeEngine, Respond, row_pairs, worst_row
from fedspa.audit.result import UNBOUNDED, Question, certain
from fedspa.audit.run import Audited, Setting
from fedspa.audit.statistics import (
    Floats,
    columns,
    epsilon_lower,
    law_question,
    mu_lower,
    noise_size,
    sampler_questions,
    threshold_attack,
)
from fedspa.engine.task import Engine
from fedspa.errors import ConfigError
from fedspa.mechanisms.base import Clipping
from fedspa.mechanisms.clipping import CLIP_MARGIN
from fedspa.mechanisms.gaussian.plan import CLIP_RATE, GaussianPlan
from fedspa.mechanisms.gaussian.release import noisy_mean
from fedspa.privacy.event import Neighbours, Sampling
from fedspa.randomness.sampling import Indices, draw_batch
from fedspa.randomness.streams import Stream, derive_key
from fedspa.wire.payload import Update

Batches = Callable[[GaussianPlan, Stream], Iterator[Indices]]
# Noise so small that it hides nothing.
FAINT = 2.0**-12
Release = Callable[[Iterable[Tensor], GaussianPlan, Stream, bool], tuple[Tensor, float]]
# Rounding of float32 gradients (6e-8), and the exact path's slack of 2⁻²⁰ in both grid and noise.
TOLERANCE = 1e-6
# Where ε is bounded: so large a δ leaves events frequent enough to be counted.
DELTA = 0.1
# More coordinates cost time and show nothing more: the attack sees one direction. Noise and pairs are tested on all k.
MOST_ATTACKED = 512
MOST_VALUES = 4_000_000


def fresh_batches(plan: GaussianPlan, stream: Stream) -> Iterator[Indices]:
    """Step after step as in `engine.local.local_steps`."""
    while True:
        yield draw_batch(plan.sampling, plan.batch, plan.rate, plan.records, stream)


def release(chunks: Iterable[Tensor], plan: GaussianPlan, noise: Stream, on_grid: bool) -> tuple[Tensor, float]:
    return noisy_mean(chunks, plan, noise, on_grid=on_grid)


@dataclass(frozen=True, slots=True)
class Target:
    """`batches`: the records of step after step; `release`: one noisy mean and the next clip value; `engine` and
    `respond`: whole answers.

    `relations` are those under which the plan's claim is tested. `every_variant` widens the tests that cost nothing to
    both clippings, both private clip rules and both arithmetics. `claimed_share` is the claimed sensitivity under
    replace-one, in units of the plan's: 1 unless there is a fault.
    """

    plan: GaussianPlan
    relations: tuple[Neighbours, ...]
    every_variant: bool = True
    batches: Batches = fresh_batches
    release: Release = release
    engine: MakeEngine = Setting.make_engine
    respond: Respond[Update] = respond
    claimed_share: float = 1.0

    def plans(self) -> Iterator[GaussianPlan]:
        """The plan under each relation."""
        for relation in self.relations:
            yield replace(self.plan, neighbours=relation)

    def variants(self, plan: GaussianPlan, exact: bool) -> Iterator[tuple[GaussianPlan, bool]]:
        """(plan, on grid): the plan as it is, or all its siblings."""
        if not self.every_variant:
            yield plan, exact
            return
        for clip in get_args(Clipping):
            for rule in ("given", "quantile"):
                for on_grid in (False, True):
                    yield replace(plan, clip=clip, clip_rule=rule), on_grid

    def claimed_mu(self, plan: GaussianPlan) -> float:
        """The distance between worst neighbours in units of the noise: what Gaussian DP calls μ."""
        share = self.claimed_share if plan.neighbours == "replace-one" else 1.0
        return share * (1 if plan.neighbours == "add-remove" else 2) / plan.noise_multiplier

    def claimed_epsilon(self, plan: GaussianPlan, steps: int, delta: float, neighbours: Neighbours) -> float:
        """The verified ε of so many steps of the plan."""
        from fedspa.privacy.accounting import epsilon

        share = self.claimed_share if neighbours == "replace-one" else 1.0
        event = replace(plan.event, steps=steps, noise_multiplier=plan.noise_multiplier / share)
        return epsilon({event: 1}, delta, neighbours=neighbours)


def synthetic(
    *,
    noise: float = 1.0,
    clip: Clipping = "coordinate",
    neighbours: Neighbours | None = None,
    sampling: Sampling = "poisson",
) -> Target:
    """A small mechanism that the attacks see best: 16 of 64 coordinates, 8 of 16 records."""
    relations = _relations(sampling, neighbours)
    plan = GaussianPlan(64, 16, clip, 0.1, sampling, 8, 16, 1, 1, noise, relations[0], 1e-3)
    return Target(plan, relations)


def of_plan(plan: GaussianPlan, *, neighbours: Neighbours | None = None) -> Target:
    """The mechanism of a run."""
    return Target(plan, _relations(plan.sampling, neighbours), every_variant=False)


def _relations(sampling: Sampling, neighbours: Neighbours | None) -> tuple[Neighbours, ...]:
    """The relation asked for, or all that have a sound accountant with this sampling."""
    if neighbours is not None:
        return (neighbours,)
    return ("add-remove", "replace-one") if sampling == "poisson" else ("replace-one",)


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


# Three known mistakes, for `--self-test`. They are never used to train.


def _papers_sensitivity(target: Target) -> Target:
    """√2·√k·c (or √2·C) claimed under replace-one, where it is 2·√k·c (2C)."""
    if "replace-one" not in target.relations:
        raise ConfigError("--self-test has a fault that is about replace-one; leave --neighbours out, or set it so")
    return replace(target, claimed_share=1 / math.sqrt(2))


def _weak_noise(chunks: Iterable[Tensor], plan: GaussianPlan, noise: Stream, on_grid: bool) -> tuple[Tensor, float]:
    """σ smaller than accounted by 1.5."""
    return noisy_mean(chunks, replace(plan, noise_multiplier=plan.noise_multiplier / 1.5), noise, on_grid=on_grid)


def _public_key(theta: Tensor, terms: Terms, agents: Sequence[Agent], engine: Engine) -> Iterator[Update]:
    """Randomness keyed by what the server knows: the mask's seed, the round and the agent's number."""
    roots = [blake2b(terms.mask_seed or agent.mask_seed, digest_size=32).digest() for agent in agents]
    keyed = [replace(each, key=derive_key(root, terms.round, each.number)) for each, root in zip(agents, roots)]
    return respond(theta, terms, keyed, engine)


FAULTS: dict[str, Callable[[Target], Target]] = {
    "sensitivity": _papers_sensitivity,
    "noise": lambda target: replace(target, release=_weak_noise),
    "seed": lambda target: replace(target, respond=_public_key),
}


def questions(setting: Setting, target: Target) -> Iterator[Question]:
    """All questions, in the order of the report."""
    from fedspa.audit import training

    for plan in target.plans():
        yield pair_question(setting, target, plan)
        yield mu_question(setting, target, plan)
        yield epsilon_question(setting, target, plan)
    yield from noise_questions(setting, target)
    yield from direct_sampler_questions(setting, target)
    yield from training.questions(setting, target)


GAUSSIAN = Audited(
    name="fedspa",
    choices={
        "noise": (),
        "clip": get_args(Clipping),
        "sampling": get_args(Sampling),
        "neighbours": get_args(Neighbours),
    },
    synthetic=synthetic,
    of_plan=of_plan,
    questions=questions,
    faults=FAULTS,
)
