"""Records and models that show most of a mechanism, and whole answers of agents that hold them.

Answers are made as in a run: by the algorithm's `respond` and the engine that a run would take.

- The probe is a two-class linear model whose bias makes label 0 certain. A record of label 0 then has a gradient of
  exactly zero, and a record of label 1 has ±x on the two rows of weights, of a size that clipping decides.
- Two-class models have antipodal gradients for the two labels of a record, −p₁·v and p₀·v, whatever their layers: once
  both are clipped, they are the two worst records there are.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from fedspa.algorithms import Agent, Terms
from fedspa.audit.audited import Setting
from fedspa.audit.statistics import UNBOUNDED, Question, certain
from fedspa.data import dataset
from fedspa.engine.local import Engine
from fedspa.examples import Examples, count
from fedspa.learning.flat import FlatModel
from fedspa.learning.tasks import PerPerson, Task
from fedspa.learning.tasks.totals import Layout, Totals, TotalsModel
from fedspa.mechanisms import Plan
from fedspa.privacy.event import Unit
from fedspa.randomness.streams import agent_key

HUGE = 1e30
SIDE = 8
BEYOND, TINY = 1e6, 1e-40
Record = tuple[Tensor, int]
Labelled = tuple[Tensor, Tensor]
P = TypeVar("P", bound=Plan)
INPUTS, CERTAIN = 32, 500.0
WEIGHTS = 2 * INPUTS
DIMENSION = WEIGHTS + 2
AGENTS, ROUNDS = 6, 6
# The agents' mask seed, which is public.
SEED = bytes(range(16))

A = TypeVar("A", covariant=True)
Respond = Callable[[Tensor, Terms, Sequence[Agent], Engine], Iterator[A]]
MakeEngine = Callable[[Setting, nn.Module, tuple[int, ...]], Engine]


class Answers(Protocol[A]):
    """The part of a target that is common to all mechanisms: how agents answer, and with which engine."""

    @property
    def respond(self) -> Respond[A]: ...
    @property
    def engine(self) -> MakeEngine: ...


@dataclass(frozen=True, slots=True)
class Probe:
    """θ and the shape of an input belong to the module."""

    module: nn.Module
    theta: Tensor
    shape: tuple[int, ...]


def certain_model(inputs: int = INPUTS) -> Probe:
    """Return the probe, with θ in its module too."""
    module = nn.Sequential(nn.Flatten(), nn.Linear(inputs, 2))
    theta = torch.zeros(2 * inputs + 2)
    theta[2 * inputs], theta[2 * inputs + 1] = CERTAIN, -CERTAIN
    FlatModel(module).load(theta)
    return Probe(module, theta, (inputs,))


def answers(
    setting: Setting,
    target: Answers[A],
    model: Probe,
    plan: Plan,
    agents: Sequence[tuple[Tensor, Tensor, bytes]],
    t: int = 0,
    local_lr: float = 1.0,
    layers: tuple[tuple[int, int], ...] | None = None,
) -> list[A]:
    """Return what agents with these records x, y and keys send in round t."""
    terms = Terms(t, "per-agent", None, local_lr, plan, layers)
    known = [Agent(i, x, y, SEED, key, setting.exact) for i, (x, y, key) in enumerate(agents)]
    with _unlogged():
        return list(target.respond(model.theta, terms, known, target.engine(setting, model.module, model.shape)))


def null_records(count: int, first: Tensor | float | None = None) -> Labelled:
    """Return records of the probe without a gradient; or the first has this input, label 1 and a gradient."""
    x, y = torch.ones(count, INPUTS), torch.zeros(count, dtype=torch.int64)
    if first is not None:
        x[0], y[0] = first, 1
    return x, y


@contextmanager
def _unlogged() -> Iterator[None]:
    """An agent warns of broken records; here they are meant."""
    logger = logging.getLogger("fedspa.agent")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def replayed_keys(setting: Setting) -> Iterator[tuple[int, list[bytes]]]:
    """(a round, its agents' keys), round by round, and once more with other keys.

    All public inputs of the second turn equal those of the first: noise that a public number decides would repeat.
    """
    for turn in (1, 2):
        for t in range(ROUNDS):
            yield t, [agent_key(setting.key("turn", turn), t, i) for i in range(AGENTS)]


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
) -> Iterator[tuple[Labelled, Labelled, Labelled]]:
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


def _without(x: Tensor, y: Tensor, place: int) -> Labelled:
    kept = torch.arange(len(y)) != place
    return x[kept], y[kept]


def _shaped(model: TwoClass, x: Tensor, y: Tensor) -> Labelled:
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


# The audit of a release of statistics or of a model's scores: what one record, or person, adds to its totals.
#
# The noise is that of a training, and the questions about it are the same. What is asked here is whether the totals
# move by the bound at most, before anything is clipped, where one record or person is left out: with values far beyond
# the public ranges, and with more records of a person than may count.

_EXTREMES = (-1e30, -1.0, 0.0, 1.0, 1e30)
_TRIED = 24  # records, or persons with twice as many records as may count
_ROUNDING = 1e-4


def part_question(layout: Layout, unit: Unit, most: int, generator: torch.Generator) -> Question:
    """Ask how far the totals move where one is left out; `most` is how many records of a person count."""
    each = 2 * most if unit == "person" else 1
    x, y = _extreme_records(layout, _TRIED * each, generator)
    owners, draws = np.arange(len(x)) // each, np.arange(len(x), dtype=np.uint64)
    task: Task = PerPerson(Totals(layout)) if unit == "person" else Totals(layout)

    def totals(rows: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Tensor:
        examples = Examples(x[rows], y[rows])
        if unit == "person":
            examples = dataset.grouped(*examples, owners[rows], most, draws[rows])
        model = TotalsModel(layout.width).double()
        (gradient,) = torch.autograd.grad(task.loss(model, *examples), [model.totals])
        return gradient * count(examples.y)

    rows = np.arange(len(x))
    whole = totals(rows)
    moved = [float((whole - totals(rows[owners != owner])).norm()) for owner in range(_TRIED)]
    seen = max(moved) if all(map(math.isfinite, moved)) else UNBOUNDED
    detail = f"the totals with and without one {unit} of {_TRIED}, with values far outside every range"
    return certain(f"one {unit}'s part", "deviation", 1.0, min(seen, UNBOUNDED), detail, seen <= 1 + _ROUNDING)


def _extreme_records(layout: Layout, records: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return inputs and targets that the layout reads, as far apart as an encoder could ever leave them."""

    def drawn(most: int) -> Tensor:
        return torch.randint(most, (records,), generator=generator)

    inputs = [block for block in layout.blocks if not block.of_target]
    x = torch.zeros(records, 1 + max(max(block.stop, block.missing) for block in inputs), dtype=torch.float64)
    of_target = [block for block in layout.blocks if block.of_target]
    classes = max([layout.classes, *(block.size for block in of_target if block.kind == "categories")])
    y = drawn(classes)
    if any(block.kind != "categories" or block.size == 1 for block in of_target):
        y = torch.tensor(_EXTREMES, dtype=torch.float64)[drawn(len(_EXTREMES))].clamp(-1, 1)[:, None]
        y = y.repeat(1, max(block.stop for block in of_target))
    for block in inputs:
        if block.kind == "categories":
            x[torch.arange(records), block.start + drawn(block.size)] = 1.0
        elif block.kind != "count":
            x[:, block.start] = torch.tensor(_EXTREMES, dtype=torch.float64)[drawn(len(_EXTREMES))]
            if block.missing >= 0:
                x[:, block.missing] = drawn(2).double()
    return x, y
