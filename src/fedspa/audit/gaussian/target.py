"""What is attacked of Gaussian noise: plans, and the functions that train by them, as the production code has them.

Below it the plants: copies with one mistake each, which real code has made. They are never used to train.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np
import torch
from torch import Tensor, nn

from fedspa.algorithms.fedspa import respond
from fedspa.audit.probe import MakeEngine, Respond, one_key, public_key
from fedspa.audit.setting import Setting
from fedspa.engine.per_example import PerExampleEngine
from fedspa.engine.task import Engine, LocalResult, LocalTask
from fedspa.errors import ConfigError
from fedspa.examples import taken
from fedspa.mechanisms.base import Clipping
from fedspa.mechanisms.gaussian.plan import GaussianPlan
from fedspa.mechanisms.gaussian.release import noisy_mean
from fedspa.privacy.event import Neighbours, Sampling
from fedspa.randomness.sampling import Indices, draw_batch
from fedspa.randomness.streams import Stream, derive_key
from fedspa.wire.payload import Update

Batches = Callable[[GaussianPlan, Stream], Iterator[Indices]]
# Noise so small that it hides nothing.
FAINT = 2.0**-12
Release = Callable[[Iterable[Tensor], GaussianPlan, Stream, bool], tuple[Tensor, float]]


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
    replace-one, in units of the plan's: 1 unless planted.
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


def _papers_sensitivity(target: Target) -> Target:
    """√2·√k·c (or √2·C) claimed under replace-one, where it is 2·√k·c (2C)."""
    if "replace-one" not in target.relations:
        raise ConfigError("--plant sensitivity is a mistake about replace-one; leave --neighbours out, or set it so")
    return replace(target, claimed_share=1 / math.sqrt(2))


def _weak_noise(chunks: Iterable[Tensor], plan: GaussianPlan, noise: Stream, on_grid: bool) -> tuple[Tensor, float]:
    """σ smaller than accounted by 1.5."""
    return noisy_mean(chunks, replace(plan, noise_multiplier=plan.noise_multiplier / 1.5), noise, on_grid=on_grid)


def _missing_noise(chunks: Iterable[Tensor], plan: GaussianPlan, noise: Stream, on_grid: bool) -> tuple[Tensor, float]:
    """No noise on one coordinate in four."""
    parts = list(chunks)
    noisy, clip_value = noisy_mean(parts, plan, noise, on_grid=on_grid)
    noisy[::4] = noisy_mean(parts, replace(plan, noise_multiplier=FAINT), noise, on_grid=on_grid)[0][::4]
    return noisy, clip_value


def _shared_noise(chunks: Iterable[Tensor], plan: GaussianPlan, noise: Stream, on_grid: bool) -> tuple[Tensor, float]:
    """One value of noise for two coordinates: σ and the law are right, and their difference has none."""
    parts = list(chunks)
    noisy, clip_value = noisy_mean(parts, plan, noise, on_grid=on_grid)
    twin = slice(1, 2 * (plan.active // 2), 2)
    clear = noisy_mean(parts, replace(plan, noise_multiplier=FAINT), noise, on_grid=on_grid)[0]
    noisy[twin] = clear[twin] + (noisy - clear)[0 : 2 * (plan.active // 2) : 2]
    return noisy, clip_value


def _silent_when_empty(
    chunks: Iterable[Tensor], plan: GaussianPlan, noise: Stream, on_grid: bool
) -> tuple[Tensor, float]:
    """No noise where nobody was drawn, as where a training loop skips an empty batch."""
    parts = [part for part in chunks if len(part)]
    if not parts:
        return torch.zeros(plan.active, dtype=torch.float64), plan.clip_value
    return noisy_mean(parts, plan, noise, on_grid=on_grid)


def _clipped_mean(chunks: Iterable[Tensor], plan: GaussianPlan, noise: Stream, on_grid: bool) -> tuple[Tensor, float]:
    """The batch's mean is clipped, not each example."""
    rows = torch.cat([torch.zeros(0, plan.active), *chunks]).nan_to_num()
    mean = rows.mean(dim=0, keepdim=True) if len(rows) else torch.zeros(1, plan.active)
    return noisy_mean([mean.repeat(plan.batch, 1)], plan, noise, on_grid=on_grid)


def _realised_mean(chunks: Iterable[Tensor], plan: GaussianPlan, noise: Stream, on_grid: bool) -> tuple[Tensor, float]:
    """Divided by the realised batch."""
    parts = list(chunks)
    mean, clip_value = noisy_mean(parts, plan, noise, on_grid=on_grid)
    return mean * (plan.batch / max(1, sum(map(len, parts)))), clip_value


