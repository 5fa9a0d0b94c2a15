"""Injected faults: copies of what is audited with one mistake each, which real code has made. The audit catches all."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedspa.agent.participate import Request
from fedspa.algorithms import Agent, Terms
from fedspa.algorithms.base import Answer
from fedspa.audit.aggregation import Summed, answering
from fedspa.audit.audited import Setting
from fedspa.audit.gaussian import FAINT, FAULTS, Target
from fedspa.audit.probes import A, MakeEngine, Respond
from fedspa.engine.local import Engine, LocalResult, LocalTask
from fedspa.engine.per_example import PerExampleEngine
from fedspa.mechanisms.base import CLIP_UNITS, Clipping
from fedspa.mechanisms.gaussian.plan import GaussianPlan
from fedspa.mechanisms.gaussian.release import noisy_mean
from fedspa.randomness.streams import Indices, Stream, derive_key, draw_batch
from fedspa.secagg.masking import upload

Batches = Callable[[GaussianPlan, Stream], Iterator[Indices]]
Release = Callable[[Iterable[Tensor], GaussianPlan, Stream, bool], Tensor]


def fresh_batches(plan: GaussianPlan, stream: Stream) -> Iterator[Indices]:
    """Step after step as in `engine.local.local_steps`."""
    while True:
        yield draw_batch(plan.sampling, plan.batch, plan.rate, plan.records, stream)


def release(chunks: Iterable[Tensor], plan: GaussianPlan, noise: Stream, on_grid: bool) -> Tensor:
    return noisy_mean(chunks, plan, noise, on_grid=on_grid)


def public_key(respond: Respond[A]) -> Respond[A]:
    """Randomness keyed by what the server knows: the mask's seed, the round and the agent's number."""

    def broken(theta: Tensor, terms: Terms, agents: Sequence[Agent], engine: Engine) -> Iterator[A]:
        seeds = [terms.mask_seed or agent.mask_seed for agent in agents]
        roots = [hashlib.blake2b(seed, digest_size=32).digest() for seed in seeds]
        keyed = [replace(a, key=derive_key(root, terms.round, a.number)) for a, root in zip(agents, roots)]
        return respond(theta, terms, keyed, engine)

    return broken


def one_key(respond: Respond[A]) -> Respond[A]:
    """One key for all agents of a round."""

    def broken(theta: Tensor, terms: Terms, agents: Sequence[Agent], engine: Engine) -> Iterator[A]:
        return respond(theta, terms, [replace(agent, key=agents[0].key) for agent in agents], engine)

    return broken


def _missing_noise(chunks: Iterable[Tensor], plan: GaussianPlan, noise: Stream, on_grid: bool) -> Tensor:
    """No noise on one coordinate in four."""
    parts = list(chunks)
    noisy = noisy_mean(parts, plan, noise, on_grid=on_grid)
    noisy[::4] = noisy_mean(parts, replace(plan, noise_multiplier=FAINT), noise, on_grid=on_grid)[::4]
    return noisy


def _shared_noise(chunks: Iterable[Tensor], plan: GaussianPlan, noise: Stream, on_grid: bool) -> Tensor:
    """One value of noise for two coordinates: σ and the law are right, and their difference has none."""
    parts = list(chunks)
    noisy = noisy_mean(parts, plan, noise, on_grid=on_grid)
    twin = slice(1, 2 * (plan.active // 2), 2)
    clear = noisy_mean(parts, replace(plan, noise_multiplier=FAINT), noise, on_grid=on_grid)
    noisy[twin] = clear[twin] + (noisy - clear)[0 : 2 * (plan.active // 2) : 2]
    return noisy


def _silent_when_empty(chunks: Iterable[Tensor], plan: GaussianPlan, noise: Stream, on_grid: bool) -> Tensor:
    """No noise where nobody was drawn, as where a training loop skips an empty batch."""
    parts = [part for part in chunks if len(part)]
    if not parts:
        return torch.zeros(plan.active, dtype=torch.float64)
    return noisy_mean(parts, plan, noise, on_grid=on_grid)


def _clipped_mean(chunks: Iterable[Tensor], plan: GaussianPlan, noise: Stream, on_grid: bool) -> Tensor:
    """The batch's mean is clipped, not each example."""
    rows = torch.cat([torch.zeros(0, plan.active), *chunks]).nan_to_num()
    mean = rows.mean(dim=0, keepdim=True) if len(rows) else torch.zeros(1, plan.active)
    return noisy_mean([mean.repeat(plan.batch, 1)], plan, noise, on_grid=on_grid)


