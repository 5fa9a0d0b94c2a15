"""Records as a run wants them: some of the training records held out, each record as its features."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from fedspa.data.datasets import Dataset
from fedspa.data.features import Features, transform
from fedspa.errors import DataError


def view(data: Dataset, features: Features | None, holdout: float, *, alone: bool = False) -> Dataset:
    """`holdout` of the training records, the same in every run, stand in for the test records; then the features."""
    if holdout > 0:
        data = _held_out(data, holdout)
    if features is not None:
        train_x, test_x = (transform(features, x, alone=alone) for x in (data.train_x, data.test_x))
        data = replace(data, train_x=train_x, test_x=test_x)
    return data


def _held_out(data: Dataset, share: float) -> Dataset:
    count = round(share * len(data.train_y))
    if not 0 < count < len(data.train_y):
        raise DataError(
            f"data.holdout is {share:g}; of {len(data.train_y)} training records it leaves none on one side: choose "
            "another share"
        )
    # Not the run's seed: settings are compared over seeds on the same held-out records.
    order = torch.from_numpy(np.random.Generator(np.random.PCG64(0)).permutation(len(data.train_y)))
    kept, out = order[count:].sort().values, order[:count].sort().values
    return replace(
        data,
        train_x=data.train_x[kept],
        train_y=data.train_y[kept],
        test_x=data.train_x[out],
        test_y=data.train_y[out],
    )
