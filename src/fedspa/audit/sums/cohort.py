"""A cohort on the probe: members whose updates leave masked, a server that adds them up, and what it can know.

Everything is made as in a run: `respond` and its engine, the session, `participate.payloads`, the server's sum. Those
who collude tell the server the numbers that they sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedspa.agent.member import played_keys
from fedspa.agent.participate import Invitation, payloads
from fedspa.algorithms import Agent, Algorithm, Terms
from fedspa.algorithms.base import Answer
from fedspa.algorithms.session import session_of
from fedspa.audit.probe import DIMENSION, INPUTS, SEED, MakeEngine, Probe, Respond, certain_model
from fedspa.audit.questions import Floats, Integers
from fedspa.audit.setting import Setting
from fedspa.engine.task import Engine
from fedspa.errors import ConfigError
from fedspa.mechanisms import Plan
from fedspa.mechanisms.base import Aggregation
from fedspa.randomness.streams import agent_key
from fedspa.secagg.session import Session
from fedspa.secagg.total import MaskedSum

# Of a run's cohort so many are played, with as large a part of colluders; what is claimed is priced for these.
MOST_MEMBERS = 6
# A mask of so many of the probe's coordinates, where the run has one.
ACTIVE = 48
# What a record weighs, in bounds: far beyond being clipped.
BEYOND = 1e4

Send = Callable[[Invitation, Mapping[str, Agent], Engine], dict[str, bytes]]


@dataclass(frozen=True, slots=True)
class Summed:
    """What is attacked: a plan on the probe's coordinates, the algorithm that answers by it, and what leaves (`send`).

    `law` is of scipy's kind: of a coordinate of the sum over so many members, none of whom has a gradient. `beyond` is
    how many more collude than the plan says: 0 unless planted.
    """

    plan: Plan
    algorithm: Algorithm
    law: Callable[[int], Any]
    send: Send = payloads
    engine: MakeEngine = Setting.make_engine
    beyond: int = 0

    @property
    def aggregation(self) -> Aggregation:
        aggregation = self.plan.aggregation
        if aggregation is None:
            raise ConfigError("the plan is not of sums: privacy.adversary = 'secure-aggregation' makes it one")
        return aggregation

    @property
    def colluders(self) -> int:
        return self.aggregation.colluders + self.beyond

    @property
    def respond(self) -> Respond[Answer]:
        return self.algorithm.respond

    def terms(self, t: int) -> Terms:
        return Terms(t, "shared", SEED, 1.0, self.plan)


def answering(target: Summed, respond: Callable[..., Iterator[Answer]]) -> Summed:
    """The target with other answers."""
    return replace(target, algorithm=replace(target.algorithm, respond=respond))


def played(members: int, colluders: int) -> tuple[int, int]:
    """A run's cohort, brought down to what is played."""
    few = min(members, MOST_MEMBERS)
    return few, colluders * few // members


@dataclass(frozen=True, slots=True)
class Heard:
    """One attempt: what the server was sent, and what each member knows to have sent, [members, coordinates]."""

    session: Session
    payloads: Mapping[str, bytes]
    numbers: Integers

    def total(self) -> Integers:
        """As the server unmasks it."""
        taken = MaskedSum(self.session)
        for name, payload in self.payloads.items():
            taken.add(name, payload)
        return taken.values()

    def view(self, colluders: int) -> Integers:
        """What is left to the server of the sum where the last members have told it their numbers. The first one is
        attacked."""
        members = len(self.numbers)
        view: Integers = self.total() - self.numbers[members - colluders :].sum(axis=0)
        return view


class Cohort:
    """Members of one run on the probe. All have null records, but the first may have one that is not."""

    def __init__(self, setting: Setting, target: Summed, run: str) -> None:
        self._setting, self._target, self._run = setting, target, run
        self._model: Probe = certain_model()
        self._engine = target.engine(setting, self._model.module, self._model.shape)
        # The server knows names and public keys, and these alone.
        self._secrets = played_keys(setting.key("members"), range(target.aggregation.members))

    def heard(self, t: int, attempt: int = 1, first: float | None = None, *, empty: bool = False) -> Heard:
        """The attempt at round t. The first member's first record is x = first·(1, …, 1) of label 1, or null; `empty`:
        no member has any, and every batch is as a Poisson sample in which nobody was drawn."""
        setting, target = self._setting, self._target
        numbers: list[Integers] = []
        algorithm = replace(target.algorithm, respond=overheard(target.algorithm, numbers))
        terms, theta = target.terms(t), self._model.theta
        public = {name: secret.public for name, secret in self._secrets.items()}
        session = session_of(self._run, attempt, public, algorithm, terms, theta, "int", setting.noise_mode)
        invitation = Invitation(self._run, algorithm, terms, theta, "int", setting.noise_mode, attempt, session)
        agents = {}
        for number, (name, secret) in enumerate(self._secrets.items()):
            x, y = _records(0 if empty else target.plan.batch, first if number == 0 else None)
            key = agent_key(setting.key("cohort", self._run, attempt), t, number)
            agents[name] = Agent(number, x, y, SEED, key, setting.exact, secret=secret)
        return Heard(session, target.send(invitation, agents, self._engine), np.stack(numbers))


def overheard(algorithm: Algorithm, numbers: list[Integers]) -> Callable[..., Iterator[Answer]]:
    """`respond`, of which each member remembers what it sent."""

    def respond(theta: Tensor, terms: Terms, agents: Sequence[Agent], engine: Engine) -> Iterator[Answer]:
        for answer in algorithm.respond(theta, terms, agents, engine):
            numbers.append(answer.values.copy())
            yield answer

    return respond


def _records(count: int, first: float | None) -> tuple[Tensor, Tensor]:
    x, y = torch.ones(count, INPUTS), torch.zeros(count, dtype=torch.int64)
    if first is not None:
        x[0], y[0] = first, 1
    return x, y


def worst_pair(plan: Plan) -> tuple[float, float | None]:
    """The first member's worst record, and what is in its place under the plan's relation."""
    large = BEYOND * plan.clip_norm
    return large, None if plan.neighbours == "add-remove" else -large


def score(target: Summed, view: Integers, shares: int) -> float:
    """How much the worst record shows in what is left of a sum over so many members: 1 on average where it is there, 0
    without it, −1 with its opposite."""
    assert target.algorithm.mean is not None
    plan, terms = target.plan, target.terms(0)
    update = target.algorithm.mean(view, shares, terms)
    values: Floats = update.values.astype(np.float64) * (shares * plan.batch / (-terms.local_lr * terms.scale))
    active = terms.coordinates(update.mask_seed)
    direction = _direction()[slice(None) if active is None else active]
    return float(values @ direction / (np.linalg.norm(direction) * plan.clip_norm))


def _direction() -> Floats:
    """The worst record's gradient: +x on the first row of weights, −x on the second; its biases hardly count."""
    direction = np.zeros(DIMENSION)
    direction[:INPUTS], direction[INPUTS : 2 * INPUTS] = 1.0, -1.0
    return direction
