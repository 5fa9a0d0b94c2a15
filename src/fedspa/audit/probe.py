"""Whole answers of agents, made as in a run: by the algorithm's `respond` and the engine that a run would take.

The probe is a two-class linear model whose bias makes label 0 certain. A record of label 0 then has a gradient of
exactly zero, and a record of label 1 has ±x on the two rows of weights, of a size that clipping decides.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from fedspa.algorithms import Agent, Terms
from fedspa.audit.setting import Setting
from fedspa.engine.task import Engine
from fedspa.learning.flat import FlatModel
from fedspa.mechanisms import Plan
from fedspa.randomness.streams import agent_key, derive_key

INPUTS, CERTAIN = 32, 500.0
WEIGHTS = 2 * INPUTS
DIMENSION = WEIGHTS + 2
AGENTS, ROUNDS = 6, 6
# The agents' mask seed, which is public.
SEED = bytes(range(16))

A = TypeVar("A", covariant=True)
Respond = Callable[[Tensor, Terms, Sequence[Agent], Engine], Iterator[A]]
MakeEngine = Callable[[Setting, nn.Module, tuple[int, ...]], Engine]


class Answers(Protocol[A]):
    """The part of a target that is common to all mechanisms: how agents answer, and with which engine."""

    @property
    def respond(self) -> Respond[A]: ...
    @property
    def engine(self) -> MakeEngine: ...


@dataclass(frozen=True, slots=True)
class Probe:
    """θ and the shape of an input belong to the module."""

    module: nn.Module
    theta: Tensor
    shape: tuple[int, ...]


def certain_model(inputs: int = INPUTS) -> Probe:
    """The probe, with θ in its module too."""
    module = nn.Sequential(nn.Flatten(), nn.Linear(inputs, 2))
    theta = torch.zeros(2 * inputs + 2)
    theta[2 * inputs], theta[2 * inputs + 1] = CERTAIN, -CERTAIN
    FlatModel(module).load(theta)
    return Probe(module, theta, (inputs,))


def answers(
    setting: Setting,
    target: Answers[A],
    model: Probe,
    plan: Plan,
    agents: Sequence[tuple[Tensor, Tensor, bytes]],
    t: int = 0,
    local_lr: float = 1.0,
    layers: tuple[tuple[int, int], ...] | None = None,
) -> list[A]:
    """What agents with these records x, y and keys send in round t."""
    terms = Terms(t, "per-agent", None, local_lr, plan, layers)
    known = [Agent(i, x, y, SEED, key, setting.exact) for i, (x, y, key) in enumerate(agents)]
    with _unlogged():
        return list(target.respond(model.theta, terms, known, target.engine(setting, model.module, model.shape)))


@contextmanager
def _unlogged() -> Iterator[None]:
    """An agent warns of broken records; here they are meant."""
    logger = logging.getLogger("fedspa.agent")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def replayed_keys(setting: Setting) -> Iterator[tuple[int, list[bytes]]]:
    """(a round, its agents' keys), round by round, and once more with other keys.

    All public inputs of the second turn equal those of the first: noise that a public number decides would repeat.
    """
    for turn in (1, 2):
        for t in range(ROUNDS):
            yield t, [agent_key(setting.key("turn", turn), t, i) for i in range(AGENTS)]


# Two mistakes with keys that any mechanism can make.


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
