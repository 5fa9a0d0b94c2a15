"""A few records of the benchmarks' shapes, for runs of a fraction of a second."""

from __future__ import annotations

import torch

from fedspa.data.dataset import Dataset
from fedspa.paper import stand_in


def mnist() -> Dataset:
    return _few(stand_in.mnist())


def cifar10() -> Dataset:
    return _few(stand_in.cifar10())


def _few(data: Dataset) -> Dataset:
    kept = torch.arange(240)
    train, test = (data.train_x[kept], data.train_y[kept]), (data.test_x[kept[:100]], data.test_y[kept[:100]])
    return Dataset(*train, *test, classes=data.classes, name=data.name)
