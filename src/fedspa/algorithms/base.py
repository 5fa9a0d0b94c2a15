"""The parts of every algorithm: the terms of a round, its agents, their answers, and the encoding of an answer."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedspa.algorithms.algorithm import Algorithm
from fedspa.engine.optimizer import SGD, LocalOptimizer
from fedspa.errors import PayloadError, PrivacyError
from fedspa.examples import Examples, Tree, count, taken
from fedspa.mechanisms import Plan
from fedspa.mechanisms.base import STEPS, NoPlan
from fedspa.randomness.mask import MaskMode, active_coordinates, layered_coordinates, scale
from fedspa.randomness.streams import NoiseMode
from fedspa.secagg.keys import SecretKey
from fedspa.secagg.session import Session, threshold_of
from fedspa.wire.payload import FLOAT32_MAX, Coding, Expected, Update, decode, encode, step_size

ServerStep = Literal["adam", "average", "momentum"]  # server/optimizers.py
# Without clipping nothing bounds an update; a weight that moves this far in a round belongs to a diverged model.
UNCLIPPED_BOUND = 1e4
logger = logging.getLogger("fedspa.agent")  # stays with the agent; nothing that travels may say what it says
A = TypeVar("A")
P = TypeVar("P", bound=Plan)


@dataclass(frozen=True, slots=True)
class Terms:
    """What the server announces for one round, beside θ. The agent's policy checks these before any data is read.

    `steps` is the plan, which alone says how agents sample, clip and noise; a `NoPlan` where nothing is private
    (FedAvg). `mask_seed` is given where all agents use one mask (`shared`, `fixed`), and None where each draws its own.
    `layers` are (d_j, k_j) where the mask is drawn layer by layer. `options` are those of the algorithm that the plan
    does not state, and `optimizer` is what agents make of their noisy gradients.
    """

    round: int
    mask: MaskMode
    mask_seed: bytes | None
    local_lr: float
    steps: Plan | NoPlan
    layers: tuple[tuple[int, int], ...] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    optimizer: LocalOptimizer = SGD

    @property
    def plan(self) -> Plan | None:
        return None if isinstance(self.steps, NoPlan) else self.steps

    def plan_of(self, kind: type[P]) -> P:
        """Return the plan, which the algorithm's mechanism makes."""
        if not isinstance(self.steps, kind):
            raise PrivacyError(f"the terms hold no {kind.__name__}: {self.steps}")
        return self.steps

    @property
    def dimension(self) -> int:
        return self.steps.dimension

    @property
    def active(self) -> int:
        return self.steps.active

    def coordinates(self, seed: bytes) -> NDArray[np.int64] | None:
        """Return the mask ω that `seed` picks under these terms; None where every coordinate is active."""
        if self.active == self.dimension:
            return None
        return _drawn(seed, self.dimension, self.active, self.layers).copy()

    @property
    def scale(self) -> float:
        """The factor of the active coordinates under S: d/k or 1."""
        return scale(self.mask, self.dimension, self.active)

    @property
    def update_noise(self) -> float:
        """Standard deviation of the noise in each value of Δ."""
        return 0.0 if self.plan is None else self.optimizer.update_noise(self.plan, self.local_lr, self.scale)

    @property
    def update_bound(self) -> float:
        """A value of Δ beyond this is no honest agent's: the server refuses it."""
        if self.plan is None:
            return UNCLIPPED_BOUND
        return self.optimizer.update_bound(self.plan, self.local_lr, self.scale)


def check_sendable(terms: Terms, coding: Coding, *, exact: bool) -> None:
    """Raise a PayloadError or PrivacyError where these public numbers allow no update, whatever the records: an agent
    asks before it pays."""
    if not terms.update_bound <= FLOAT32_MAX:
        raise PayloadError("bound", f"values of up to {terms.update_bound:.3g} pass float32; take a smaller local rate")
    if coding == "int":
        step_size(terms.update_noise)
    if terms.plan is not None:
        terms.plan.check_sendable(exact=exact)


