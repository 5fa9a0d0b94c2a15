"""Fed-SPA: sparsification, local noise and an adaptive server (Hu, Gong and Guo, IJCAI 2021, Algorithm 1).

    line 2     choose agents              data/partition.py
    line 3     broadcast θ_t              server/coordinator.py
    line 5     new sparsifier S           here, from a public seed (randomness/mask.py)
    lines 6–10 τ noisy local steps        engine/local.py, mechanisms/gaussian/release.py
    line 11    upload Δ                   here; only k values and the seed travel (wire/payload.py)
    line 13    mean of the updates        server/intake.py
    lines 13–15  u, v, θ                  server/optimizers.py (`adam`)

Where we depart from the print: the gradient of each example is clipped (the paper assumes bounded gradients), batches
are Poisson samples by default, and σ comes from a verified accountant instead of Theorem 1.

For a server that sees sums only, Fed-SPA and DP-Fed take one step on all records, in whole numbers:

    an agent   each record's gradient on the round's mask, clipped ─► their sum ─► a point of the grid ─► + its share of
               the noise (`mechanisms/discrete_gaussian`) ─► k whole numbers, which leave masked (`fedspa.secagg`)
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
from fedspa.engine.local import Engine, LocalTask, SlotAssignment, load_batch
from fedspa.errors import PrivacyError
from fedspa.mechanisms.base import NoPlan
from fedspa.mechanisms.discrete_gaussian.plan import DiscreteGaussianPlan
from fedspa.mechanisms.discrete_gaussian.release import Integers, mean_gradient, share
from fedspa.mechanisms.gaussian.plan import GaussianPlan
from fedspa.randomness.mask import SEED_BYTES
from fedspa.randomness.streams import Stream, derive_key
from fedspa.wire.payload import Update


def respond(theta: Tensor, terms: Terms, agents: Sequence[Agent], engine: Engine) -> Iterator[Update]:
    """Yield the answers of all agents of a round, as one piece of work for the engine (lines 4–12)."""
    seeds = [terms.mask_seed or agent.mask_seed for agent in agents]
    tasks = [_task(theta, terms, agent, seed) for agent, seed in zip(agents, seeds)]
    for agent, seed, result in zip(agents, seeds, engine.train(theta, tasks)):  # lines 6–10
        agent.log_zeroed(terms, result.zeroed, "sampled examples")
        yield Update(  # line 11
            round=terms.round,
            dimension=terms.dimension,
            mask_seed=seed,
            values=result.delta.to("cpu", torch.float32).numpy(),
        )


def _task(theta: Tensor, terms: Terms, agent: Agent, seed: bytes) -> LocalTask:
    steps = terms.steps
    if not isinstance(steps, GaussianPlan | NoPlan):  # its own mechanism's, or none
        raise PrivacyError(f"the terms hold a plan whose noise this algorithm does not add: {steps}")
    if isinstance(steps, GaussianPlan) and steps.sampling == "fixed" and agent.records < steps.records:
        raise PrivacyError(
            f"an agent holds {agent.records} records; with fixed-size batches the plan's ε holds from "
            f"{steps.records} on"
        )
    coordinates = terms.coordinates(seed)  # line 5
    return LocalTask(
        x=agent.pool_x,
        y=agent.pool_y,
        coordinates=None if coordinates is None else torch.from_numpy(coordinates).to(theta.device),
        scale=terms.scale,
        local_lr=terms.local_lr,
        steps=steps,
        key=agent.key,
        exact=agent.exact,
        rows=agent.rows,
        max_records=agent.max_records,
        optimizer=terms.optimizer,
    )


def respond_in_sums(theta: Tensor, terms: Terms, agents: Sequence[Agent], engine: Engine) -> Iterator[IntegerUpdate]:
    """Yield the shares of all agents of a round, in as many threads as the engine has."""
    parts = max(1, engine.threads // max(1, len(agents)))
    return made_ahead(partial(_share, theta, terms, engine, parts), agents, engine.threads)


def mean_update(total: Integers, members: int, terms: Terms) -> Update:
    """Return the mean of Δ over a cohort, of the sum of its members' numbers."""
    seed = terms.mask_seed or bytes(SEED_BYTES)  # where all coordinates are active, nobody draws a mask
    values = -terms.local_lr * terms.scale * mean_gradient(total, members, terms.plan_of(DiscreteGaussianPlan))
    return Update(terms.round, terms.dimension, seed, values.astype(np.float32))


def _share(theta: Tensor, terms: Terms, engine: Engine, parts: int, agent: Agent) -> IntegerUpdate:
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
