"""What comes in: the payloads of one round, from anyone, held to what the terms allow."""

from __future__ import annotations

import math
from collections.abc import Container

import numpy as np
from numpy.typing import NDArray

from fedspa.algorithms import Algorithm, Terms
from fedspa.server.aggregate import Aggregator
from fedspa.wire.payload import Coding


class Intake:
    """The payloads of one round, each validated and added as it comes; memory does not grow with their number."""

    def __init__(self, terms: Terms, algorithm: Algorithm, coding: Coding, most: int) -> None:
        self._terms = terms
        self._algorithm = algorithm
        self._coding = coding
        self.total = Aggregator(terms.dimension, terms.update_bound, max(1, most))
        self.log_clips = 0.0
        self.uplink_bytes = 0

    @property
    def count(self) -> int:
        return self.total.count

    def take(self, payload: bytes, *, seed: bytes | None = None, seen: Container[bytes] = frozenset()) -> None:
        """Add one payload, or raise a PayloadError and add nothing.

        `seed` is the mask seed that this agent was dealt; agents that draw their own are held against `seen`.
        """
        update = self._algorithm.decode(payload, self._terms, self._coding, seed, seen)
        self.total.add(update, self._terms.coordinates(update.mask_seed))
        self.log_clips += math.log(self._plausible(update.clip_value))
        self.uplink_bytes += len(payload)

    def mean(self) -> NDArray[np.float64]:
        """The uniform average over what was taken."""
        return self.total.mean()

    def _plausible(self, clip_value: float) -> float:
        """A private clip, held to where its steps can lead: one agent's word must not move all others'."""
        plan = self._terms.plan
        if plan is None:
            return 1.0
        reach = plan.clip_growth
        return min(max(clip_value, plan.clip_value / reach), plan.clip_value * reach)