def _epochs(plan: GaussianPlan, stream: Stream) -> Iterator[Indices]:
    """Shuffled epochs, accounted as fresh samples."""
    while True:
        order = np.argsort(stream.uniform(plan.records)).astype(np.int64)
        for start in range(0, plan.records - plan.batch + 1, plan.batch):
            yield np.sort(order[start : start + plan.batch])


def _fixed_size(plan: GaussianPlan, stream: Stream) -> Iterator[Indices]:
    """Batches of a fixed size, accounted as Poisson samples."""
    while True:
        yield stream.choice_without_replacement(plan.records, plan.batch)


def _twice(plan: GaussianPlan, stream: Stream) -> Iterator[Indices]:
    """The first record of a batch is in it twice."""
    for batch in fresh_batches(plan, stream):
        yield np.concatenate([batch[:1], batch])


def _larger_rate(target: Target) -> Target:
    """Records drawn with 1.25 times the rate that is accounted, in Poisson samples."""
    if target.plan.sampling == "fixed":
        raise ConfigError("--plant sampling-rate is of Poisson samples; use --plant sampling-twice or sampling")

    def batches(plan: GaussianPlan, stream: Stream) -> Iterator[Indices]:
        while True:
            yield draw_batch(plan.sampling, plan.batch, min(1.0, 1.25 * plan.rate), plan.records, stream)

    return broken(target, batches=batches)


def _fixed_for_poisson(target: Target) -> Target:
    if target.plan.sampling == "fixed":
        raise ConfigError("--plant sampling-fixed is no mistake under --sampling fixed; use --plant sampling")
    return broken(target, batches=_fixed_size)


def broken(
    target: Target,
    batches: Batches = fresh_batches,
    release: Release = release,
    *,
    largest: bool = False,
    stale: bool = False,
) -> Target:
    """`target` with that sampler and that release, in an engine that has them too, and mistakes of its own."""

    def make_engine(setting: Setting, module: nn.Module, input_shape: tuple[int, ...]) -> Engine:
        return _BrokenEngine(PerExampleEngine(module), batches, release, largest, stale)

    return replace(target, batches=batches, release=release, engine=make_engine)


PLANTS: dict[str, Callable[[Target], Target]] = {
    "sensitivity": _papers_sensitivity,
    "noise": lambda target: broken(target, release=_weak_noise),
    "noise-missing": lambda target: broken(target, release=_missing_noise),
    "noise-shared": lambda target: broken(target, release=_shared_noise),
    "noise-empty": lambda target: broken(target, release=_silent_when_empty),
    "noise-repeated": lambda target: broken(target, stale=True),
    "clip": lambda target: broken(target, release=_clipped_mean),
    "mean": lambda target: broken(target, release=_realised_mean),
    "seed": lambda target: replace(target, respond=public_key(target.respond)),
    "seed-reused": lambda target: replace(target, respond=one_key(target.respond)),
    "sampling": lambda target: broken(target, batches=_epochs),
    "sampling-fixed": _fixed_for_poisson,
    "sampling-rate": _larger_rate,
    "sampling-twice": lambda target: broken(target, batches=_twice),
    "mask": lambda target: broken(target, largest=True),
}


@dataclass(frozen=True)
class _BrokenEngine:
    """`engine.local.local_steps` once more, with a mistake in its sampling or its release. With `largest` it trains on
    the coordinates on which the records' gradients are largest, in place of those that the mask's seed names; with
    `stale` every step has the noise of the first."""

    gradients: PerExampleEngine
    batches: Batches
    release: Release
    largest: bool = False
    stale: bool = False
    name: str = "planted"
    separates_records: bool = False

    def train(self, theta: Tensor, tasks: Sequence[LocalTask]) -> list[LocalResult]:
        return [self._steps(theta, task) for task in tasks]

    def _steps(self, theta: Tensor, task: LocalTask) -> LocalResult:
        if task.plan is None:
            raise ConfigError("a plant breaks a privacy plan; this algorithm has none: audit fedspa or dp-fed")
        plan, coordinates = task.plan, task.coordinates
        batches = self.batches(plan, Stream(derive_key(task.key, "sampling")))
        noise = Stream(derive_key(task.key, "noise"))
        if self.largest and coordinates is not None:
            total = sum(rows.abs().sum(dim=0) for rows in self.gradients.rows(theta, task.x, task.y, None))
            coordinates = torch.as_tensor(total).topk(len(coordinates)).indices.sort().values
        active = slice(None) if coordinates is None else coordinates
        local = theta.clone()
        for _ in range(task.local_steps):
            index = torch.from_numpy(next(batches))
            rows = self.gradients.rows(local, taken(task.x, index), taken(task.y, index), coordinates)
            noise = Stream(derive_key(task.key, "noise")) if self.stale else noise
            step, _ = self.release(rows if len(index) else iter(()), plan, noise, task.exact)
            local[active] -= (task.local_lr * task.scale * step).to(local)
        return LocalResult((local - theta)[active], plan.clip_value)
