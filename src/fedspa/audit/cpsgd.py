"""The audit of cpSGD: its release and its whole answer, against what `privacy.binomial` assumes of them.

Where the claim is the theorem's (with rotation), it is so loose that the attack on ε sees noise several times too small
only. What sees small faults are the questions about the mechanism as accounted: how far apart neighbours are after
rounding with the same coins, whether a release of nothing is Binomial, whether rounding is unbiased, who was drawn, and
whose noise repeats.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor, nn

from fedspa.algorithms import ALGORITHMS, Agent, Terms
from fedspa.algorithms.base import Respond
from fedspa.audit.batches import overlap_check, shares_check, sizes_check
from fedspa.audit.bounds import epsilon_lower
from fedspa.audit.noise import cosines
from fedspa.audit.pairs import HUGE
from fedspa.audit.result import Check, Report, Unit
from fedspa.engine.choose import choose
from fedspa.engine.flat import FlatModel
from fedspa.errors import ConfigError
from fedspa.mechanism.quantize import Integers, dequantized, release
from fedspa.mechanism.streams import NoiseMode, Stream, agent_key, derive_key, root_key
from fedspa.privacy.accounting import epsilon
from fedspa.privacy.binomial import Sensitivity, sensitivity
from fedspa.privacy.binomial_plan import BinomialPlan
from fedspa.wire.integers import IntegerUpdate

Release = Callable[[list[Tensor], BinomialPlan, bytes, Stream, Stream], Integers]
Claim = Callable[[BinomialPlan, float], Sensitivity]
SEED = bytes(range(16))
FALSE_ALARM = 1e-4
# The attack's δ: 2·0.05, since a release is (ε, 2δ)-DP.
STEP_DELTA = 0.05
INPUTS, CERTAIN = 32, 500.0
AGENTS, ROUNDS = 6, 6
SAMPLED = 150
MOST_VALUES, MOST_DRAWS = 2_000_000, 2000
# Pair (two), noise (two), rounding, attack; sampler (three) and keys.
QUESTIONS_A_VARIANT, QUESTIONS = 6, 4


@dataclass(frozen=True, slots=True)
class CpsgdTarget:
    """What is attacked: one release, a whole answer, and the sensitivity that is claimed for a release."""

    release: Release = release
    respond: Respond = ALGORITHMS["cpsgd"].respond
    claim: Claim = lambda plan, delta: sensitivity(plan.event, delta)


@dataclass(frozen=True)
class CpsgdSetting:
    """`variants` are plans that differ in clipping and rotation; the first one's sampling is audited too."""

    variants: tuple[BinomialPlan, ...]
    noise_mode: NoiseMode = "secure"
    draws: int = 5000
    seed: int = 0
    false_alarm: float = FALSE_ALARM

    def __post_init__(self) -> None:
        if self.draws < 100:
            raise ConfigError(f"--draws is {self.draws}; below 100 no attack can say anything")
        for plan in self.variants:
            if plan.flaw is not None:
                raise ConfigError(f"there is no claim to audit: {plan.flaw}")
        object.__setattr__(self, "_root", root_key(self.noise_mode, self.seed))

    def stream(self, *labels: str | int) -> Stream:
        return Stream(self.key(*labels))

    def key(self, *labels: str | int) -> bytes:
        root: bytes = self._root  # type: ignore[attr-defined]
        return derive_key(root, "audit", *labels)


def synthetic(*, noise_mode: NoiseMode = "secure", draws: int = 5000, seed: int = 0) -> CpsgdSetting:
    """A small mechanism that the attacks see best: 16 coordinates, 2 of 8 records, noise as little as has an ε."""
    plan = BinomialPlan(16, "coordinate", 0.1, 2, 100, False, "local", 8, 2, 8, 1, 1e-3)
    rotated = replace(plan, rotation=True, trials=2000)
    return CpsgdSetting((plan, rotated, replace(rotated, clip="l2")), noise_mode, draws, seed)