def _realised_mean(chunks: Iterable[Tensor], plan: GaussianPlan, noise: Stream, on_grid: bool) -> Tensor:
    """Divided by the realised batch."""
    parts = list(chunks)
    mean = noisy_mean(parts, plan, noise, on_grid=on_grid)
    return mean * (plan.batch / max(1, sum(map(len, parts))))


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


def _larger_rate(plan: GaussianPlan, stream: Stream) -> Iterator[Indices]:
    """Records drawn with 1.25 times the rate that is accounted, in Poisson samples."""
    while True:
        yield draw_batch(plan.sampling, plan.batch, min(1.0, 1.25 * plan.rate), plan.records, stream)


def broken(
    target: Target,
    batches: Batches = fresh_batches,
    release: Release = release,
    *,
    largest: bool = False,
    stale: bool = False,
) -> Target:
    """`target` with that sampler and that release in its engine, and mistakes of its own."""

    def make_engine(setting: Setting, module: nn.Module, input_shape: tuple[int, ...]) -> Engine:
        return _BrokenEngine(PerExampleEngine(module), batches, release, largest, stale)

    return replace(target, engine=make_engine)


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
    name: str = "faulty"
    separates_records: bool = False

    def train(self, theta: Tensor, tasks: Sequence[LocalTask]) -> list[LocalResult]:
        return [self._steps(theta, task) for task in tasks]

    def _steps(self, theta: Tensor, task: LocalTask) -> LocalResult:
        assert task.plan is not None
        plan, coordinates = task.plan, task.coordinates
        batches = self.batches(plan, Stream(derive_key(task.key, "sampling")))
        noise = Stream(derive_key(task.key, "noise"))
        if self.largest and coordinates is not None:
            total = sum(
                rows.abs().sum(dim=0)
                for rows in self.gradients.rows(theta, *task.take(torch.arange(task.records)), None)
            )
            coordinates = torch.as_tensor(total).topk(len(coordinates)).indices.sort().values
        active = slice(None) if coordinates is None else coordinates
        local = theta.clone()
        for _ in range(task.local_steps):
            index = torch.from_numpy(next(batches))
            rows = self.gradients.rows(local, *task.take(index), coordinates)
            noise = Stream(derive_key(task.key, "noise")) if self.stale else noise
            step = self.release(rows if len(index) else iter(()), plan, noise, task.exact)
            local[active] -= (task.local_lr * task.scale * step).to(local)
        return LocalResult((local - theta)[active])


GAUSSIAN_FAULTS: dict[str, Callable[[Target], Target]] = {
    "sensitivity": FAULTS["sensitivity"],
    "noise": FAULTS["noise"],
    "noise-missing": lambda target: broken(target, release=_missing_noise),
    "noise-shared": lambda target: broken(target, release=_shared_noise),
    "noise-empty": lambda target: broken(target, release=_silent_when_empty),
    "noise-repeated": lambda target: broken(target, stale=True),
    "clip": lambda target: broken(target, release=_clipped_mean),
    "mean": lambda target: broken(target, release=_realised_mean),
    "seed": FAULTS["seed"],
    "seed-reused": lambda target: replace(target, respond=one_key(target.respond)),
    "sampling": lambda target: broken(target, batches=_epochs),
    "sampling-fixed": lambda target: broken(target, batches=_fixed_size),
    "sampling-rate": lambda target: broken(target, batches=_larger_rate),
    "sampling-twice": lambda target: broken(target, batches=_twice),
    "mask": lambda target: broken(target, largest=True),
}


