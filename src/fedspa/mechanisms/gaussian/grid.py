"""The integers in which an exact release computes (`exact`): how fine they are, and how far an example reaches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from fedspa.errors import PrivacyError
from fedspa.mechanisms.base import Clipping

# An example's norm bound is 2^29 to 2^30 grid units: squares fit into int64, and truncation moves a coordinate by less
# than float32 arithmetic already did (at k = 500,000 a coordinate of size C/√k is still 10^6 units).
_NORM_BITS = 30
# Grid steps, and with them the noise, are this much wider than they must be, so that rows which float32 clipped a few
# roundings too long fit into the integer limit as they are: a millionth more noise saves shortening half of the rows.
_SLACK = 1 + 2.0**-20


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
    """The grid of a sum over `active` coordinates whose noise is `noise_multiplier` × the bound on an example's norm.

    For a plan: `make_grid(plan.clip, plan.clip_value, plan.active, plan.gradient_noise_multiplier)`. The count of a
    private clip is one coordinate of ±½: `make_grid("coordinate", 0.5, 1, 2 * plan.count_noise)`. The limits are
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
    unit = _SLACK * noise_multiplier * norm / 2.0**noise_bits
    return Grid(clip, unit, noise_bits, limit, math.floor(norm_square))