def from_config(path: Path, *, overrides: Sequence[str] = (), draws: int = 5000, seed: int = 0) -> CpsgdSetting | None:
    """The mechanism of a run's config, calibrated as the run would; None where the config is not of cpSGD."""
    from fedspa.runs.config import load
    from fedspa.runs.setup import prepare

    config = load(path, overrides)
    if config.algorithm.name != "cpsgd":
        return None
    plan = prepare(config).plan
    assert isinstance(plan, BinomialPlan)
    return CpsgdSetting((plan,), config.privacy.noise, draws, seed)


def audit(setting: CpsgdSetting, target: CpsgdTarget) -> Report:
    """Attack the target. Holds on a sound mechanism except with chance `setting.false_alarm`, by the union bound."""
    alpha = setting.false_alarm / (QUESTIONS + QUESTIONS_A_VARIANT * len(setting.variants))
    checks: list[Check] = []
    for plan in setting.variants:
        name = f"{plan.clip}, rotated" if plan.rotation else plan.clip
        checks += pair_checks(setting, target, plan, name, alpha)
        checks += noise_checks(setting, target, plan, name, alpha)
        checks.append(rounding_check(setting, target, plan, name, alpha))
        checks.append(attack_check(setting, target, plan, name, alpha))
    checks += sampler_checks(setting, target, alpha)
    checks.append(keys_check(setting, target, alpha))
    notes = ("seeded noise is a function of run.seed: whoever knows the seed can subtract it; not tested here",)
    return Report(tuple(checks), setting.false_alarm, notes if setting.noise_mode == "seeded" else ())


