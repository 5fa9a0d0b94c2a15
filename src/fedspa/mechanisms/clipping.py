"""Per-example clipping on the active coordinates (design of Fed-SPA: cut to the mask first, then clip).

Rows are examples, columns the k active coordinates. A row with a NaN or an infinity counts as zero: its clipped
gradient is then defined, and the sensitivity of the sum is what the plan says for *any* data.

Sums of any number of clipped rows in float64, whose rounding the clip's margin covers
(docs/engines.md#rounding-of-sums has the proof): plain sums of the first PLAIN rows, then SPAN at a time with what the
addition of a span loses kept and added at the end (Knuth's TwoSum). Which rows fall into a span need not be public.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from fedspa.mechanisms.base import Clipping

# What a clipped row stays below the bound by, relatively: more than what rounding a factor and its products to float32
# (2⁻²⁴ each) can add, and what one row can change in the rounding of a float64 sum of all (`RowSum`). The other back
# ends have the same, the native one too, whose sums are exact: all clip alike.
CLIP_MARGIN = 2e-6


def clip_rows(rows: Tensor, clip: Clipping, value: float) -> Tensor:
    """Each row brought within the bound: every coordinate to ±value, or the row's L2 norm to value."""
    rows = _zero_unless_finite(rows)
    if clip == "coordinate":
        bound = bound_below(value, rows.dtype)
        return rows.clamp(-bound, bound)
    return rows * factors_below(_norms(rows), value, rows.dtype).unsqueeze(1)


def factors_below(norms: Tensor, value: float, dtype: torch.dtype) -> Tensor:
    """Return the factors for rows of these norms, so that none is longer than `value`."""
    limit = value * (1 - CLIP_MARGIN)
    factors = limit / norms.clamp(min=limit)
    # Below the smallest normal number a factor has too few digits to keep the bound: such a row counts as zero.
    return torch.where(factors >= torch.finfo(dtype).tiny, factors, 0.0).to(dtype)


@lru_cache(maxsize=64)  # asked for in every step
def bound_below(value: float, dtype: torch.dtype) -> float:
    """Return the greatest number of that type that is CLIP_MARGIN below `value`, or more."""
    limit = value * (1 - CLIP_MARGIN)
    nearest = torch.tensor(limit, dtype=dtype)
    return float(torch.nextafter(nearest, torch.zeros_like(nearest)) if float(nearest) > limit else nearest)


def count_not_finite(rows: Tensor) -> int:
    """Return how many rows count as zero for a NaN or an infinity. Depends on the data: it must not leave the agent."""
    return int((~_finite(rows)).sum())


def _norms(rows: Tensor) -> Tensor:
    """L2 norms of the rows in float64: float32 loses digits over 10⁵ coordinates, and they would be missing from the
    bound. Halves are added coordinate by coordinate, which is rounded alike everywhere: torch's own sums choose their
    order by the number of rows, and a row's last bit, hence its factor, would depend on the others."""
    squares = rows.to(torch.float64).square()
    while (width := squares.shape[1]) > 1:
        half = (width + 1) // 2
        squares[:, : width - half] += squares[:, half:]
        squares = squares[:, :half]
    return squares.sum(dim=1).sqrt()  # of one column, or none


def _finite(rows: Tensor) -> Tensor:
    return torch.isfinite(rows).all(dim=1)


def _zero_unless_finite(rows: Tensor) -> Tensor:
    return torch.where(_finite(rows).unsqueeze(1), rows, torch.zeros((), dtype=rows.dtype, device=rows.device))


PLAIN, SPAN = 2**16, 64


def two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """a + b, and what rounding took from it, exactly."""
    total = a + b
    of_b = total - a
    return total, (a - (total - of_b)) + (b - of_b)


