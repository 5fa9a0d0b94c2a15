"""Digests of modules: by the values that a module holds, and by nothing that another process has otherwise.

A set of objects was named by their addresses, so that no run with one could be resumed; arrays of numpy, slots, ranges
and cached functions did not count at all.
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

from fedspa.runs import digest


class Part:
    def __init__(self, size: int) -> None:
        self.size = size


class Slotted:
    __slots__ = ("size",)

    def __init__(self, size: int) -> None:
        self.size = size


@pytest.mark.parametrize(
    "made",
    [
        Part,
        Slotted,
        lambda size: {Part(size), Part(7)},
        lambda size: np.arange(size),
        np.float32,
        lambda size: np.array([Part(size)]),
        range,
        slice,
        lambda size: deque([size]),
        lambda size: functools.lru_cache(functools.partial(max, size)),
        lambda size: {"inside": [Fraction(1, size)]},
    ],
)
def test_what_a_module_holds_counts_by_its_values(made: Callable[[int], object]) -> None:
    def holding(size: int) -> str:
        module = nn.Sequential(nn.Linear(3, 2))
        module.held = made(size)  # type: ignore[assignment]
        return digest.of_module(module)

    assert holding(3) == holding(3)
    assert holding(3) != holding(4)


def test_values_that_are_made_of_trained_ones_do_not_count() -> None:
    def first_values(seed: int) -> str:
        torch.manual_seed(seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is the old one
            return digest.of_module(nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 2))))

    assert first_values(1) == first_values(2)


def test_a_set_that_holds_its_own_module_comes_to_an_end() -> None:
    module = nn.Sequential(nn.Linear(3, 2))
    module.family = {module, Part(1)}  # type: ignore[assignment]
    assert len(digest.of_module(module)) == 32


def test_a_name_of_the_file_counts_where_it_is_read_and_not_where_an_attribute_has_it() -> None:
    def module(**names: object) -> str:
        scope = {"__name__": "notebook", "nn": nn, **names}
        exec(  # a file of its own, or a notebook, whose names move on
            "class Net(nn.Module):\n"
            "    def __init__(self):\n"
            "        super().__init__()\n"
            "        self.layer, self.scale = nn.Linear(3, 2), 2.0\n"
            "    def forward(self, x):\n"
            "        return [self.layer(each) * self.scale * SLOPE for each in x]\n",
            scope,
        )
        made = scope["Net"]()  # type: ignore[operator]
        return digest.of_module(made)

    assert module(scale=1, SLOPE=1) == module(scale=2, SLOPE=1)
    assert module(scale=1, SLOPE=1) != module(scale=1, SLOPE=2)
