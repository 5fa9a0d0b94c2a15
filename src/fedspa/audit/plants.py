"""Deliberately broken copies of the mechanism, each with one mistake that real code has made. Never used to train.

| plant           | mistake |
|-----------------|---------|
| sensitivity     | the paper's √2·√k·c (or √2·C) claimed under replace-one, where it is 2·√k·c (2C) |
| noise           | σ smaller than accounted by 1.5 |
| noise-missing   | no noise on one coordinate in four |
| clip            | the batch's mean is clipped, not each example |
| mean            | divided by the realised batch |
| seed            | noise keyed by the mask, which is public |
| seed-reused     | one key for all agents and rounds |
| sampling        | shuffled epochs, accounted as fresh samples |
| sampling-fixed  | batches of a fixed size, accounted as Poisson samples |
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from fedspa.audit.target import Batches, Release, Target, fresh_batches, release
from fedspa.engine.generic import GenericEngine
from fedspa.engine.task import Engine, LocalResult, LocalTask
from fedspa.errors import ConfigError
from fedspa.mechanism.clipping import clip_rows
from fedspa.mechanism.noise import add_noise
from fedspa.mechanism.release import noisy_mean
from fedspa.mechanism.sampling import Indices
from fedspa.mechanism.streams import Stream, derive_key
from fedspa.privacy.plan import Plan

Rekey = Callable[[LocalTask], bytes]


def plant(name: str, target: Target) -> Target:
    """`target` with the named mistake in it."""
    if name == "sensitivity":
        return replace(target, claimed_share=1 / math.sqrt(2))
    if name in _RELEASES:
        return _broken(target, release=_RELEASES[name])
    if name in _BATCHES:
        return _broken(target, batches=_BATCHES[name])
    if name in _KEYS:
        return _broken(target, rekey=_KEYS[name])
    raise ConfigError(f"--plant is {name!r}; allowed: {', '.join(PLANTS)}")


def _weak_noise(chunks: Iterable[Tensor], plan: Plan, noise: Stream, on_grid: bool) -> tuple[Tensor, float]:
    return noisy_mean(chunks, replace(plan, noise_multiplier=plan.noise_multiplier / 1.5), noise, on_grid=on_grid)


def _missing_noise(chunks: Iterable[Tensor], plan: Plan, noise: Stream, on_grid: bool) -> tuple[Tensor, float]:
    total = torch.zeros(plan.active, dtype=torch.float64)
    for rows in chunks:
        total += clip_rows(rows, plan.clip, plan.clip_value).sum(dim=0, dtype=torch.float64)
    noisy = add_noise(total, plan.sigma * plan.batch, noise)
    noisy[::4] = total[::4]
    return noisy / plan.batch, plan.clip_value


def _clipped_mean(chunks: Iterable[Tensor], plan: Plan, noise: Stream, on_grid: bool) -> tuple[Tensor, float]:
    rows = torch.cat([torch.zeros(1, plan.active), *(part.to(torch.float32) for part in chunks)])[1:]
    mean = rows.nan_to_num().mean(dim=0, keepdim=True) if len(rows) else torch.zeros(1, plan.active)
    clipped = clip_rows(mean, plan.clip, plan.clip_value)[0].to(torch.float64)
    return add_noise(clipped * plan.batch, plan.sigma * plan.batch, noise) / plan.batch, plan.clip_value


def _realised_mean(chunks: Iterable[Tensor], plan: Plan, noise: Stream, on_grid: bool) -> tuple[Tensor, float]:
    parts = list(chunks)
    mean, clip_value = noisy_mean(parts, plan, noise, on_grid=on_grid)
    return mean * (plan.batch / max(1, sum(map(len, parts)))), clip_value


def _epochs(plan: Plan, stream: Stream) -> Iterator[Indices]:
    while True:
        order = np.argsort(stream.uniform(plan.records)).astype(np.int64)
        for start in range(0, plan.records - plan.batch + 1, plan.batch):
            yield np.sort(order[start : start + plan.batch])


def _fixed_size(plan: Plan, stream: Stream) -> Iterator[Indices]:
    while True:
        yield stream.choice_without_replacement(plan.records, plan.batch)


def _from_the_mask() -> Rekey:
    def key(task: LocalTask) -> bytes:
        public = b"" if task.coordinates is None else task.coordinates.numpy().tobytes()
        return hashlib.blake2b(public, digest_size=32).digest()

    return key


def _the_first() -> Rekey:
    seen: list[bytes] = []

    def key(task: LocalTask) -> bytes:
        seen.append(task.key)
        return seen[0]

    return key


_RELEASES: dict[str, Release] = {
    "noise": _weak_noise,
    "noise-missing": _missing_noise,
    "clip": _clipped_mean,
    "mean": _realised_mean,
}
_BATCHES: dict[str, Batches] = {"sampling": _epochs, "sampling-fixed": _fixed_size}
_KEYS: dict[str, Callable[[], Rekey]] = {"seed": _from_the_mask, "seed-reused": _the_first}
PLANTS = ("sensitivity", *_RELEASES, *_KEYS, *_BATCHES)


def _broken(
    target: Target,
    batches: Batches = fresh_batches,
    release: Release = release,
    rekey: Callable[[], Rekey] | None = None,
) -> Target:
    def make_engine(module: nn.Module, input_shape: tuple[int, ...]) -> Engine:
        return _BrokenEngine(GenericEngine(module), batches, release, rekey() if rekey else lambda task: task.key)

    return replace(target, batches=batches, release=release, engine=make_engine)


@dataclass(frozen=True)
class _BrokenEngine:
    """`engine.local.local_steps` once more, with a mistake in its sampling, its release or its key."""

    gradients: GenericEngine
    batches: Batches
    release: Release
    rekey: Rekey
    name: str = "planted"
    separates_records: bool = False

    def train(self, theta: Tensor, tasks: Sequence[LocalTask]) -> list[LocalResult]:
        return [self._steps(theta, task) for task in tasks]

    def _steps(self, theta: Tensor, task: LocalTask) -> LocalResult:
        if task.plan is None:
            raise ConfigError("a plant breaks a privacy plan; this algorithm has none: audit fedspa or dp-fed")
        plan = task.plan
        batches = self.batches(plan, Stream(derive_key(task.key, "sampling")))
        noise = Stream(derive_key(self.rekey(task), "noise"))
        active = slice(None) if task.coordinates is None else task.coordinates
        local = theta.clone()
        for _ in range(task.local_steps):
            index = torch.from_numpy(next(batches))
            rows = self.gradients.rows(local, task.x[index], task.y[index], task.coordinates)
            step, _ = self.release(rows if len(index) else iter(()), plan, noise, task.exact)
            local[active] -= (task.local_lr * task.scale * step).to(local)
        return LocalResult((local - theta)[active], plan.clip_value)