def worst_rows(plan: BinomialPlan, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """(an example, what replaces it): on the bound and against each other, beyond it, broken, random."""
    d = plan.dimension
    signs = torch.randint(0, 2, (d,), generator=generator) * 2.0 - 1
    on_bound = signs * plan.clip_norm / math.sqrt(d)
    yield on_bound, -on_bound
    yield HUGE * on_bound, -HUGE * on_bound
    yield HUGE * torch.randn(d, generator=generator), -on_bound
    yield on_bound, torch.full((d,), math.nan)
    yield torch.where(torch.arange(d) == 0, math.inf, on_bound), -on_bound
    yield torch.randn(d, generator=generator) * plan.clip_value, torch.randn(d, generator=generator)


def pair_checks(setting: CpsgdSetting, target: CpsgdTarget, plan: BinomialPlan, name: str, alpha: float) -> list[Check]:
    """Two neighbouring batches, the same coins and noise on both: how far apart the numbers are, in levels."""
    generator = torch.Generator().manual_seed(setting.seed)
    turns = max(2, min(25, MOST_VALUES // (plan.batch * plan.coordinates)))
    seen, pairs = np.zeros(3), 0
    for turn in range(turns):
        for row, other in worst_rows(plan, generator):
            others = torch.randn(plan.batch - 1, plan.dimension, generator=generator) * plan.clip_value
            numbers = [
                target.release([torch.cat([first[None], others])], plan, SEED, *_coins(setting, "pair", name, turn))
                for first in (row, other)
            ]
            away = np.abs(numbers[0] - numbers[1])
            seen = np.maximum(seen, [away.sum(), math.sqrt((away**2).sum()), away.max()])
            pairs += 1
    # Δ₁ and Δ₂ hold together but for δ a pair; Δ∞ without chance.
    l1, l2, largest = target.claim(plan, alpha / pairs)
    detail = f"{pairs} pairs of batches, the same coins and noise on both"
    return [
        _check(f"pair: Δ∞, {name}", "levels", largest, float(seen[2]), 1.0, detail),
        _check(f"pair: Δ₁, {name}", "levels", l1, float(seen[0]), 1 - alpha, detail),
        _check(f"pair: Δ₂, {name}", "levels", l2, float(seen[1]), 1 - alpha, detail),
    ]


def noise_checks(
    setting: CpsgdSetting, target: CpsgdTarget, plan: BinomialPlan, name: str, alpha: float
) -> list[Check]:
    """A release of zero gradients lies half-way between two levels: it is Binomial(m + 1, ½) above the lower one."""
    draws = _draws(setting, plan)
    zeros = [torch.zeros(plan.batch, plan.dimension)]
    coins = _coins(setting, "noise", name)
    numbers = np.stack([target.release(zeros, plan, SEED, *coins) for _ in range(draws)]) - (plan.levels // 2 - 1)
    law = stats.binom(plan.trials + 1, 0.5)
    # In all and in each coordinate: the distribution function (Dvoretzky, Kiefer, Wolfowitz; Massart 1990).
    share = alpha / (plan.coordinates + 1)
    worst = 0.0
    for values in (numbers.ravel(), *numbers.T):
        points, counts = np.unique(values, return_counts=True)
        reached = counts.cumsum() / len(values)
        below = np.concatenate([[0.0], reached[:-1]])
        distance = max(np.abs(reached - law.cdf(points)).max(), np.abs(below - law.cdf(points - 1)).max())
        worst = max(worst, float(distance) / math.sqrt(math.log(2 / share) / (2 * len(values))))
    centred = (numbers - (plan.trials + 1) / 2).astype(np.float64)[:, :256]
    return [
        _check(
            f"noise: law, {name}",
            "deviation",
            1.0,
            worst,
            1 - alpha,
            f"distance from Binomial(m + 1, 1/2) over what chance allows, in all and by coordinate; {draws} draws",
        ),
        cosines(f"noise: coordinates, {name}", centred.T, alpha, "pairs of coordinates"),
    ]


def rounding_check(setting: CpsgdSetting, target: CpsgdTarget, plan: BinomialPlan, name: str, alpha: float) -> Check:
    """Values between levels, with the least noise there is: their mean over many releases is the clipped mean."""
    plan = replace(plan, trials=1)
    draws = _draws(setting, plan) // 4
    rows = torch.linspace(-1, 1, plan.dimension).repeat(plan.batch, 1) * plan.clip_norm / math.sqrt(plan.dimension) / 2
    coins = _coins(setting, "rounding", name)
    total = np.zeros(plan.dimension)
    for _ in range(draws):
        total += dequantized(target.release([rows], plan, SEED, *coins), plan, SEED)
    error = np.abs(total / draws - rows[0].numpy().astype(np.float64)).max()
    deviation = plan.step * math.sqrt((plan.trials + 1) / 4 / draws)
    allowed = float(stats.norm.isf(alpha / (2 * plan.dimension)))
    detail = f"largest error of a mean over {draws} releases, in standard deviations"
    return _check(f"rounding, {name}", "deviation", allowed, float(error) / deviation, 1 - alpha, detail)


def attack_check(setting: CpsgdSetting, target: CpsgdTarget, plan: BinomialPlan, name: str, alpha: float) -> Check:
    """One release without sampling on the worst pair, told apart by a threshold half-way; δ = 0.1."""
    every = replace(plan.event, records=plan.batch)
    claimed = epsilon({every: 1}, 2 * STEP_DELTA, neighbours="replace-one")
    generator = torch.Generator().manual_seed(setting.seed)
    row, other = next(worst_rows(plan, generator))
    draws = _draws(setting, plan)
    direction = row.sign().numpy().astype(np.float64)
    counts = []
    for side, first in (("in", row), ("out", other)):
        batch = torch.zeros(plan.batch, plan.dimension)
        batch[0] = first
        coins = _coins(setting, "attack", name, side)
        seen = [dequantized(target.release([batch], plan, SEED, *coins), plan, SEED) @ direction for _ in range(draws)]
        counts.append(int((np.array(seen) > 0).sum()))
    bound = epsilon_lower(counts[0], counts[1], draws, 2 * STEP_DELTA, alpha)
    detail = f"threshold attack on one release, q = 1, δ = {2 * STEP_DELTA:g}, {draws} draws a side"
    return _check(f"attack: ε, {name}", "epsilon", claimed, bound, 1 - alpha, detail)


def sampler_checks(setting: CpsgdSetting, target: CpsgdTarget, alpha: float) -> list[Check]:
    """Who was drawn, read off whole answers in which each record moves a coordinate of its own and noise is faint."""
    plan = setting.variants[0]
    batch = max(1, min(INPUTS // 2, round(INPUTS * plan.event.rate)))
    plan = replace(
        plan,
        dimension=2 * INPUTS + 2,
        clip="coordinate",
        rotation=False,
        bits=12,
        trials=1,
        batch=batch,
        records=INPUTS,
        delta=1e-3,
    )
    who = _Probe(10 * plan.clip_value * torch.eye(INPUTS), torch.ones(INPUTS, dtype=torch.int64))
    drawn = np.zeros((2, SAMPLED, INPUTS), dtype=np.int64)
    for t in (0, 1):
        answers = who.answers(target, plan, t, [setting.key("batches", i, t) for i in range(SAMPLED)])
        shares = np.stack([dequantized(numbers, plan, SEED)[:INPUTS] for numbers in answers]) / plan.clip_value
        drawn[t] = np.rint(shares * batch)
    both = int((drawn[0] & drawn[1]).sum())
    return [
        sizes_check("sampler: batch sizes", plan, drawn.sum(axis=2).ravel(), 1, alpha),
        shares_check("sampler: records", plan, drawn.sum(axis=(0, 1)), 2 * SAMPLED, alpha),
        overlap_check("sampler: rounds", plan, both, SAMPLED, alpha),
    ]


def keys_check(setting: CpsgdSetting, target: CpsgdTarget, alpha: float) -> Check:
    """Answers of null records, over agents and rounds, and once more with all public inputs the same."""
    plan = replace(setting.variants[0], dimension=2 * INPUTS + 2, clip="coordinate", rotation=False)
    records = max(plan.records, plan.batch)
    who = _Probe(torch.ones(records, INPUTS), torch.zeros(records, dtype=torch.int64))
    values = [
        numbers - plan.trials / 2 - (plan.levels - 1) / 2
        for turn in (1, 2)
        for t in range(ROUNDS)
        for numbers in who.answers(target, plan, t, [agent_key(setting.key("turn", turn), t, i) for i in range(AGENTS)])
    ]
    return cosines("keys", np.stack(values), alpha, "pairs of answers over agents, rounds and a replay")


@dataclass(frozen=True, slots=True)
class _Probe:
    """A two-class linear model that is certain of label 0: such a record has no gradient, one of label 1 has ±x."""

    x: Tensor
    y: Tensor

    def answers(self, target: CpsgdTarget, plan: BinomialPlan, t: int, keys: list[bytes]) -> list[NDArray[np.int64]]:
        module = nn.Sequential(nn.Flatten(), nn.Linear(INPUTS, 2))
        theta = torch.zeros(plan.dimension)
        theta[2 * INPUTS], theta[2 * INPUTS + 1] = CERTAIN, -CERTAIN
        FlatModel(module).load(theta)
        terms = Terms(t, plan.dimension, plan.dimension, "shared", SEED, "fixed", plan.batch, 1, 1.0, plan)
        agents = [Agent(i, self.x, self.y, SEED, key) for i, key in enumerate(keys)]
        engine = choose("auto", module, (INPUTS,), "cpu", 1, exact=False)
        answers = list(target.respond(theta, terms, agents, engine))
        return [answer.numbers for answer in answers if isinstance(answer, IntegerUpdate)]


def _draws(setting: CpsgdSetting, plan: BinomialPlan) -> int:
    """A large model's releases cost more, and have more coordinates to look at."""
    return max(100, min(setting.draws, MOST_DRAWS, MOST_VALUES // plan.coordinates))


def _coins(setting: CpsgdSetting, *labels: str | int) -> tuple[Stream, Stream]:
    return setting.stream(*labels, "rounding"), setting.stream(*labels, "noise")


def _check(name: str, unit: Unit, claimed: float, seen: float, confidence: float, detail: str) -> Check:
    return Check(name, unit, claimed, seen, confidence, seen <= claimed, detail)
