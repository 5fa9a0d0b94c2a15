"""The average of the updates of a round, whatever their number and the order in which they come.

Sums are kept in 64-bit fixed point: addition of integers is associative, so the same updates give the same bits in any
order, on any machine. The unit is a power of two small enough for rounding to vanish (2^−62 of the largest sum that
can occur, or up to twice that, against float32's 2^−24 of a value) and large enough that no sum can overflow.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from fedspa.errors import PayloadError
from fedspa.randomness.mask import active_coordinates
from fedspa.wire.payload import FLOAT32_MAX, Update


class Aggregator:
    """Adds updates into one accumulator of length d; memory does not grow with the number of agents.

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
        """How many updates were added."""
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
        units = np.rint(update.values.astype(np.float64) / self._unit).astype(np.int64)
        if update.active == self.dimension:
            self._sums += units
        else:
            if coordinates is None:
                coordinates = active_coordinates(update.mask_seed, self.dimension, update.active)
            # A mask's coordinates are distinct, so plain indexing adds each value once.
            self._sums[coordinates] += units
        self._count += 1

    def mean(self) -> NDArray[np.float64]:
        """The uniform average over the updates added; a coordinate outside an update's mask counts as 0 in it."""
        if self._count == 0:
            raise ValueError("no update was added: there is nothing to average")
        mean = self._sums.astype(np.float64)
        mean *= self._unit / self._count
        return mean
