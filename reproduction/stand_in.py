"""Records of the benchmarks' shapes, for looking at a whole table where there are no files: not the benchmarks.

Ten blurred patterns under noise: a CNN learns them in a few rounds, and nothing else follows from its accuracy.
"""

from __future__ import annotations

from functools import cache

import torch

from fedspa.data.dataset import Dataset

TRAIN, TEST = 6_000, 500


def mnist() -> Dataset:
    return _patterns((1, 28, 28), "stand-in for mnist")


def cifar10() -> Dataset:
    return _patterns((3, 32, 32), "stand-in for cifar10")


@cache  # a table asks once for every run
def _patterns(shape: tuple[int, int, int], name: str) -> Dataset:
    chance = torch.Generator().manual_seed(0)
    coarse = torch.randn(10, shape[0], 7, 7, generator=chance)
    patterns = torch.nn.functional.interpolate(coarse, size=shape[1:], mode="bilinear")
    y = torch.arange(TRAIN + TEST) % 10
    x = patterns[y] + 0.5 * torch.randn(len(y), *shape, generator=chance)
    return Dataset(x[:TRAIN], y[:TRAIN], x[TRAIN:], y[TRAIN:], classes=10, name=name)
