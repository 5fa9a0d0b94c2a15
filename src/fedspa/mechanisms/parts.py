"""Rows of per-example gradients in parts, as a program makes them layer by layer; they clip and add up as `clip_rows`.

Where a layer's gradient has few numbers that are not zero (an Embedding's), only those are written down, each with the
column that it belongs to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedspa.mechanisms.base import Clipping
from fedspa.mechanisms.clipping import bound_below, factors_below


class Part(NamedTuple):
    """Values [b, m]. `columns` says where in a row they stand: from a column on, or [b, m] of them, no column twice in
    a row; the column after the last is for what stands nowhere."""

    values: Tensor
    columns: int | Tensor


class Parts:
    """The rows of b examples with k columns. `present` are the places with an example, `readable` those whose example
    has a gradient."""

    def __init__(self, parts: Sequence[Part], width: int, readable: Tensor, present: Tensor | None = None) -> None:
        self._parts, self._width = list(parts), width
        self._readable, self._present = readable, present
        self._squares: Tensor | None = None

    def count_not_finite(self) -> int:
        """How many examples count as zero. Depends on the data: for the agent's own eyes only."""
        bad = ~self._counted()
        return int((bad if self._present is None else bad & self._present).sum())

    def __len__(self) -> int:
        """Rows, with those of the places that have no example."""
        return len(self._readable)

    def clipped(self, clip: Clipping, value: float) -> Callable[[slice], Tensor]:
        """What gives Σ of some of the clipped rows, in float64. Takes the values with it: they are not to be used
        again."""
        counted = self._counted()
        counted = counted if self._present is None else counted & self._present
        factors = factors_below(self._norms(), value, torch.float32) if clip == "l2" else None
        bound = bound_below(value, torch.float32)
        whole = bool(counted.all())
        parts, self._parts = self._parts, []
        for number, (values, columns) in enumerate(parts):
            values = values if whole else torch.where(counted.unsqueeze(1), values, torch.zeros_like(values[:1, :1]))
            values = values.clamp_(-bound, bound) if factors is None else values.mul_(factors.unsqueeze(1))
            parts[number] = Part(values, columns)
        return lambda rows: self._sum(parts, rows)

    def _sum(self, clipped: Sequence[Part], rows: slice) -> Tensor:
        total = self._readable.new_zeros(self._width + 1, dtype=torch.float64)
        for values, columns in clipped:
            values = values[rows]
            if isinstance(columns, int):
                total[columns : columns + values.shape[1]] += values.sum(0, dtype=torch.float64)
            else:
                total.index_add_(0, columns[rows].flatten(), values.flatten().double())
        return total[:-1]

    def share_below(self, clip: Clipping, value: float) -> Tensor:
        """As `clipping.share_below`, of the examples that are present; to be asked before `clipped`."""
        counted = self._counted()
        if clip == "l2":
            shares = (self._norms() <= value).double()
        else:
            sizes = [values.abs() for values, _ in self._parts]
            alive = sum((size > 0).sum(1, dtype=torch.float64) for size in sizes)
            above = sum((size > value).sum(1, dtype=torch.float64) for size in sizes)
            assert isinstance(alive, Tensor)
            shares = 1 - above / alive.clamp(min=1)
        shares = torch.where(counted, shares, torch.ones_like(shares))
        return shares if self._present is None else shares[self._present]

    def rows(self) -> Tensor:
        """All columns of the examples that are present, [b, k]; NaN where an example has no gradient."""
        rows = self._readable.new_zeros(len(self._readable), self._width + 1, dtype=torch.float32)
        for values, columns in self._parts:
            if isinstance(columns, int):
                rows[:, columns : columns + values.shape[1]] = values
            else:
                rows.scatter_(1, columns, values)
        rows = rows[:, :-1].masked_fill_(~self._readable.unsqueeze(1), torch.nan)
        return rows if self._present is None else rows[self._present]

    def _norms(self) -> Tensor:
        """L2 norms, of squares that are summed in float64: squares of float32 numbers neither vanish nor overflow."""
        if self._squares is None:
            squares = [torch.linalg.vector_norm(values, dim=1, dtype=torch.float64) for values, _ in self._parts]
            self._squares = torch.stack(squares).square().sum(0)
        return self._squares.sqrt()

    def _counted(self) -> Tensor:
        """Which rows are readable and finite."""
        return self._readable & self._norms().isfinite()
