"""Deliberately broken copies of cpSGD, each with one mistake that real code has made. Never used to train.

| plant         | mistake |
|---------------|---------|
| sensitivity   | G/B claimed as the distance of neighbouring means, where it is 2G/B |
| noise         | a standard deviation smaller than accounted by 1.5 |
| noise-missing | no noise on one coordinate in four |
| clip          | the batch's mean is clipped, not each example |
| rounding      | to the nearest level, without a coin |
| seed          | noise keyed by the rotation's seed, which is public |
| seed-reused   | one key for all agents and rounds |
| sampling      | shuffled epochs, accounted as fresh samples |
| engine-clip   | an engine that clips to twice the bound |
| engine-norm   | an engine that does not count the last two coordinates when it clips |
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedspa.algorithms import ALGORITHMS, Agent, Terms
from fedspa.algorithms.base import Answer, Respond
from fedspa.audit.cpsgd_setting import Claim, CpsgdTarget, Release
from fedspa.engine.local import CLIP_UNITS, ClippedSums
from fedspa.engine.task import Engine, LocalResult, LocalTask
from fedspa.errors import ConfigError
from fedspa.mechanism import quantize
from fedspa.mechanism.quantize import Integers
from fedspa.mechanism.streams import Stream, derive_key
from fedspa.privacy.binomial import Sensitivity, sensitivity
from fedspa.privacy.binomial_plan import BinomialPlan
from fedspa.privacy.plan import Clipping

_respond = ALGORITHMS["cpsgd"].respond


def plant(name: str, target: CpsgdTarget) -> CpsgdTarget:
    """`target` with the named mistake in it."""
    if name in _CLAIMS:
        return replace(target, claim=_CLAIMS[name])
    if name in _RELEASES:
        return replace(target, release=_RELEASES[name])
    if name in _RESPONSES:
        return replace(target, respond=_RESPONSES[name])
    raise ConfigError(f"--plant is {name!r}; allowed for cpsgd: {', '.join(CPSGD_PLANTS)}")


def _half(plan: BinomialPlan, delta: float) -> Sensitivity:
    """What a batch twice as large would have."""
    return sensitivity(replace(plan.event, batch=2 * plan.batch, records=2 * plan.records), delta)


def _weak(rows: list[Tensor], plan: BinomialPlan, seed: bytes, rounding: Stream, noise: Stream) -> Integers:
    fewer = replace(plan, trials=max(1, round(plan.trials / 2.25)))
    numbers = quantize.release(rows, fewer, seed, rounding, noise)
    return numbers + (plan.trials - fewer.trials) // 2  # the mean as it should be


def _missing(rows: list[Tensor], plan: BinomialPlan, seed: bytes, rounding: Stream, noise: Stream) -> Integers:
    position = rounding.position
    numbers = quantize.release(rows, plan, seed, rounding, noise)
    rounding.seek(position)
    bare = quantize.release(rows, replace(plan, trials=1), seed, rounding, noise) + plan.trials // 2
    numbers[::4] = bare[::4]
    return numbers


def _clipped_mean(rows: list[Tensor], plan: BinomialPlan, seed: bytes, rounding: Stream, noise: Stream) -> Integers:
    mean = torch.cat(rows).nan_to_num(0.0, 0.0, 0.0).mean(dim=0, keepdim=True)
    return quantize.release([mean.repeat(plan.batch, 1)], plan, seed, rounding, noise)


def _nearest(rows: list[Tensor], plan: BinomialPlan, seed: bytes, rounding: Stream, noise: Stream) -> Integers:
    class Tails:
        """A coin that never falls: ½ is added before rounding down."""

        def integers_below(self, n: int, bound: int) -> Integers:
            return np.full(n, bound // 2)

    return quantize.release(rows, plan, seed, Tails(), noise)  # type: ignore[arg-type]


def _public_key(theta: Tensor, terms: Terms, agents: Sequence[Agent], engine: Engine) -> Iterator[Answer]:
    public = hashlib.blake2b(bytes([terms.round]) + (terms.mask_seed or b""), digest_size=32).digest()
    keyed = [replace(agent, key=derive_key(public, agent.number)) for agent in agents]
    return _respond(theta, terms, keyed, engine)


def _one_key(theta: Tensor, terms: Terms, agents: Sequence[Agent], engine: Engine) -> Iterator[Answer]:
    return _respond(theta, terms, [replace(agent, key=agents[0].key) for agent in agents], engine)


def _epochs(theta: Tensor, terms: Terms, agents: Sequence[Agent], engine: Engine) -> Iterator[Answer]:
    """Round t takes the t-th batch of a shuffled order: the agent is handed those records and no others."""
    for agent in agents:
        order = torch.randperm(len(agent.y), generator=torch.Generator().manual_seed(agent.number))
        start = terms.round * terms.batch % (len(order) - terms.batch + 1)
        chosen = order[start : start + terms.batch]
        assert isinstance(terms.plan, BinomialPlan)
        only = replace(terms, plan=replace(terms.plan, records=terms.batch))
        yield from _respond(theta, only, [replace(agent, x=agent.x[chosen], y=agent.y[chosen])], engine)


@dataclass(frozen=True, slots=True)
class _Longer:
    """An engine that adds up examples of up to twice the bound, in units of the right one."""

    engine: ClippedSums
    name: str = "longer"
    separates_records: bool = False
    threads: int = 1

    def train(self, theta: Tensor, tasks: Sequence[LocalTask]) -> list[LocalResult]:
        raise NotImplementedError("cpSGD trains by sums")

    def clipped_sum(self, theta: Tensor, x: Tensor, y: Tensor, clip: Clipping, clip_value: float) -> tuple[Tensor, int]:
        total, zeroed = self.engine.clipped_sum(theta, x, y, clip, 2 * clip_value)
        return 2 * total, zeroed


class _Overlooks(_Longer):
    """An engine whose clip does not see the last two coordinates: their sizes, or their part in a norm."""

    def clipped_sum(self, theta: Tensor, x: Tensor, y: Tensor, clip: Clipping, clip_value: float) -> tuple[Tensor, int]:
        total, zeroed = self.engine.clipped_sum(theta, x, y, clip, clip_value)
        if clip == "coordinate":
            total[-2:] = 1000 * self.engine.clipped_sum(theta, x, y, clip, 1000 * clip_value)[0][-2:]
            return total, zeroed
        rows = torch.stack(
            [self.engine.clipped_sum(theta, *one, clip, clip_value)[0] for one in zip(x[:, None], y[:, None])]
        )
        norms, counted = (part.double().norm(dim=1).clamp(min=1) for part in (rows, rows[:, :-2]))
        factors = torch.where(norms > 0.999 * CLIP_UNITS, CLIP_UNITS / counted, 1.0)
        return (rows * factors[:, None]).long().sum(dim=0), zeroed


def _in_engine(broken: type[_Longer]) -> Respond:
    def respond(theta: Tensor, terms: Terms, agents: Sequence[Agent], engine: Engine) -> Iterator[Answer]:
        if not isinstance(engine, ClippedSums):
            raise ConfigError(
                f"--plant engine-clip and engine-norm break an engine that clips by itself; {engine.name!r} does not: "
                "use --plant clip"
            )
        return _respond(theta, terms, agents, broken(engine))

    return respond


_CLAIMS: dict[str, Claim] = {"sensitivity": _half}
_RELEASES: dict[str, Release] = {
    "noise": _weak,
    "noise-missing": _missing,
    "clip": _clipped_mean,
    "rounding": _nearest,
}
_RESPONSES: dict[str, Respond] = {
    "seed": _public_key,
    "seed-reused": _one_key,
    "sampling": _epochs,
    "engine-clip": _in_engine(_Longer),
    "engine-norm": _in_engine(_Overlooks),
}
CPSGD_PLANTS = (*_CLAIMS, *_RELEASES, *_RESPONSES)
