"""cpSGD: communication-efficient and private distributed SGD (Agarwal, Suresh, Yu, Kumar, McMahan, NeurIPS 2018).

    a round    every agent takes part, with one step
    an agent   B records of its own at random ─► each gradient clipped ─► their mean, rounded at random onto 2^b levels
               [after a rotation by public random signs and Hadamard's matrix] ─► + Binomial(m, ½) ─► integers
    the server −X + s·(Y − m/2) [rotated back] is an unbiased estimate of the mean; averaged over agents, θ steps by it

The guarantee is of one record, as everywhere here: docs/cpsgd.md. Local DP counts an agent's own noise only; the
paper's figures count the noise of all agents, which needs secure aggregation.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from fedspa.algorithms.base import Agent, Algorithm, Answer, Terms
from fedspa.engine.local import Counted, Gradients, example_rows
from fedspa.engine.task import Engine
from fedspa.errors import ConfigError, PrivacyError
from fedspa.mechanism.quantize import dequantized, release
from fedspa.mechanism.sampling import draw_batch
from fedspa.mechanism.streams import Stream, derive_key
from fedspa.privacy.binomial_plan import BinomialPlan
from fedspa.wire.integers import IntegerUpdate, decode_integers, encode_integers
from fedspa.wire.payload import Coding, Expected, Update

logger = logging.getLogger("fedspa.agent")  # stays with the agent; nothing that travels may say what it says


def respond(theta: Tensor, terms: Terms, agents: Sequence[Agent], engine: Engine) -> Iterator[Answer]:
    """The answers of all agents of a round."""
    if not isinstance(engine, Gradients):
        raise ConfigError(f"engine {engine.name!r} gives no gradients of single examples; cpsgd runs on generic")
    for agent in agents:
        yield _answer(theta, terms, agent, engine)


def _answer(theta: Tensor, terms: Terms, agent: Agent, gradients: Gradients) -> IntegerUpdate:
    plan, seed = _plan(terms), terms.mask_seed or agent.mask_seed
    if len(agent.y) < plan.records:
        raise PrivacyError(f"an agent holds {len(agent.y)} records; the plan's ε holds from {plan.records} on")
    sampling, rounding, noise = (Stream(derive_key(agent.key, label)) for label in ("sampling", "rounding", "noise"))
    index = torch.from_numpy(draw_batch("fixed", plan.batch, 0.0, len(agent.y), sampling)).to(agent.y.device)
    counted = Counted()
    rows = example_rows(gradients, theta, agent.x[index], agent.y[index], None, one_by_one=agent.exact)
    numbers = release(counted.watch(rows), plan, seed, rounding, noise)
    if counted.zeroed:
        logger.warning(
            "agent %d, round %d: %d of the sampled examples had a gradient that was not finite and counted as zero",
            *(agent.number, terms.round, counted.zeroed),
        )
    return IntegerUpdate(terms.round, terms.dimension, seed, numbers)


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
        codings=frozenset({"binomial"}),
        seed=terms.mask_seed or seed,
        seen=seen,
    )
    update = decode_integers(payload, expected, plan.trials, plan.levels)
    values = -terms.local_lr * dequantized(update.numbers, plan, update.seed)
    return Update(update.round, update.dimension, update.seed, values.astype(np.float32))


def _plan(terms: Terms) -> BinomialPlan:
    if not isinstance(terms.plan, BinomialPlan):
        raise PrivacyError("the terms hold no plan of cpsgd")
    return terms.plan


CPSGD = Algorithm(
    "cpsgd",
    private=True,
    sparse=False,
    server="average",
    respond=respond,
    encode=encode,
    decode=decode,
    by_example=True,
)
