"""The paper's clip value: a median read off the data in an initialisation round. Not private.

    python -m reproduction.median_clip reproduction/configs/mnist-published.toml --data DIR

prints it for a config; the configs `*-published` have it typed in.

The paper takes the median of all absolute gradient values; on MNIST that is 0, because half of the coordinates are
exactly 0, so ours is over the non-zero values.
"""

from __future__ import annotations

import argparse
import json
import math

import torch
from torch import Tensor

from fedspa.engine.per_example import PerExampleEngine
from fedspa.examples import moved, taken
from fedspa.runs.config import load
from fedspa.runs.setup import Simulated, prepare

# Enough for a stable median; the paper does not say how many it took.
AGENTS, RECORDS = 10, 10


def median_clip(job: Simulated) -> float:
    """Median over examples of a few agents at θ₀: of |g_j| ≠ 0 for `coordinate`, of the active part's norm for `l2`."""
    plan, model, train, holdings = job.plan, job.server.model, job.train, job.holdings
    assert plan is not None
    theta = model.flatten()
    chosen = [i for held in holdings[:AGENTS] for i in held[:RECORDS]]
    index = torch.tensor(chosen)
    x, y = (moved(taken(tree, index), theta.device) for tree in train)
    rows = torch.cat(list(PerExampleEngine(model.module, model.task).rows(theta, x, y, None)))
    if plan.clip == "coordinate":
        magnitudes = rows.abs()
        return float(magnitudes[magnitudes > 0].median())
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1)
    return float(norms.median()) * math.sqrt(plan.compression)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("--data", default="data", help="folder with the data's files")
    arguments = parser.parse_args()
    print(f"{median_clip(prepare(load(arguments.config, [f'data.dir={json.dumps(arguments.data)}']))):.4g}")
