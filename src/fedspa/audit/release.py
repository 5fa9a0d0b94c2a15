"""The audit of a release of statistics or of a model's scores: what one record, or person, adds to its totals.

The noise is that of a training, and the questions about it are the same. What is asked here is whether the totals move
by the bound at most, before anything is clipped, where one record or person is left out: with values far beyond the
public ranges, and with more records of a person than may count.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from fedspa.audit.statistics import UNBOUNDED, Question, certain
from fedspa.data import dataset
from fedspa.examples import Examples, count
from fedspa.learning.tasks import PerPerson, Task
from fedspa.learning.tasks.totals import Layout, Totals, TotalsModel
from fedspa.privacy.event import Unit

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
