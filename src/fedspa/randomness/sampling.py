"""Mini-batches as the accountants assume them: Poisson, or fixed-size uniform without replacement, fresh each step.

Shuffled epochs are neither: their privacy is not the one that either accountant computes, so there is no such sampler
here. The draws come from the agent's private stream, because amplification by sampling holds only against someone who
cannot tell which records were drawn.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedspa.privacy.event import Sampling
from fedspa.randomness.streams import Stream

Indices = NDArray[np.int64]


def draw_batch(sampling: Sampling, batch: int, rate: float, records: int, stream: Stream) -> Indices:
    """One step's records, as sorted indices below `records`.

    `poisson`: each record with chance `rate`, independently: any size from 0 to `records` is normal.
    `fixed`: exactly `batch` records, every subset equally likely.
    """
    if sampling == "poisson":
        return np.flatnonzero(stream.uniform(records) < rate).astype(np.int64)
    return stream.choice_without_replacement(records, batch)
