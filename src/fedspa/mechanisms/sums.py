"""Sums of any number of clipped rows in float64, whose rounding the clip's margin covers.

An addition is rounded by at most u = 2⁻⁵³ of its result. In any order, which may be another for each coordinate, a row
goes through fewer than n additions, so that the sum of n rows of norm C at most is off by u·n²·C, and two neighbouring
sums by 2·u·n²·C. At PLAIN rows that is 9.6·10⁻⁷ C, of the 1.88·10⁻⁶ that the margin has left when a row is clipped.

The rows after those are summed SPAN at a time, and what the addition of a span's sum loses is kept and added at the
end (Knuth's TwoSum: exact but for the second order). A span of r rows is off by u·r²·C, so that two neighbouring sums
of N rows more are off by 2·u·r·N·C. With PLAIN rows before them that is within the margin up to N = 65 million.

What a private quantile counts beside them is summed alike, and has no margin of its own: a share of ½ is a share of ½.
Its noise is such that it has 4 % of the gradients' part in the cost of a record (QUANTILE_NOISE_FACTOR² − 1), and so
has its rounding: their margin covers both, up to N = 60 million.

Which rows fall into a span may depend on how many records there are. It need not be public: the bound holds for two
sums that are spanned differently, as it does for two that are added in another order.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

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
