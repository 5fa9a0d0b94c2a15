"""A few records of the benchmarks' shapes, for runs of a fraction of a second."""

from __future__ import annotations

import numpy as np
import torch

from fedspa.data.datasets import Dataset, from_arrays
from fedspa.paper import stand_in


def mnist() -> Dataset:
    return _few(stand_in.mnist())


def cifar10() -> Dataset:
    return _few(stand_in.cifar10())


def visits() -> Dataset:
    """120 patients with one to six visits each."""
    rng = np.random.default_rng(0)
    persons = rng.permutation(np.repeat(np.arange(120), rng.integers(1, 7, 120)))
    y = rng.integers(0, 3, len(persons))
    x = rng.normal(size=(len(persons), 6)) + 2 * y[:, None]
    return from_arrays(x, y, x[:60], y[:60], name="visits", persons=persons)


def _few(data: Dataset) -> Dataset:
    kept = torch.arange(240)
    train, test = (data.train_x[kept], data.train_y[kept]), (data.test_x[kept[:100]], data.test_y[kept[:100]])
    return Dataset(*train, *test, classes=data.classes, name=data.name)
