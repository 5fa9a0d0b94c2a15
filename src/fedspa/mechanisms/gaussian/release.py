"""One private release: the noisy mean of clipped per-example gradients (Algorithm 1, the g + b of line 9).

Everything that decides privacy in a local step of the Python engines happens in `noisy_mean`; the native engine and
the traced one on a GPU have their own, and the audit attacks whichever a run takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedspa.mechanisms.base import CLIP_UNITS, Clipping
from fedspa.mechanisms.clipping import GradientBlock, RowSum, clip_rows
from fedspa.mechanisms.gaussian import exact
from fedspa.mechanisms.gaussian.exact import Grid, make_grid
from fedspa.mechanisms.gaussian.plan import GaussianPlan
from fedspa.randomness.streams import Stream

# A row of at most this float64 norm has a square sum below 2^63: int64 adds it exactly.
_SAFE_NORM = 2.0**31
_VALUES_AT_ONCE = 1 << 16


def noisy_mean(
    chunks: Iterable[Tensor | GradientBlock], plan: GaussianPlan, noise: Stream, *, on_grid: bool = False
) -> Tensor:
    """Return the noisy mean gradient on the k active coordinates, in float64.

    `chunks` are the sampled examples' gradients, already cut to the mask, as [b, k] blocks: any number of blocks of any
    size, none included. The sum is divided by the plan's public B, never by the number of rows. `on_grid` sums and
    noises in integers (noise mode `exact`).
    """
    gradients = _NoisySum(plan.clip, plan.clip_value, plan.active, plan.noise_multiplier, on_grid)
    for rows in chunks:
        if isinstance(rows, GradientBlock) and on_grid:
            rows = rows.rows()
        if isinstance(rows, GradientBlock):
            gradients.add_sums(len(rows), rows.clipped(plan.clip, plan.clip_value))
        else:
            gradients.add(clip_rows(rows, plan.clip, plan.clip_value))
    return gradients.release(noise) / plan.batch


class _NoisySum:
    """A sum of clipped rows that can only be read with its noise on: std = multiplier × the bound on a row's norm."""

    def __init__(self, clip: Clipping, clip_value: float, active: int, multiplier: float, on_grid: bool) -> None:
        norm = math.sqrt(active) * clip_value if clip == "coordinate" else clip_value
        self._sigma = multiplier * norm
        self._grid = make_grid(clip, clip_value, active, multiplier) if on_grid else None
        self._whole, self._sum = torch.zeros(active if on_grid else 0, dtype=torch.int64), RowSum(active)

    def add(self, clipped: Tensor) -> None:
        if self._grid is None:
            self._sum.add(len(clipped), lambda rows: clipped[rows].sum(dim=0, dtype=torch.float64))
        else:
            self._whole += integer_sum(clipped, self._grid).cpu()

    def add_sums(self, rows: int, sum_of: Callable[[slice], Tensor]) -> None:
        """A block of clipped rows, of which `sum_of` gives float64 sums."""
        assert self._grid is None
        self._sum.add(rows, sum_of)

    def release(self, noise: Stream) -> Tensor:
        if self._grid is None:
            return add_noise(self._sum.total, self._sigma, noise)
        return release_on_grid(self._whole, self._grid, noise)


def add_noise(total: Tensor, sigma_sum: float, stream: Stream) -> Tensor:
    """`total` [k] plus N(0, sigma_sum²) in each coordinate: added in float64, returned in the dtype of `total`.

    `sigma_sum` is the noise on the *sum*, in gradient units: `plan.sigma * plan.batch`. Rounding to float32 comes after
    the noise and is post-processing. The modes `secure` and `seeded` differ by where the stream's key comes from
    (`streams.root_key`), not here; `exact` is the mode that floating point cannot leak from (`exact.py`). A GPU's own
    generator is not cryptographic: this noise is made on the CPU, and the traced engine has another one there.
    """
    noise = torch.from_numpy(stream.gaussian(total.numel())).mul_(sigma_sum)
    return (total.to(torch.float64) + noise.to(total.device)).to(total.dtype)


def to_grid(clipped: Tensor, grid: Grid) -> Tensor:
    """Clipped per-example gradients [b, k] as int64 [b, k], each row within the grid's limits whatever came in.

    Truncation toward zero: it needs no randomness, never lengthens a gradient, and is off by less than one step, that
    is 2^-m of the noise. Rows that float arithmetic clipped a little too long are shortened in integers. NaN counts as
    0: an error here would tell about the data.
    """
    scaled = clipped.to(torch.float64) / grid.unit
    scaled.nan_to_num_(nan=0.0).clamp_(-grid.limit, grid.limit)
    integers = scaled.to(torch.int64)
    if grid.clip == "l2":
        squares = (integers * integers).sum(1)  # modulo 2^64; true wherever the float norm is safe
        over = (squares > grid.limit_square) | (torch.linalg.vector_norm(scaled, dim=1) > _SAFE_NORM)
        for row in over.nonzero().flatten().tolist():
            integers[row] = _shorten(integers[row], grid.limit_square)
    return integers


def integer_sum(clipped: Tensor, grid: Grid) -> Tensor:
    """Sum over examples of `to_grid`, [k] in int64, a few rows at a time: exact, so in any order and any chunks."""
    active = clipped.shape[1]
    total = torch.zeros(active, dtype=torch.int64, device=clipped.device)
    rows = max(1, _VALUES_AT_ONCE // active)
    for start in range(0, clipped.shape[0], rows):
        total += to_grid(clipped[start : start + rows], grid).sum(0)
    return total


def sum_in_units(rows: Iterable[Tensor], clip: Clipping, clip_value: float, size: int) -> NDArray[np.int64]:
    """Return the sum of the examples' gradients on `size` coordinates, clipped, in whole numbers with `CLIP_UNITS` to
    the clip value."""
    square = CLIP_UNITS**2 * (size if clip == "coordinate" else 1)
    grid, total = Grid(clip, clip_value / CLIP_UNITS, 0, CLIP_UNITS, square), torch.zeros(size, dtype=torch.int64)
    for block in rows:
        total += integer_sum(clip_rows(block, clip, clip_value), grid).cpu()
    return total.numpy()


def release_on_grid(total: Tensor, grid: Grid, stream: Stream) -> Tensor:
    """Return what may leave: the integer sum plus fresh noise, in gradient units (float64, on the sum's device)."""
    noise = torch.from_numpy(exact.rounded_gaussian(total.numel(), grid.noise_bits, stream))
    return (total + noise.to(total.device)).to(torch.float64) * grid.unit


def _shorten(row: Tensor, limit_square: int) -> Tensor:
    """Return the row scaled by a/2³¹ and truncated, a the largest integer that brings its squared norm within the
    limit."""
    squares = row * row
    square = (int((squares >> 32).sum()) << 32) + int((squares & 0xFFFFFFFF).sum())
    factor = math.isqrt((limit_square << 62) // square)
    return (row * factor).div(1 << 31, rounding_mode="trunc")
