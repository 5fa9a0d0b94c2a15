"""The integers in which cpSGD computes, from an example's clipped gradient to the levels."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fedspa.errors import PrivacyError
from fedspa.mechanisms.binomial.bound import spread
from fedspa.mechanisms.gaussian.grid import Grid

if TYPE_CHECKING:
    from fedspa.mechanisms.binomial.plan import BinomialPlan

# An example's bound (of a coordinate, or of the norm) in grid units: float32 knows no more digits of a gradient.
_COORDINATE_BITS, _NORM_BITS = 24, 28
_ROOM = 2**62


def example_grid(plan: BinomialPlan) -> Grid:
    """One example's integers: a coordinate within ±2^24, or a row of norm up to 2^28."""
    if plan.clip == "coordinate":
        limit = 1 << _COORDINATE_BITS
        return Grid("coordinate", plan.clip_value / limit, 0, limit, plan.dimension * limit**2)
    limit = 1 << _NORM_BITS
    return Grid("l2", plan.clip_value / limit, 0, limit, limit**2)


def reach(plan: BinomialPlan) -> int:
    """What the levels span, in integers of the batch's (rotated) sum: ±B times an example's bound, times κ."""
    grid = example_grid(plan)
    most = plan.batch * grid.limit
    half = most
    if plan.rotation:
        norm = math.isqrt(grid.limit_square) + 1
        half = math.ceil(plan.batch * norm * spread(plan.event) * (1 + 1e-12))
        most *= plan.coordinates
    if max(most, 2 * half * plan.levels) >= _ROOM:
        raise PrivacyError(
            f"2^{plan.bits} levels of {plan.coordinates} coordinates over a batch of {plan.batch} pass 64-bit "
            "integers; take fewer bits or a smaller batch"
        )
    return half