@lru_cache(maxsize=16)  # agents that share a mask, or a simulation's agents and their server, draw it once
def _drawn(seed: bytes, dimension: int, active: int, layers: tuple[tuple[int, int], ...] | None) -> NDArray[np.int64]:
    return active_coordinates(seed, dimension, active) if layers is None else layered_coordinates(seed, layers)


@dataclass(frozen=True, slots=True)
class Agent:
    """A data holder in one round: its records, its own mask seed (public) and its own key (private).

    `take` gives its records. With `rows`, they are rows of a pool that holds others' too, as in a simulation; without,
    they are the whole pool. `max_records` is a public number of slots for its records (engine/local.py); None where
    their own number is public. `secret` is what it masks its update with under secure aggregation.
    """

    number: int
    pool_x: Tree
    pool_y: Tree
    mask_seed: bytes
    key: bytes
    exact: bool = False
    rows: Tensor | None = None
    max_records: int | None = None
    secret: SecretKey | None = None

    @property
    def records(self) -> int:
        """Return the number of its records."""
        return count(self.pool_y) if self.rows is None else len(self.rows)

    def take(self, index: Tensor) -> Examples:
        """Return copies of the records with these indices."""
        index = index if self.rows is None else self.rows[index]
        return Examples(taken(self.pool_x, index), taken(self.pool_y, index))

    def log_zeroed(self, terms: Terms, zeroed: int, examples: str) -> None:
        if zeroed:
            logger.warning(
                "agent %d, round %d: %d of the %s had a gradient that was not finite and counted as zero",
                *(self.number, terms.round, zeroed, examples),
            )


def made_ahead(answer: Callable[[Agent], A], agents: Sequence[Agent], threads: int) -> Iterator[A]:
    """Yield the answers of all agents of a round, made ahead in `threads` threads; few are held at a time."""
    with ThreadPoolExecutor(threads) as pool:
        ahead: deque[Future[A]] = deque()
        for agent in agents:
            ahead.append(pool.submit(answer, agent))
            if len(ahead) > threads:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


class Answer(Protocol):
    """What an agent releases in a round, before it is encoded. Each mechanism has its own."""

    @property
    def values(self) -> NDArray[Any]: ...


@dataclass(frozen=True, slots=True, eq=False)
class IntegerUpdate:
    """An answer in whole numbers: one for each coordinate that travels. `seed` is the mask's, or of what else is
    public."""

    round: int
    dimension: int
    seed: bytes
    values: NDArray[np.int64]


def encode_values(answer: Answer, terms: Terms, coding: Coding) -> bytes:
    """Noisy real values, at a step hidden in their noise where the coding has one.

    A value that cannot be sent is replaced by the nearest one that can, so that the presence of an answer reveals
    nothing about the values.
    """
    assert isinstance(answer, Update)
    return encode(answer, coding, terms.update_noise)


def finite(answer: Answer) -> Answer:
    """Return the answer, or a PayloadError: for simulations, where nothing leaves and divergence must be noticed."""
    if not np.isfinite(answer.values).all():
        raise PayloadError("not-finite", "a value is NaN or infinite")
    return answer


def decode_values(payload: bytes, terms: Terms, coding: Coding, seed: bytes | None, seen: Container[bytes]) -> Update:
    """Inverse of `encode_values`, or a PayloadError. `seed` is the mask seed that the agent was given, `seen` are those
    in use."""
    expected = Expected(
        round=terms.round,
        dimension=terms.dimension,
        active=terms.active,
        bound=terms.update_bound,
        noise_std=terms.update_noise,
        codings=frozenset({coding}),
        seed=terms.mask_seed or seed,
        seen=seen,
    )
    return decode(payload, expected)


# Models scored by agents: a round in which nobody trains, under the run's own event.
#
# The terms of such a round are the run's with the plan's noise on another vector: one number per model, between −1 and
# 1 for each record, in place of a gradient on k coordinates. Batch, steps, sampling, noise multiplier and unit are the
# plan's, so its event is the plan's, and a score costs what a training costs.

MOST_MODELS = 64


