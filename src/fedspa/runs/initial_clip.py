"""The paper's clip value: a median read off the data in an initialisation round. Not private, and flagged so.

The paper takes the median of all absolute gradient values; on MNIST that is 0, because half of the coordinates are
exactly 0, so ours is over the non-zero values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedspa.engine.generic import GenericEngine
from fedspa.examples import Examples, moved, taken
from fedspa.learning.flat import FlatModel
from fedspa.mechanisms import Plan

# Enough for a stable median; the paper does not say how many it took.
AGENTS, RECORDS = 10, 10


def median_clip(plan: Plan, model: FlatModel, train: Examples, holdings: Sequence[NDArray[np.int64]]) -> float:
    """Median over examples of a few agents at θ₀: of |g_j| ≠ 0 for `coordinate`, of the active part's norm for `l2`."""
    theta = model.flatten()
    chosen = [i for held in holdings[:AGENTS] for i in held[:RECORDS]]
    index = torch.tensor(chosen)
    x, y = (moved(taken(tree, index), theta.device) for tree in train)
    rows = torch.cat(list(GenericEngine(model.module, model.task).rows(theta, x, y, None)))
    if plan.clip == "coordinate":
        magnitudes = rows.abs()
        return float(magnitudes[magnitudes > 0].median())
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1)
    return float(norms.median()) * math.sqrt(plan.compression)
