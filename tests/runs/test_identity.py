"""Digests of modules: by the values that a module holds, and by nothing that another process has otherwise.

A set of objects was named by their addresses, so that no run with one could be resumed; arrays of numpy and ranges did
not count at all.
"""

from __future__ import annotations

import functools
import warnings
from collections import deque
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn

from fedspa.runs import identity


class Part:
    def __init__(self, size: int) -> None:
        self.size = size


@pytest.mark.parametrize(
    "made",
    [
        Part,
        lambda size: {Part(size), Part(7)},
        lambda size: np.arange(size),
        np.float32,
        lambda size: np.array([Part(size)]),
        range,
        slice,
        lambda size: deque([size]),
        lambda size: functools.partial(max, size),
        lambda size: {"inside": [Fraction(1, size)]},
    ],
)
def test_what_a_module_holds_counts_by_its_values(made: Callable[[int], object]) -> None:
    def holding(size: int) -> str:
        module = nn.Sequential(nn.Linear(3, 2))
        module.held = made(size)  # type: ignore[assignment]
        return identity.digest_code(module)

    assert holding(3) == holding(3)
    assert holding(3) != holding(4)


def test_values_that_are_made_of_trained_ones_do_not_count() -> None:
    def first_values(seed: int) -> str:
        torch.manual_seed(seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is the old one
            return identity.digest_code(nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 2))))

    assert first_values(1) == first_values(2)


def test_a_set_that_holds_its_own_module_comes_to_an_end() -> None:
    module = nn.Sequential(nn.Linear(3, 2))
    module.family = {module, Part(1)}  # type: ignore[assignment]
    assert len(identity.digest_code(module)) == 32
