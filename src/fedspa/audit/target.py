"""What is attacked: the three faces of the mechanism, as the production code has them.

A plant (`plants.py`) is another `Target` with one face replaced by a broken one; production modules stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from torch import Tensor, nn

from fedspa.engine.choose import EngineName, choose
from fedspa.engine.task import Engine
from fedspa.mechanism.release import noisy_mean
from fedspa.mechanism.sampling import Indices, draw_batch
from fedspa.mechanism.streams import Stream
from fedspa.privacy.event import Neighbours
from fedspa.privacy.plan import Plan

Batches = Callable[[Plan, Stream], Iterator[Indices]]
Release = Callable[[Iterable[Tensor], Plan, Stream, bool], tuple[Tensor, float]]
MakeEngine = Callable[[nn.Module, tuple[int, ...]], Engine]


@dataclass(frozen=True, slots=True)
class Target:
    """batches: the records of step after step; release: one noisy mean and the next clip value; engine: τ local steps.

    `claimed_share` is the claimed sensitivity under replace-one, in units of the plan's: 1 unless planted.
    """

    batches: Batches
    release: Release
    engine: MakeEngine
    claimed_share: float = 1.0

    def claimed_mu(self, plan: Plan) -> float:
        """The distance between worst neighbours in units of the noise: what Gaussian DP calls μ."""
        share = self.claimed_share if plan.neighbours == "replace-one" else 1.0
        return share * (1 if plan.neighbours == "add-remove" else 2) / plan.noise_multiplier

    def claimed_epsilon(self, plan: Plan, steps: int, delta: float, neighbours: Neighbours) -> float:
        """The verified ε of so many steps of the plan."""
        from fedspa.privacy.accounting import epsilon

        share = self.claimed_share if neighbours == "replace-one" else 1.0
        event = replace(plan.event, steps=steps, noise_multiplier=plan.noise_multiplier / share)
        return epsilon({event: 1}, delta, neighbours=neighbours, accountant="pld")


def production(engine: EngineName, *, exact: bool) -> Target:
    """The code that runs."""

    def make_engine(module: nn.Module, input_shape: tuple[int, ...]) -> Engine:
        return choose(engine, module, input_shape, "cpu", 1, exact)

    return Target(batches=fresh_batches, release=release, engine=make_engine)


def fresh_batches(plan: Plan, stream: Stream) -> Iterator[Indices]:
    """Step after step as in `engine.local.local_steps`."""
    while True:
        yield draw_batch(plan.sampling, plan.batch, plan.rate, plan.records, stream)


def release(chunks: Iterable[Tensor], plan: Plan, noise: Stream, on_grid: bool) -> tuple[Tensor, float]:
    return noisy_mean(chunks, plan, noise, on_grid=on_grid)
