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
from fedspa.engine.local import Engine, SlotAssignment, load_batch
from fedspa.mechanisms.discrete_gaussian.plan import DiscreteGaussianPlan
from fedspa.mechanisms.discrete_gaussian.release import Integers, mean_gradient, share
from fedspa.randomness.mask import SEED_BYTES
from fedspa.randomness.streams import Stream, derive_key
from fedspa.wire.payload import Update


def respond(theta: Tensor, terms: Terms, agents: Sequence[Agent], engine: Engine) -> Iterator[IntegerUpdate]:
    """Yield the shares of all agents of a round, in as many threads as the engine has."""
    parts = max(1, engine.threads // max(1, len(agents)))
    return made_ahead(partial(_answer, theta, terms, engine, parts), agents, engine.threads)


def mean_update(total: Integers, members: int, terms: Terms) -> Update:
    """Return the mean of Δ over a cohort, of the sum of its members' numbers."""
    seed = terms.mask_seed or bytes(SEED_BYTES)  # where all coordinates are active, nobody draws a mask
    values = -terms.local_lr * terms.scale * mean_gradient(total, members, terms.plan_of(DiscreteGaussianPlan))
    return Update(terms.round, terms.dimension, seed, values.astype(np.float32))


def _answer(theta: Tensor, terms: Terms, engine: Engine, parts: int, agent: Agent) -> IntegerUpdate:
    plan, seed = terms.plan_of(DiscreteGaussianPlan), terms.mask_seed or bytes(SEED_BYTES)
    rounding, noise = (Stream(derive_key(agent.key, label)) for label in ("rounding", "noise"))
    total, zeroed = _sum(theta, terms, agent, seed, engine, parts)
    agent.log_zeroed(terms, zeroed, "examples")
    return IntegerUpdate(terms.round, terms.dimension, seed, share(total, plan, rounding, noise))


def _sum(theta: Tensor, terms: Terms, agent: Agent, seed: bytes, engine: Engine, parts: int) -> tuple[Integers, int]:
    """Return the clipped gradients of all the agent's records, added up as whole numbers, and how many counted as
    zero."""
    plan, active = terms.plan_of(DiscreteGaussianPlan), terms.coordinates(seed)
    coordinates = None if active is None else torch.from_numpy(active).to(theta.device)
    if not engine.gives_rows and not agent.exact:
        of = partial(engine.clipped_sum, theta, agent.pool_x, agent.pool_y, "l2", plan.clip_value, coordinates)
        rows = torch.arange(agent.records) if agent.rows is None and parts > 1 else agent.rows
        split = [rows] if rows is None or parts == 1 else torch.tensor_split(rows, parts)
        with ThreadPoolExecutor(parts) as pool:  # whole numbers: the same sum, however it is split
            found = list(pool.map(of, split))
        return torch.stack([units for units, _ in found]).sum(0).numpy(), sum(zeroed for _, zeroed in found)
    forward = Stream(derive_key(agent.key, "forward"))
    slots = SlotAssignment(agent.records, agent.max_records, "poisson", agent.key)
    everyone, together = np.arange(slots.count), engine.takes_slots
    x, y, there = load_batch(agent.take, slots, everyone, engine, theta.device, forward, together=together)
    units, zeroed = engine.clipped_sum(
        theta, x, y, "l2", plan.clip_value, coordinates, present=there, one_by_one=agent.exact
    )
    return units.numpy(), zeroed
