"""What comes in under secure aggregation: one masked message of each member, of which nothing can be read but the
sum."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedspa.algorithms import Algorithm, Terms
from fedspa.secagg.session import Session
from fedspa.secagg.total import MaskedSum


class MaskedIntake:
    """The messages of one attempt at a round. There is a mean when every member's has come, and none before."""

    log_clips = 0.0  # sums have a clip value that is given

    def __init__(self, terms: Terms, algorithm: Algorithm, session: Session) -> None:
        self._terms = terms
        self._algorithm = algorithm
        self._sum = MaskedSum(session)
        self.uplink_bytes = 0

    @property
    def count(self) -> int:
        return len(self._sum.session.members) - len(self._sum.missing)

    def take(self, member: str, payload: bytes) -> None:
        """Add one member's message, or raise a PayloadError and add nothing."""
        self._sum.add(member, payload)
        self.uplink_bytes += len(payload)

    def mean(self) -> NDArray[np.float64]:
        """The uniform average over the cohort; Void where there is none."""
        assert self._algorithm.mean is not None
        update = self._algorithm.mean(self._sum.values(), len(self._sum.session.members), self._terms)
        coordinates = self._terms.coordinates(update.mask_seed)
        mean = np.zeros(self._terms.dimension)
        mean[slice(None) if coordinates is None else coordinates] = update.values
        return mean
