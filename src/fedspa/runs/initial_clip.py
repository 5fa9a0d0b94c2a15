"""The paper's clip value: a median read off the data in an initialisation round. Not private, and flagged so.

The paper takes the median of all absolute gradient values; on MNIST that is 0, because half of the coordinates are
exactly 0, so ours is over the non-zero values.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedspa.engine.generic import GenericEngine

if TYPE_CHECKING:
    from fedspa.runs.setup import Job

# Enough for a stable median; the paper does not say how many it took.
AGENTS, RECORDS = 10, 10


def median_clip(job: Job, theta: Tensor) -> float:
    """Median over examples of a few agents at θ₀: of |g_j| ≠ 0 for `coordinate`, of the active part's norm for `l2`."""
    assert job.plan is not None
    chosen = [i for held in job.holdings[:AGENTS] for i in held[:RECORDS]]
    index = torch.tensor(chosen)
    x, y = job.data.train_x[index].to(theta.device), job.data.train_y[index].to(theta.device)
    rows = torch.cat(list(GenericEngine(job.model.module).rows(theta, x, y, None)))
    if job.plan.clip == "coordinate":
        magnitudes = rows.abs()
        return float(magnitudes[magnitudes > 0].median())
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1)
    return float(norms.median()) * math.sqrt(job.plan.compression)
