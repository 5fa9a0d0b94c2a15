"""What is attacked of discrete Gaussian shares: a cohort on the probe, and whole answers of its members.

Below it the plants: copies with one mistake each. They are never used to train.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from scipy import stats
from torch import Tensor

from fedspa.algorithms import Agent, Terms, chosen
from fedspa.algorithms.base import Answer
from fedspa.audit.engines import Longer, engine_with
from fedspa.audit.probe import DIMENSION, one_key, public_key
from fedspa.audit.sums import plants as sums
from fedspa.audit.sums.cohort import ACTIVE, Summed, answering, played
from fedspa.engine.task import Engine
from fedspa.mechanisms.discrete_gaussian.event import FINE, SIGMA
from fedspa.mechanisms.discrete_gaussian.noise import REACH
from fedspa.mechanisms.discrete_gaussian.plan import DiscreteGaussianPlan
from fedspa.privacy.event import Neighbours


def synthetic(*, noise: float = 1.0, neighbours: Neighbours = "add-remove") -> Summed:
    """Four members with one colluding; `noise` is the multiplier of the honest ones' sum."""
    honest = 3
    bound = round(SIGMA * FINE * math.sqrt(honest) / noise)
    plan = DiscreteGaussianPlan(2 * DIMENSION, DIMENSION, 0.1, 1, 1, bound, neighbours, 1e-3, honest + 1, 1, honest + 1)
    return of_plan(plan)


def of_plan(plan: DiscreteGaussianPlan, *, neighbours: Neighbours | None = None) -> Summed:
    """The mechanism of a run, with one record a member: noise does not depend on how many there are."""
    members, colluders = played(plan.members, plan.colluders)
    few = replace(
        plan,
        dimension=DIMENSION,
        active=DIMENSION if plan.active == plan.dimension else ACTIVE,
        records=1,
        members=members,
        colluders=colluders,
        neighbours=neighbours or plan.neighbours,
    )
    return Summed(few, chosen("fedspa", "secure-aggregation"), law)


@cache
def law(shares: int) -> Any:
    """Of the sum of so many discrete Gaussians around 0: their convolution."""
    values = np.arange(-REACH, REACH + 1)
    one = np.exp(-(values**2) / (2 * SIGMA**2))
    one /= one.sum()
    chances = one
    for _ in range(shares - 1):
        chances = np.convolve(chances, one)
    return stats.rv_discrete(values=(np.arange(-shares * REACH, shares * REACH + 1), chances / chances.sum()))


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


PLANTS: dict[str, Callable[[Summed], Summed]] = {
    "share": _smaller,
    "engine-clip": lambda target: replace(target, engine=engine_with(Longer)),
    "seed": lambda target: answering(target, public_key(target.respond)),
    "seed-reused": lambda target: answering(target, one_key(target.respond)),
    **sums.PLANTS,
}
