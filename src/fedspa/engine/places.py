"""The places of an agent's records, for engines that take records together.

Batches are drawn among places, not among records. Where a record is missing its place is empty: others keep theirs, and
a batch has the same number of places with it and without. So the place of a record, and everything that rounding makes
of it, is independent of which other records there are, as long as neighbours have equally many places. That holds for
fixed-size sampling, whose neighbours have equally many records; for Poisson sampling a site names the number (`room`).

Where a number of places is named, records are dealt to them at random, for each participation anew: a file from which
a record was taken out, or that is kept sorted, has the others in other lines, and their places must not tell. They are
dealt even where no place stays empty, since that file less a record would be.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedspa.errors import DataError
from fedspa.privacy.event import Sampling
from fedspa.randomness.streams import Stream, derive_key

EMPTY = -1


class Places:
    """Which record has which place in a participation. Without a room, each has the place of its number."""

    def __init__(self, records: int, room: int | None, sampling: Sampling, key: bytes) -> None:
        """`room` is public. Fixed-size sampling leaves no place empty: there it says only that records are dealt."""
        self.count = records if room is None or sampling == "fixed" else room
        if self.count < records:
            raise DataError(f"{records} records do not fit into room for {self.count}")
        self._records: NDArray[np.int64] | None = None
        if room is not None:
            self._records = np.full(self.count, EMPTY, dtype=np.int64)
            self._records[dealt(records, self.count, key)] = np.arange(records)

    def records(self, places: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_] | None]:
        """Their records, and which places have one; None where all do, and any record where there is none."""
        if self._records is None:
            return places, None
        found = self._records[places]
        return np.maximum(found, 0), found != EMPTY


def dealt(records: int, places: int, key: bytes) -> NDArray[np.int64]:
    """The place of each record: of all ways to deal them, each is equally likely."""
    return np.argsort(Stream(derive_key(key, "places")).uniform(places), kind="stable")[:records]
