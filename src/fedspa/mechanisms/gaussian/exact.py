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
from dataclasses import dataclass
from decimal import Decimal, localcontext
from fractions import Fraction
from functools import cache

import numpy as np
from numpy.typing import NDArray

from fedspa.errors import PrivacyError
from fedspa.mechanisms.base import Clipping
from fedspa.randomness.streams import Stream, heads, settle

# Proposal cells of |N|: this many to a standard deviation, out to where the mass left is below 2^-128.
_CELLS = 32
_LAST_SIGMA = 14
_BLOCK = 8192
_TABLE_BITS = 128
# Float64 decides an acceptance unless it is this close: a thousand times what its error could be.
_DOUBT = 2.0**-40


# An example's norm bound is 2^29 to 2^30 grid units: squares fit into int64, and truncation moves a coordinate by less
# than float32 arithmetic already did (at k = 500,000 a coordinate of size C/√k is still 10^6 units).
_NORM_BITS = 30
# Grid steps, and with them the noise, are this much wider than they must be, so that rows which float32 clipped a few
# roundings too long fit into the integer limit as they are: a millionth more noise saves shortening half of the rows.
_GRID_SLACK = 1 + 2.0**-20


@dataclass(frozen=True, slots=True)
class Grid:
    """The integers of a release. `unit` is only a scale: the guarantee rests on `noise_bits` and the two limits.

    unit: one grid step in gradient units; noise_bits: m, the noise has a standard deviation of 2^m steps;
    limit: the most that one coordinate of an example may be; limit_square: the most that its squared norm may be.
    """

    clip: Clipping
    unit: float
    noise_bits: int
    limit: int
    limit_square: int


def make_grid(clip: Clipping, clip_value: float, active: int, noise_multiplier: float) -> Grid:
    """Return the grid of a sum over `active` coordinates whose noise is `noise_multiplier` × the bound on an example's
    norm.

    For a plan: `make_grid(plan.clip, plan.clip_value, plan.active, plan.noise_multiplier)`. The limits are
    rounded down in exact arithmetic, so the noise multiplier that really holds is never below the one given.
    """
    if not (math.isfinite(noise_multiplier) and 2.0**-20 <= noise_multiplier <= 2.0**20):
        raise PrivacyError(f"noise multiplier is {noise_multiplier}; the exact path takes 2^-20 to 2^20: use 'secure'")
    noise_bits = _NORM_BITS + math.frexp(noise_multiplier)[1] - 1
    norm_square = (Fraction(2**noise_bits) / Fraction(noise_multiplier)) ** 2
    norm = math.sqrt(active) * clip_value if clip == "coordinate" else clip_value
    limit = math.isqrt(math.floor(norm_square / active if clip == "coordinate" else norm_square))
    if not (limit >= 1 and math.isfinite(norm) and norm > 0):
        raise PrivacyError(f"clip value {clip_value} over {active} coordinates leaves no grid; it must be positive")
    unit = _GRID_SLACK * noise_multiplier * norm / 2.0**noise_bits
    return Grid(clip, unit, noise_bits, limit, math.floor(norm_square))


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
    cells = np.searchsorted(_cell_heads(), choices, side="right")
    tied = _cell_heads()[np.maximum(cells, 1) - 1] == choices
    for i in np.flatnonzero(tied):
        cells[i] = settle(_cell_table(), choices[i], stream, _TABLE_BITS)

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
    """Return whether coin < exp(−f(2·cell + f)/2048), from 64 bits of f and 63 of the coin, and more as it needs
    them."""
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
            ends.append(int(running / total * 2**_TABLE_BITS))
    return ends


@cache
def _cell_heads() -> NDArray[np.uint64]:
    return heads(_cell_table(), _TABLE_BITS)
