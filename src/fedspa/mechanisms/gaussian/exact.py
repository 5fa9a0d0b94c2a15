"""The release that floating point cannot leak from: integers only, from an example's gradient to the noisy sum.

Floating-point noise has holes: which doubles x + noise can reach depends on x, so that one release may tell two
neighbours apart however large ε is claimed (Mironov, "On significance of the least significant bits for differential
privacy", 2012; for Gaussians, Jin et al., "Are we there yet? Timing and floating-point attacks on differential privacy
systems", 2022). Here each example's clipped gradient is truncated onto a grid, its bound is enforced in integers, and
the integer sum gets R = round(N(0, s²)) with s = 2^m grid units.

As the sum x is an integer, x + round(N) = round(x + N): the release is a rounding, hence post-processing, of the
continuous Gaussian mechanism, and every accountant of that mechanism holds as it stands, subsampled PLD included. The
discrete Gaussian (Canonne, Kamath & Steinke 2020) would need an analysis of its own: it has no rotational symmetry, so
a subsampled vector release does not reduce to one dimension.

Both errors are bounded without any appeal to floating point: an example's integers obey Σq² ≤ (2^m/z)², checked
exactly, and a draw of R is within 2⁻¹¹⁸ in total variation of its law.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from decimal import Decimal, localcontext
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedspa.errors import PrivacyError
from fedspa.mechanisms.gaussian.grid import Grid
from fedspa.randomness.streams import Stream

if TYPE_CHECKING:
    from torch import Tensor

# A row of at most this float64 norm has a square sum below 2^63: int64 adds it exactly.
_SAFE_NORM = 2.0**31
_VALUES_AT_ONCE = 1 << 16

# Proposal cells of |N|: this many to a standard deviation, out to where the mass left is below 2^-128.
_CELLS = 32
_LAST_SIGMA = 14
_BLOCK = 8192
# Float64 decides an acceptance unless it is this close: a thousand times what its error could be.
_DOUBT = 2.0**-40


def to_grid(clipped: Tensor, grid: Grid) -> Tensor:
    """Clipped per-example gradients [b, k] as int64 [b, k], each row within the grid's limits whatever came in.

    Truncation toward zero: it needs no randomness, never lengthens a gradient, and is off by less than one step, that
    is 2^-m of the noise. Rows that float arithmetic clipped a little too long are shortened in integers. NaN counts as
    0: an error here would tell about the data.
    """
    import torch

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
    import torch

    active = clipped.shape[1]
    total = torch.zeros(active, dtype=torch.int64, device=clipped.device)
    rows = max(1, _VALUES_AT_ONCE // active)
    for start in range(0, clipped.shape[0], rows):
        total += to_grid(clipped[start : start + rows], grid).sum(0)
    return total


def release(total: Tensor, grid: Grid, stream: Stream) -> Tensor:
    """What may leave: the integer sum plus fresh noise, in gradient units (float64, on the sum's device)."""
    import torch

    noise = torch.from_numpy(rounded_gaussian(total.numel(), grid.noise_bits, stream))
    return (total + noise.to(total.device)).to(torch.float64) * grid.unit


def rounded_gaussian(n: int, bits: int, stream: Stream) -> NDArray[np.int64]:
    """n draws of round(N(0, 4^bits)), 5 ≤ bits ≤ 50.

    |N| = (j + f)/32: a cell j proposed in proportion to the density at its left edge, a place f uniform in it, and the
    pair accepted with probability exp(−(2j·f + f²)/2048), the density there over that at the edge. Numbers are known by
    their first 64 bits; where those do not decide, more are drawn and integers or decimals of any length decide.
    """
    if not 5 <= bits <= 50:
        raise PrivacyError(f"noise of 2^{bits} grid steps; the sampler takes 2^5 to 2^50")
    values = np.empty(n, dtype=np.int64)
    filled = 0
    while filled < n:
        wanted = n - filled
        drawn = _accepted_draws(min(_BLOCK, wanted + wanted // 32 + 4), bits, stream)[:wanted]
        values[filled : filled + drawn.size] = drawn
        filled += drawn.size
    return values


def _accepted_draws(size: int, bits: int, stream: Stream) -> NDArray[np.int64]:
    choices, places, coins = stream.uint64(3 * size).reshape(3, size)
    table = _cell_table()
    cells = np.searchsorted(_cell_heads(), choices, side="right")
    tied = _cell_heads()[np.maximum(cells, 1) - 1] == choices
    for i in np.flatnonzero(tied):
        cells[i] = bisect_right(table, int(choices[i]) << 64 | int(stream.uint64(1)[0]))

    place = (places >> np.uint64(11)).view(np.int64) * 2.0**-53
    coin = (coins >> np.uint64(11)).view(np.int64) * 2.0**-53
    margin = np.exp(place * (place + 2 * cells) * (-0.5 / _CELLS**2)) - coin
    accepted = margin > 0
    for i in np.flatnonzero(np.abs(margin) < _DOUBT):
        # The last bit of a coin is the sign of the draw.
        accepted[i] = _accept(int(cells[i]), int(places[i]), int(coins[i]) >> 1, stream)

    # round((j + f)·2^bits/32): the first bits − 4 bits of f give it to half a step, and an exact tie has probability 0.
    half_steps = (places >> np.uint64(64 - (bits - 4))).view(np.int64)
    magnitude = (cells << (bits - 5)) + ((half_steps + 1) >> 1)
    sign = 1 - 2 * (coins & np.uint64(1)).view(np.int64)
    draws: NDArray[np.int64] = (sign * magnitude)[accepted]
    return draws


def _accept(cell: int, place: int, coin: int, stream: Stream) -> bool:
    """Whether coin < exp(−f(2·cell + f)/2048), from 64 bits of f and 63 of the coin, and more as it needs them."""
    place_bits, coin_bits = 64, 63
    while True:
        with localcontext(prec=place_bits):  # decimal digits: three times the bits there are
            low, high = (Decimal(place + end) / (1 << place_bits) for end in (0, 1))
            surely, possibly = ((-f * (2 * cell + f) / (2 * _CELLS**2)).exp() for f in (high, low))
            if Decimal(coin + 1) / (1 << coin_bits) <= surely:
                return True
            if Decimal(coin) / (1 << coin_bits) >= possibly:
                return False
        more_place, more_coin = stream.uint64(2)
        place, place_bits = place << 64 | int(more_place), place_bits + 64
        coin, coin_bits = coin << 64 | int(more_coin), coin_bits + 64


@cache
def _cell_table() -> list[int]:
    """Upper ends, in units of 2⁻¹²⁸, of the cells' shares of [0, 1); the last cell's (2¹²⁸) is left out."""
    with localcontext(prec=60):
        heights = [(Decimal(-j * j) / (2 * _CELLS**2)).exp() for j in range(_LAST_SIGMA * _CELLS)]
        total = sum(heights)
        running, ends = Decimal(0), []
        for height in heights[:-1]:
            running += height
            ends.append(int(running / total * 2**128))
    return ends


@cache
def _cell_heads() -> NDArray[np.uint64]:
    """The first 64 bits of `_cell_table`: all that a draw needs unless it meets one of them exactly."""
    return np.array([end >> 64 for end in _cell_table()], dtype=np.uint64)


def _shorten(row: Tensor, limit_square: int) -> Tensor:
    """The row scaled by a/2³¹ and truncated, a the largest integer that brings its squared norm within the limit."""
    squares = row * row
    square = (int((squares >> 32).sum()) << 32) + int((squares & 0xFFFFFFFF).sum())
    factor = math.isqrt((limit_square << 62) // square)
    return (row * factor).div(1 << 31, rounding_mode="trunc")