class RowSum:
    """Σ of rows that come in blocks."""

    def __init__(self, width: int) -> None:
        self._rows, self._total = 0, torch.zeros(width, dtype=torch.float64)
        self._lost: Tensor | None = None

    def add(self, rows: int, sum_of: Callable[[slice], Tensor]) -> None:
        """A block of that many rows. `sum_of` gives the float64 sum of some of them, in any order."""
        plain = min(rows, max(0, PLAIN - self._rows))
        self._rows += rows
        if plain:
            self._total += sum_of(slice(0, plain)).cpu()
        for start in range(plain, rows, SPAN):
            self._total, lost = two_sum(self._total, sum_of(slice(start, min(start + SPAN, rows))).cpu())
            self._lost = lost if self._lost is None else self._lost + lost

    @property
    def total(self) -> Tensor:
        return self._total if self._lost is None else self._total + self._lost


class LayerGradient(NamedTuple):
    """Values [b, m]. `columns` says where in a row they stand: from a column on, or [b, m] of them, no column twice in
    a row; the column after the last is for what stands nowhere."""

    values: Tensor
    columns: int | Tensor


class GradientBlock:
    """The rows of b examples with k columns. `present` are the places with an example, `readable` those whose example
    has a gradient."""

    def __init__(
        self, layers: Sequence[LayerGradient], width: int, readable: Tensor, present: Tensor | None = None
    ) -> None:
        self._layers, self._width = list(layers), width
        self._readable, self._present = readable, present
        self._squares: Tensor | None = None

    def count_not_finite(self) -> int:
        """Return how many examples count as zero. Depends on the data: it must not leave the agent."""
        bad = ~self._counted()
        return int((bad if self._present is None else bad & self._present).sum())

    def __len__(self) -> int:
        """Rows, with those of the places that have no example."""
        return len(self._readable)

    def clipped(self, clip: Clipping, value: float) -> Callable[[slice], Tensor]:
        """Return a function that gives Σ of some of the clipped rows, in float64. Takes the values with it: they are
        not to be used again."""
        counted = self._counted()
        counted = counted if self._present is None else counted & self._present
        factors = factors_below(self._norms(), value, torch.float32) if clip == "l2" else None
        bound = bound_below(value, torch.float32)
        whole = bool(counted.all())
        parts, self._layers = self._layers, []
        for number, (values, columns) in enumerate(parts):
            values = values if whole else torch.where(counted.unsqueeze(1), values, torch.zeros_like(values[:1, :1]))
            values = values.clamp_(-bound, bound) if factors is None else values.mul_(factors.unsqueeze(1))
            parts[number] = LayerGradient(values, columns)
        return lambda rows: self._sum(parts, rows)

    def _sum(self, clipped: Sequence[LayerGradient], rows: slice) -> Tensor:
        total = self._readable.new_zeros(self._width + 1, dtype=torch.float64)
        for values, columns in clipped:
            values = values[rows]
            if isinstance(columns, int):
                total[columns : columns + values.shape[1]] += values.sum(0, dtype=torch.float64)
            else:
                total.index_add_(0, columns[rows].flatten(), values.flatten().double())
        return total[:-1]

    def rows(self) -> Tensor:
        """Return all columns of the examples that are present, [b, k]; NaN where an example has no gradient."""
        rows = self._readable.new_zeros(len(self._readable), self._width + 1, dtype=torch.float32)
        for values, columns in self._layers:
            if isinstance(columns, int):
                rows[:, columns : columns + values.shape[1]] = values
            else:
                rows.scatter_(1, columns, values)
        rows = rows[:, :-1].masked_fill_(~self._readable.unsqueeze(1), torch.nan)
        return rows if self._present is None else rows[self._present]

    def _norms(self) -> Tensor:
        """L2 norms, of squares that are summed in float64: squares of float32 numbers neither vanish nor overflow."""
        if self._squares is None:
            squares = [torch.linalg.vector_norm(values, dim=1, dtype=torch.float64) for values, _ in self._layers]
            self._squares = torch.stack(squares).square().sum(0)
        return self._squares.sqrt()

    def _counted(self) -> Tensor:
        """Return which rows are readable and finite."""
        return self._readable & self._norms().isfinite()
