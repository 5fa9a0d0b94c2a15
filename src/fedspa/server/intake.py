"""The payloads of one round, from anyone, checked against the terms: each read by itself, or under secure aggregation
one masked message of each member, of which only the sum can be read."""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from fedspa import compiled
from fedspa.algorithms import Algorithm, Terms
from fedspa.errors import PayloadError
from fedspa.randomness.mask import active_coordinates
from fedspa.secagg.masking import MaskedSum
from fedspa.secagg.recovery import Ask, RecoverableSum, Step
from fedspa.secagg.session import Session
from fedspa.wire.payload import FLOAT32_MAX, Coding, Update


class Intake:
    """The payloads of one round, each validated and added as it comes; memory does not grow with their number."""

    def __init__(self, terms: Terms, algorithm: Algorithm, coding: Coding, most: int) -> None:
        self._terms = terms
        self._algorithm = algorithm
        self._coding = coding
        self.total = Aggregator(terms.dimension, terms.update_bound, max(1, most))
        self.uplink_bytes = 0

    @property
    def count(self) -> int:
        return self.total.count

    def take(self, payload: bytes, *, seed: bytes | None = None, seen: Container[bytes] = frozenset()) -> Update:
        """Add one payload and return its update, or raise a PayloadError and add nothing.

        `seed` is the mask seed that this agent was given; those that agents draw are compared with `seen`.
        """
        update = self._algorithm.decode(payload, self._terms, self._coding, seed, seen)
        self.total.add(update, self._terms.coordinates(update.mask_seed))
        self.uplink_bytes += len(payload)
        return update

    def mean(self) -> NDArray[np.float64]:
        """Return the uniform average over what was taken."""
        return self.total.mean()


class MaskedIntake:
    """The messages of one attempt at a round. There is a mean when every member's has come, or when the sum of the
    others was recovered."""

    def __init__(self, terms: Terms, algorithm: Algorithm, session: Session) -> None:
        self._terms = terms
        self._algorithm = algorithm
        self._sum = RecoverableSum(session) if session.threshold else MaskedSum(session)
        self.uplink_bytes = 0

    @property
    def count(self) -> int:
        """The number of members whose values are in the sum, where there is one."""
        return self._sum.members

    def take(self, member: str, payload: bytes) -> None:
        """Add one member's message, or raise a PayloadError and add nothing."""
        self._sum.add(member, payload)
        self.uplink_bytes += len(payload)

    def recover(self, ask: Ask, among: Collection[str] | None = None) -> None:
        """Agree with the members on whom the sum is of, all of them `among` those named, and take the masks off it
        (secagg/recovery.py)."""
        assert isinstance(self._sum, RecoverableSum)

        def counted(step: Step, questions: Mapping[str, bytes]) -> Iterator[tuple[str, bytes]]:
            for name, reply in ask(step, questions):
                self.uplink_bytes += len(reply)
                yield name, reply

        self._sum.recover(counted, among)

    def mean(self) -> NDArray[np.float64]:
        """Return the uniform average over the members that count; Void where there is no sum of them."""
        assert self._algorithm.mean is not None
        update = self._algorithm.mean(self._sum.values(), self._sum.members, self._terms)
        coordinates = self._terms.coordinates(update.mask_seed)
        mean = np.zeros(self._terms.dimension)
        mean[slice(None) if coordinates is None else coordinates] = update.values
        return mean


class Aggregator:
    """Adds updates into one accumulator of length d; memory does not grow with the number of agents.

    Sums are kept in 64-bit fixed point: addition of integers is associative, so the same updates give the same bits in
    any order, on any machine. The unit is a power of two small enough for rounding to vanish (2^−62 of the largest sum
    that can occur, or up to twice that, against float32's 2^−24 of a value) and large enough that no sum can overflow.

    `bound` is the largest |value| that may be added and `most_updates` the most updates: they set the unit.
    """

    def __init__(self, dimension: int, bound: float, most_updates: int) -> None:
        if most_updates < 1:
            raise ValueError(f"most_updates is {most_updates}; it must be at least 1")
        if not 0 < bound <= FLOAT32_MAX:
            raise ValueError(f"bound is {bound}; it must be positive and at most float32's largest")
        self.dimension = dimension
        self.bound = bound
        self.most_updates = most_updates
        # frexp rounds the exponent up: bound · most_updates ≤ 2^exponent, so sums stay within 2^62 (and its rounding).
        self._unit = math.ldexp(1.0, math.frexp(bound * most_updates)[1] - 62)
        self._sums = np.zeros(dimension, dtype=np.int64)
        self._count = 0

    @property
    def count(self) -> int:
        """The number of updates added."""
        return self._count

    def add(self, update: Update, coordinates: NDArray[np.int64] | None = None) -> None:
        """Add one update; `coordinates` is its mask where that is already at hand (else it is drawn from the seed)."""
        if update.dimension != self.dimension:
            raise PayloadError("dimension", f"dimension is {update.dimension}; {self.dimension} was expected")
        if self._count >= self.most_updates:
            raise PayloadError("count", f"{self.most_updates} updates were announced and have come; start a new round")
        # Written so that NaN fails too.
        if not float(np.max(np.abs(update.values))) <= self.bound:
            raise PayloadError("bound", f"a value is not within the plausible bound, {self.bound:.3g}")
        if update.active == self.dimension:
            coordinates = None
        elif coordinates is None:
            coordinates = active_coordinates(update.mask_seed, self.dimension, update.active)
        self._add_units(update.values, coordinates)
        self._count += 1

    def _add_units(self, values: NDArray[np.float32], coordinates: NDArray[np.int64] | None) -> None:
        library = compiled.library()
        if coordinates is not None:
            if coordinates.shape != values.shape:
                raise ValueError(f"{len(values)} values for {len(coordinates)} coordinates")
            # The compiled library does not check where it adds.
            if coordinates.dtype != np.int64 or not 0 <= coordinates.min() <= coordinates.max() < self.dimension:
                raise ValueError(f"coordinates must be int64 and lie between 0 and {self.dimension - 1}")
        if library is not None:
            where = None if coordinates is None else compiled.address(coordinates)
            sums = compiled.address(self._sums)
            library.fedspa_add_units(compiled.address(values), where, len(values), self._unit, sums)
            return
        units = np.rint(values.astype(np.float64) / self._unit).astype(np.int64)
        # A mask's coordinates are distinct, so plain indexing adds each value once.
        self._sums[slice(None) if coordinates is None else coordinates] += units

    def mean(self) -> NDArray[np.float64]:
        """Return the uniform average over the updates added; a coordinate outside an update's mask counts as 0 in
        it."""
        if self._count == 0:
            raise ValueError("no update was added: there is nothing to average")
        mean = self._sums.astype(np.float64)
        mean *= self._unit / self._count
        return mean
