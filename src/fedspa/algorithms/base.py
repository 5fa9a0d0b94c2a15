"""What every algorithm is made of: the round's terms, the agents it addresses, how an agent answers them, and how an
answer travels."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedspa.errors import PayloadError
from fedspa.examples import Examples, Tree, count, taken
from fedspa.mechanisms import Plan
from fedspa.mechanisms.base import NoPlan
from fedspa.randomness import sparsify
from fedspa.randomness.mask import active_coordinates, layered_coordinates
from fedspa.randomness.sparsify import MaskMode
from fedspa.secagg.keys import SecretKey
from fedspa.wire.payload import FLOAT32_MAX, Coding, Expected, Update, decode, encode, step_size

ServerStep = Literal["adam", "average", "momentum"]  # server/optimizers.py
# Without clipping nothing bounds an update; a weight that moves this far in a round belongs to a diverged model.
UNCLIPPED_BOUND = 1e4
logger = logging.getLogger("fedspa.agent")  # stays with the agent; nothing that travels may say what it says
A = TypeVar("A")


@dataclass(frozen=True, slots=True)
class Terms:
    """What the server announces for one round, beside θ. The agent's policy judges these before any data is touched.

    `steps` is the plan, which alone says how agents sample, clip and noise; a `NoPlan` where nothing is private
    (FedAvg). `mask_seed` is given where all agents use one mask (`shared`, `fixed`), and None where each draws its own.
    `layers` are (d_j, k_j) where the mask is drawn layer by layer. `options` are those of the algorithm that the plan
    does not state.
    """

    round: int
    mask: MaskMode
    mask_seed: bytes | None
    local_lr: float
    steps: Plan | NoPlan
    layers: tuple[tuple[int, int], ...] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def plan(self) -> Plan | None:
        return None if isinstance(self.steps, NoPlan) else self.steps

    @property
    def dimension(self) -> int:
        return self.steps.dimension

    @property
    def active(self) -> int:
        return self.steps.active

    def coordinates(self, seed: bytes) -> NDArray[np.int64] | None:
        """The mask ω that `seed` picks under these terms; None where every coordinate is active."""
        if self.active == self.dimension:
            return None
        return _drawn(seed, self.dimension, self.active, self.layers).copy()

    @property
    def scale(self) -> float:
        """What S multiplies the active coordinates by: d/k or 1."""
        return sparsify.scale(self.mask, self.dimension, self.active)

    @property
    def update_noise(self) -> float:
        """Standard deviation of the noise in each value of Δ."""
        return 0.0 if self.plan is None else self.plan.update_noise(self.local_lr, self.scale)

    @property
    def update_bound(self) -> float:
        """A value of Δ beyond this is no honest agent's: the server refuses it."""
        return UNCLIPPED_BOUND if self.plan is None else self.plan.update_bound(self.local_lr, self.scale)


def require_sendable(terms: Terms, coding: Coding, *, exact: bool) -> None:
    """Raise a PayloadError or PrivacyError where these public numbers allow no update, whatever the records: an agent
    asks before it pays."""
    if not terms.update_bound <= FLOAT32_MAX:
        raise PayloadError("bound", f"values of up to {terms.update_bound:.3g} pass float32; take a smaller local rate")
    if coding == "int":
        step_size(terms.update_noise)
    if terms.plan is not None:
        terms.plan.require_sendable(exact=exact)


@lru_cache(maxsize=16)  # agents that share a mask, or a simulation's agents and their server, draw it once
def _drawn(seed: bytes, dimension: int, active: int, layers: tuple[tuple[int, int], ...] | None) -> NDArray[np.int64]:
    return active_coordinates(seed, dimension, active) if layers is None else layered_coordinates(seed, layers)


@dataclass(frozen=True, slots=True)
class Agent:
    """A data holder in one round: its records, its own mask seed (public) and its own key (private).

    With `rows`, x and y hold others' records, too, as in a simulation, and its own are those. `room` is a public number
    of places for its records (engine/local.py); None where their own number is public. `secret` is what it masks its
    update with under secure aggregation.
    """

    number: int
    x: Tree
    y: Tree
    mask_seed: bytes
    key: bytes
    exact: bool = False
    rows: Tensor | None = None
    room: int | None = None
    secret: SecretKey | None = None

    @property
    def records(self) -> int:
        """How many it holds."""
        return count(self.y) if self.rows is None else len(self.rows)

    def take(self, index: Tensor) -> Examples:
        """Copies of those of its records."""
        index = index if self.rows is None else self.rows[index]
        return Examples(taken(self.x, index), taken(self.y, index))

    def log_zeroed(self, terms: Terms, zeroed: int, examples: str) -> None:
        if zeroed:
            logger.warning(
                "agent %d, round %d: %d of the %s had a gradient that was not finite and counted as zero",
                *(self.number, terms.round, zeroed, examples),
            )


def made_ahead(answer: Callable[[Agent], A], agents: Sequence[Agent], threads: int) -> Iterator[A]:
    """The answers of all agents of a round, made ahead in so many threads: few are held at a time."""
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

    Values that cannot be sent as they are become the nearest that can, so that whether an agent answers tells nothing
    of them.
    """
    assert isinstance(answer, Update)
    return encode(answer, coding, terms.update_noise)


def finite(answer: Answer) -> Answer:
    """The answer, or a PayloadError: for simulations, where nothing leaves and divergence must be noticed."""
    if not np.isfinite(answer.values).all():
        raise PayloadError("not-finite", "a value is NaN or infinite")
    return answer


def decode_values(payload: bytes, terms: Terms, coding: Coding, seed: bytes | None, seen: Container[bytes]) -> Update:
    """Inverse of `encode_values`, or a PayloadError. `seed` is the mask seed the agent was dealt, `seen` those used."""
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
