"""The records. Replace `load` by a function that reads your own."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FEATURES = 5


def load() -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float32], NDArray[np.int64]]:
    """(train_x, train_y, test_x, test_y): training records, which are partitioned among the agents, and held-out ones.

    x has one row per record (a vector, or an image of any shape), y has labels 0, 1, 2 and so on.

    Scale features by constants that you know without looking at the records (units, physical ranges): a mean or a
    maximum that is computed from private records is a release of its own, and no ε counts it.
    """
    random = np.random.default_rng(0)
    x = random.normal(size=(2000, FEATURES)).astype(np.float32)
    y = (x[:, 0] * x[:, 1] > 0).astype(np.int64)
    return x[:1600], y[:1600], x[1600:], y[1600:]
