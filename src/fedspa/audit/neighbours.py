"""Agents that differ in one record, on models through which any record can be the worst there is.

A two-class model has antipodal gradients for the two labels of a record, −p₁·v and p₀·v, whatever its layers: once both
are clipped, they are the two worst records there are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from fedspa.audit.probe import INPUTS, Probe
from fedspa.audit.rows import HUGE
from fedspa.learning.flat import FlatModel
from fedspa.mechanisms import Plan

SIDE = 8
BEYOND, TINY = 1e6, 1e-40

Record = tuple[Tensor, int]
Examples = tuple[Tensor, Tensor]
P = TypeVar("P", bound=Plan)


@dataclass(frozen=True, slots=True)
class TwoClass(Probe):
    """`size` is that of an input on the bound, or of an ordinary one, `far` of one beyond the bound; a record of a
    `full` model reaches the bound in every coordinate."""

    size: float
    far: float
    full: bool = False


def two_class_models(seed: int, fitted: Callable[[int, float | None], P]) -> Iterator[tuple[TwoClass, P]]:
    """Linear ones at θ = 0, where a gradient is ±x/2; and one with convolution, pooling and a hidden layer, whose bound
    is so small that ordinary records are far beyond it. With each a plan, `fitted` to its dimension and bound."""
    for bias in (False, True):
        module: nn.Module = nn.Sequential(nn.Flatten(), nn.Linear(INPUTS, 2, bias=bias))
        own = fitted(2 * INPUTS + 2 * bias, None)
        on_bound = 2 * own.clip_norm / math.sqrt(2 * INPUTS)  # by the weights alone: a bias may be far below it
        yield TwoClass(module, torch.zeros(own.dimension), (INPUTS,), on_bound, BEYOND * on_bound, full=not bias), own
    module = nn.Sequential(
        *(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 4), nn.ReLU(), nn.Linear(4, 2))
    )
    dimension = FlatModel(module).dimension
    theta = torch.randn(dimension, generator=torch.Generator().manual_seed(seed)) * 0.3
    yield TwoClass(module, theta, (1, SIDE, SIDE), 1.0, 1.0), fitted(dimension, 1e-5)


def neighbours(
    model: TwoClass, batch: int, generator: torch.Generator
) -> Iterator[tuple[Examples, Examples, Examples]]:
    """Agents with one record, with another in its place, and with neither. It comes first, in the middle or last. The
    others cancel each other, pull one way, pull the other way, do so with a third of them broken, or are random."""
    inputs, turn = math.prod(model.shape), torch.arange(batch)
    signs = torch.randint(0, 2, (inputs,), generator=generator) * 2.0 - 1
    common = model.far * signs.repeat(batch, 1)
    broken = torch.where((turn % 3 == 1)[:, None], math.nan, common)
    for i, pair in enumerate(_pairs(model, signs, generator)):
        random = model.far * torch.randn(batch, inputs, generator=generator)
        ones, zeros, any_of = turn * 0 + 1, turn * 0, torch.randint(0, 2, (batch,), generator=generator)
        company = ((common, turn % 2), (common, ones), (common, zeros), (broken, zeros), (random, any_of))
        for j, (others, of) in enumerate(company):
            place = (0, batch // 2, batch - 1)[(i + j) % 3]
            one, another = ((_put(others, place, record), _put(of, place, label)) for record, label in pair)
            yield _shaped(model, *one), _shaped(model, *another), _shaped(model, *_without(others, of, place))


def _put(values: Tensor, place: int, value: Tensor | int) -> Tensor:
    values = values.clone()
    values[place] = value
    return values


def _without(x: Tensor, y: Tensor, place: int) -> Examples:
    kept = torch.arange(len(y)) != place
    return x[kept], y[kept]


def _shaped(model: TwoClass, x: Tensor, y: Tensor) -> Examples:
    return x.view(len(y), *model.shape), y


def _pairs(model: TwoClass, signs: Tensor, generator: torch.Generator) -> Iterator[tuple[Record, Record]]:
    """(a record, what replaces it): opposite on the bound and ever further beyond it; broken, tiny, along an axis,
    random."""
    on_bound = model.size * signs
    axis = torch.arange(len(signs)) == len(signs) - 1
    random = [model.size * torch.randn(len(signs), generator=generator) for _ in range(3)]
    for size in (1.0, BEYOND, BEYOND**2, HUGE):
        yield (size * on_bound, 1), (size * on_bound, 0)
    yield (on_bound, 1), (torch.full_like(signs, math.nan), 1)
    yield (torch.where(axis, math.inf, on_bound), 1), (on_bound, 0)
    yield (model.far * signs, 1), (TINY * signs, 0)
    yield (torch.where(axis, model.far, 0.0), 1), (torch.where(axis, model.far, 0.0), 0)
    yield (HUGE * random[0], 1), (on_bound, 0)
    yield (random[1], 1), (random[2], 0)