@dataclass(frozen=True, slots=True)
class Longer(Engine):
    """An engine that adds up examples of up to twice the bound, in units of the right one."""

    engine: Engine
    name = "longer"
    separates_records = False
    gives_rows = False

    def train(self, theta: Tensor, tasks: Sequence[LocalTask]) -> list[LocalResult]:
        return self.engine.train(theta, tasks)

    def clipped_sum(
        self, theta: Tensor, x: Any, y: Any, clip: Clipping, clip_value: float, *places: Any, **how: Any
    ) -> tuple[Tensor, int]:
        total, zeroed = self.engine.clipped_sum(theta, x, y, clip, 2 * clip_value, *places)
        return 2 * total, zeroed


class Overlooks(Longer):
    """An engine whose clip does not see the last two coordinates: their sizes, or their part in a norm."""

    def clipped_sum(
        self, theta: Tensor, x: Any, y: Any, clip: Clipping, clip_value: float, *places: Any, **how: Any
    ) -> tuple[Tensor, int]:
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


def engine_with(broken: type[Longer]) -> MakeEngine:
    """The engine of a run, with that mistake."""

    def make_engine(setting: Setting, module: nn.Module, input_shape: tuple[int, ...]) -> Engine:
        engine = setting.make_engine(module, input_shape)
        assert not engine.gives_rows
        return broken(engine)

    return make_engine


def _retry(target: Summed) -> Summed:
    """An agent that keeps the key of a round, and takes it again for the next attempt."""
    kept: dict[tuple[int, int], bytes] = {}
    true = target.algorithm.respond

    def respond(theta: Tensor, terms: Terms, agents: Sequence[Agent], engine: Engine) -> Iterator[Answer]:
        same = [replace(a, key=kept.setdefault((terms.round, a.number), a.key)) for a in agents]
        return true(theta, terms, same, engine)

    return answering(target, respond)


def _missing(target: Summed) -> Summed:
    """A sum over n − 1 members, counted as n: the masks of one who is silent are lifted, and its noise is not there."""

    def send(request: Request, agents: Mapping[str, Agent], engine: Engine) -> dict[str, bytes]:
        made = target.send(request, agents, engine)
        silent, session = max(agents), request.session
        secret = agents[silent].secret
        assert secret is not None
        nothing = np.full(session.count, round(target.law(1).mean()), np.int64)
        return made | {silent: upload(nothing, session, silent, secret)}

    return replace(target, send=send)


def _smaller(target: Summed) -> Summed:
    """A standard deviation smaller than accounted by √2."""
    true = target.respond

    def respond(theta: Tensor, terms: Terms, agents: Sequence[Agent], engine: Engine) -> Iterator[Answer]:
        plan: Any = terms.plan
        louder = replace(terms, steps=replace(plan, bound=round(plan.bound * math.sqrt(2))))
        for answer in true(theta, louder, agents, engine):
            made: Any = answer
            # Gradients as they should be; noise, √2 smaller.
            yield replace(made, values=np.rint(made.values / math.sqrt(2)).astype(np.int64))

    return answering(target, respond)


# Of sums, whatever the mechanism; and of discrete Gaussian shares.
SUM_FAULTS: dict[str, Callable[[Summed], Summed]] = {
    "retry": _retry,
    "missing": _missing,
    "colluders": lambda target: replace(
        target, extra_colluders=target.extra_colluders + 1
    ),  # one more than the plan says
}
SHARE_FAULTS: dict[str, Callable[[Summed], Summed]] = {
    "share": _smaller,
    "engine-clip": lambda target: replace(target, engine=engine_with(Longer)),
    "seed": lambda target: answering(target, public_key(target.respond)),
    "seed-reused": lambda target: answering(target, one_key(target.respond)),
    **SUM_FAULTS,
}