def score_plan(plan: Plan | None, models: int) -> Plan:
    """Return the plan of scores of so many models."""
    if not 1 <= models <= MOST_MODELS:
        raise PrivacyError(f"{models} models are to be scored; 1 to {MOST_MODELS} are allowed")
    if (found := None if plan is None else plan.scoring(models)) is None:
        raise PrivacyError("agents score under Gaussian noise that each adds alone; this plan has another")
    return found


def score_terms(terms: Terms, models: int) -> Terms:
    """Return the terms of a round in which so many models are scored, from the terms of its training."""
    plan = score_plan(terms.plan, models)
    return replace(terms, steps=plan, local_lr=1 / plan.local_steps, layers=None, optimizer=SGD)


def share(value: float) -> float:
    """Return the score from 0 to 1 that a mean of 2s − 1 stands for."""
    return (1 + value) / 2


def deviation(plan: Plan | None, models: int, agents: int) -> float:
    """Return the standard deviation of the noise in each score of the mean over so many agents: a public number."""
    steps = score_plan(plan, models)
    return steps.update_noise(1 / steps.local_steps, 1.0) / 2 / math.sqrt(agents)


# The session of a round under secure aggregation: what its members and its server must agree on.
#
# The digest in it covers everything that makes an update what it is: the algorithm, the terms with the whole plan, the
# coding, the noise, and θ to the bit. docs/secagg.md writes it out.


def session_of(
    run: str,
    attempt: int,
    members: Mapping[str, bytes],
    algorithm: Algorithm,
    terms: Terms,
    theta: Tensor,
    coding: Coding,
    noise: NoiseMode | None,
    *,
    recovery: bool = False,
) -> Session:
    """Return the session of these members, by name and public key, whose sum can be recovered from silence or not; a
    PrivacyError where they are fewer than the plan's ε needs, or where the plan wants no sum."""
    aggregation = None if terms.plan is None else terms.plan.aggregation
    if aggregation is None:
        raise PrivacyError("the terms hold no plan of a sum: its updates are noisy enough by themselves")
    if len(members) < aggregation.members:
        raise PrivacyError(f"a cohort of {len(members)} members; the plan's ε holds from {aggregation.members} on")
    threshold = threshold_of(len(members), aggregation.colluders) if recovery else 0
    if threshold > aggregation.members:
        raise PrivacyError(
            f"sums of at least {aggregation.members} of {len(members)} members cannot be recovered: with "
            f"{aggregation.colluders} colluding, {threshold} members must agree on whom a sum is of"
        )
    digest = hashlib.sha256(_agreed(algorithm, terms, theta, coding, noise)).digest()
    return Session(
        *(run, terms.round, attempt, members, digest, aggregation.low, aggregation.high, aggregation.count),
        threshold=threshold,
        least=aggregation.members if recovery else 0,
    )


def _agreed(algorithm: Algorithm, terms: Terms, theta: Tensor, coding: Coding, noise: NoiseMode | None) -> bytes:
    """JSON with its keys in order and no blanks. Numbers that are not whole are written as hexadecimal floats."""
    assert algorithm.mechanism is not None
    values = np.ascontiguousarray(theta.detach().cpu().numpy(), dtype="<f4")
    agreed = {
        "adversary": algorithm.adversary,
        "algorithm": algorithm.name,
        "coding": coding,
        "layers": None if terms.layers is None else [list(layer) for layer in terms.layers],
        "local_lr": terms.local_lr,
        "mask": terms.mask,
        "mask_seed": None if terms.mask_seed is None else terms.mask_seed.hex(),
        "noise": noise,
        **({"options": dict(terms.options)} if terms.options else {}),
        "plan": {key: getattr(terms.steps, key) for key in (*STEPS, *algorithm.mechanism.announced)},
        "round": terms.round,
        "theta": hashlib.sha256(values.tobytes()).hexdigest(),
    }
    return json.dumps(_written(agreed), sort_keys=True, separators=(",", ":")).encode("ascii")


def _written(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _written(part) for key, part in value.items()}
    return value.hex() if isinstance(value, float) else value
