"""Fed-SPA and DP-Fed for a server that sees sums only: one step on all records, in whole numbers, with an agent's share
of the noise (`mechanisms/discrete_gaussian`).

    an agent   each record's gradient on the round's mask, clipped ─► their sum ─► a point of the grid ─► + its share of
               the noise ─► k whole numbers, which leave masked (`fedspa.secagg`)
    the server the sum over the cohort ─► the mean of Δ = −η·S(gradient), as if each had sent its own
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fedspa.algorithms.base import Agent, IntegerUpdate, Terms, made_ahead
from fedspa.engine.local import (
    BatchedGradients,
    ClippedSums,
    Counted,
    SlotAssignment,
    example_rows,
    load_batch,
    single_gradients,
)
from fedspa.engine.task import Engine
from fedspa.errors import PrivacyError
from fedspa.examples import tensors
from fedspa.mechanisms.discrete_gaussian.plan import DiscreteGaussianPlan
from fedspa.mechanisms.discrete_gaussian.release import Integers, mean_gradient, share, summed
from fedspa.mechanisms.parts import Parts
from fedspa.randomness.philox import SEED_BYTES
from fedspa.randomness.streams import Stream, derive_key
from fedspa.wire.payload import Update


def respond(theta: Tensor, terms: Terms, agents: Sequence[Agent], engine: Engine) -> Iterator[IntegerUpdate]:
    """The shares of all agents of a round, in as many threads as the engine has."""
    threads = engine.threads if isinstance(engine, ClippedSums) else 1
    parts = max(1, threads // max(1, len(agents)))
    return made_ahead(partial(_answer, theta, terms, engine, parts), agents, threads)


def mean_update(total: Integers, members: int, terms: Terms) -> Update:
    """The mean of Δ over a cohort, of the sum of its members' numbers."""
    seed = terms.mask_seed or bytes(SEED_BYTES)  # where all coordinates are active, nobody draws a mask
    values = -terms.local_lr * terms.scale * mean_gradient(total, members, _plan(terms))
    return Update(terms.round, terms.dimension, seed, values.astype(np.float32))


def _answer(theta: Tensor, terms: Terms, engine: Engine, parts: int, agent: Agent) -> IntegerUpdate:
    plan, seed = _plan(terms), terms.mask_seed or bytes(SEED_BYTES)
    rounding, noise = (Stream(derive_key(agent.key, label)) for label in ("rounding", "noise"))
    total, zeroed = _sum(theta, terms, agent, seed, engine, parts)
    agent.log_zeroed(terms, zeroed, "examples")
    return IntegerUpdate(terms.round, terms.dimension, seed, share(total, plan, rounding, noise))


def _sum(theta: Tensor, terms: Terms, agent: Agent, seed: bytes, engine: Engine, parts: int) -> tuple[Integers, int]:
    """The clipped gradients of all the agent's records, added up as whole numbers, and how many counted as zero."""
    plan, active = _plan(terms), terms.coordinates(seed)
    coordinates = None if active is None else torch.from_numpy(active).to(theta.device)
    if isinstance(engine, ClippedSums) and not agent.exact:
        held = tensors(agent.x, agent.y)

        def of(rows: Tensor | None) -> tuple[Tensor, int]:
            return engine.clipped_sum(theta, *held, "l2", plan.clip_value, coordinates, rows)

        if parts == 1:
            units, zeroed = of(agent.rows)
            return units.numpy(), zeroed
        rows = torch.arange(agent.records) if agent.rows is None else agent.rows
        with ThreadPoolExecutor(parts) as pool:  # whole numbers: the same sum, however it is split
            found = list(pool.map(of, torch.tensor_split(rows, parts)))
        return torch.stack([units for units, _ in found]).sum(0).numpy(), sum(zeroed for _, zeroed in found)
    gradients = single_gradients(engine)
    forward = Stream(derive_key(agent.key, "forward"))
    slots = SlotAssignment(agent.records, agent.room, "poisson", agent.key)
    together, everyone = isinstance(gradients, BatchedGradients), np.arange(slots.count)
    x, y, there = load_batch(agent.take, slots, everyone, gradients, theta.device, forward, together=together)
    blocks, counted = example_rows(gradients, theta, x, y, coordinates, there, one_by_one=agent.exact), Counted()
    total = summed((rows.rows() if isinstance(rows, Parts) else rows for rows in counted.watch(blocks)), plan)
    return total, counted.zeroed


def _plan(terms: Terms) -> DiscreteGaussianPlan:
    if not isinstance(terms.plan, DiscreteGaussianPlan):
        raise PrivacyError("the terms hold no plan of a sum with shares of noise")
    return terms.plan
