"""cpSGD: communication-efficient and private distributed SGD (Agarwal, Suresh, Yu, Kumar, McMahan, NeurIPS 2018).

    a round    every agent takes part, with one step
    an agent   B records of its own at random ─► each gradient clipped ─► their mean, rounded at random onto 2^b levels
               [after a rotation by public random signs and Hadamard's matrix] ─► + Binomial(m, ½) ─► integers
    the server −X + s·(Y − m/2) [rotated back] is an unbiased estimate of the mean; averaged over agents, θ steps by it

The guarantee is of one record, as everywhere here: docs/cpsgd.md. Local DP counts an agent's own noise only; under
secure aggregation the server gets no more than the sum of the integers, and the noise of all honest agents counts.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fedspa.algorithms.base import Agent, Answer, IntegerUpdate, Terms, made_ahead
from fedspa.algorithms.cpsgd.codec import decode_integers, encode_integers
from fedspa.algorithms.cpsgd.plan import BinomialPlan, example_grid
from fedspa.algorithms.cpsgd.release import Integers, dequantized, noised, summed
from fedspa.engine.local import (
    CLIP_UNITS,
    ClippedSums,
    Counted,
    Gradients,
    SlotAssignment,
    seeded,
    single_gradients,
    whole_rows,
)
from fedspa.engine.task import Engine
from fedspa.errors import PrivacyError
from fedspa.examples import Tree, moved, tensors
from fedspa.randomness.sampling import draw_batch
from fedspa.randomness.streams import Stream, derive_key
from fedspa.wire.payload import Coding, Expected, Update


def respond(theta: Tensor, terms: Terms, agents: Sequence[Agent], engine: Engine) -> Iterator[IntegerUpdate]:
    """The answers of all agents of a round, in as many threads as the engine has."""
    threads = engine.threads if isinstance(engine, ClippedSums) else 1
    return made_ahead(partial(_answer, theta, terms, engine), agents, threads)


def _answer(theta: Tensor, terms: Terms, engine: Engine, agent: Agent) -> IntegerUpdate:
    plan, seed = _plan(terms), terms.mask_seed or agent.mask_seed
    if agent.records < plan.records:
        raise PrivacyError(f"an agent holds {agent.records} records; the plan's ε holds from {plan.records} on")
    sampling, rounding, noise, forward = (
        Stream(derive_key(agent.key, label)) for label in ("sampling", "rounding", "noise", "forward")
    )
    places = SlotAssignment(agent.records, agent.room, "fixed", agent.key)
    chosen = draw_batch("fixed", plan.batch, 0.0, places.count, sampling)
    records, _ = places.records(chosen)  # with fixed-size batches no place is empty
    x, y = (moved(tree, theta.device) for tree in agent.take(torch.from_numpy(records)))
    if isinstance(engine, Gradients):
        x = seeded(x, engine, chosen, places.count, forward)
    total, zeroed = _sum(theta, plan, x, y, engine, agent.exact)
    agent.log_zeroed(terms, zeroed, "sampled examples")
    return IntegerUpdate(terms.round, terms.dimension, seed, noised(total, plan, seed, rounding, noise))


def _sum(theta: Tensor, plan: BinomialPlan, x: Tree, y: Tree, engine: Engine, exact: bool) -> tuple[Integers, int]:
    """The batch's clipped gradients, added up as whole numbers, and how many of them counted as zero."""
    if isinstance(engine, ClippedSums) and not exact:
        units, zeroed = engine.clipped_sum(theta, *tensors(x, y), plan.clip, plan.clip_value)
        return units.numpy() * (example_grid(plan).limit // CLIP_UNITS), zeroed
    counted = Counted()
    total = summed(counted.watch(whole_rows(single_gradients(engine), theta, x, y, one_by_one=exact)), plan)
    return total, counted.zeroed


def encode(answer: Answer, terms: Terms, coding: Coding) -> bytes:
    """Whole numbers, entropy-coded without loss: coding `int` in the config's words."""
    assert isinstance(answer, IntegerUpdate)
    plan = _plan(terms)
    return encode_integers(answer, plan.trials, plan.levels)


def decode(payload: bytes, terms: Terms, coding: Coding, seed: bytes | None, seen: Container[bytes]) -> Update:
    """Δ = −η·(the estimate of the mean gradient), or a PayloadError."""
    plan = _plan(terms)
    expected = Expected(
        round=terms.round,
        dimension=terms.dimension,
        active=plan.coordinates,
        bound=terms.update_bound,
        codings=frozenset({"whole"}),
        seed=terms.mask_seed or seed,
        seen=seen,
    )
    update = decode_integers(payload, expected, plan.trials, plan.levels)
    values = -terms.local_lr * dequantized(update.values, plan, update.seed)
    return Update(update.round, update.dimension, update.seed, values.astype(np.float32))


def mean(total: Integers, members: int, terms: Terms) -> Update:
    """The mean of Δ over a cohort, of the sum of its members' numbers."""
    plan, seed = _plan(terms), terms.mask_seed
    assert seed is not None  # the mask is shared
    values = -terms.local_lr * dequantized(total / members, plan, seed)
    return Update(terms.round, terms.dimension, seed, values.astype(np.float32))


def _plan(terms: Terms) -> BinomialPlan:
    if not isinstance(terms.plan, BinomialPlan):
        raise PrivacyError("the terms hold no plan of cpsgd")
    return terms.plan
