# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator,type-arg"
"""Triton kernels that sum the clipped gradients of a layer's parameters over an agent's examples.

An example's gradient exists only as a tile in registers, where it is added (SUM), clamped and added (CLAMP; COUNT also
counts how much was clamped), or added with a factor while its squares are summed for its norm (SCALED). SCALED runs
twice with the same arguments: the first run is for the norms, the second, with the factors that came of them, for the
sums. It is the same code both times, so the vector that is scaled is to the last bit the one whose norm was taken, and
squares are summed in float64, where those of float32 numbers neither vanish nor overflow.

All sums over examples are in float64. In float32, one example that lifts a running sum over a power of two changes how
every later one is rounded: of 1,024 examples, one could move the sum by 1.016 times the bound, of 8,192 by twice the
bound. In float64 it is 1 + 2·B²·2⁻⁵³ times at most, which MARGIN covers. `kernels.py` has the conventions.
"""

import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]

from fedspa.engine.stacked.kernels import finite
from fedspa.mechanisms.clipping import CLIP_MARGIN

SUM, CLAMP, COUNT, SCALED = (tl.constexpr(i) for i in range(4))
# Covers the rounding of the factor, 2⁻²⁴, and of the sums.
MARGIN = tl.constexpr(CLIP_MARGIN)


@triton.jit
def account(g, total, mask, c, factors, first, second, example, at, MODE: tl.constexpr):
    """What one example's tile of gradients adds: to the sum, and to its statistics."""
    if MODE == SUM:
        total += g.to(tl.float64)
    elif MODE == SCALED:
        wide = tl.where(mask, g, 0.0).to(tl.float64)
        tl.store(first + at, tl.sum(tl.sum(wide * wide, 1), 0))
        total += g.to(tl.float64) * tl.load(factors + example).to(tl.float64)
    else:
        # Clamping would turn an infinity or NaN into a bound.
        bound = c * (1 - MARGIN)
        clamped = tl.where(finite(g), tl.minimum(tl.maximum(g, -bound), bound), float("nan"))
        total += clamped.to(tl.float64)
        if MODE == COUNT:
            size = tl.abs(g)
            tl.store(first + at, tl.sum(tl.sum(tl.where(mask & (size > 0), 1.0, 0.0), 1), 0).to(tl.float64))
            tl.store(second + at, tl.sum(tl.sum(tl.where(mask & (size > c), 1.0, 0.0), 1), 0).to(tl.float64))
    return total


@triton.jit
def bound_below(clip):
    """The greatest float32 that is not above the plan's bound."""
    near = clip.to(tl.float32)
    return tl.where(
        near.to(tl.float64) > clip, (near.to(tl.int32, bitcast=True) - 1).to(tl.float32, bitcast=True), near
    )


@triton.jit
def active_of(masks, agent, dimension, weight, place, valid, MASKED: tl.constexpr):
    """Which of the tile's parameters are in the agent's mask."""
    if MASKED:
        valid = valid & (tl.load(masks + agent.to(tl.int64) * dimension + weight + place, valid, other=0) != 0)
    return valid


@triton.jit(do_not_specialize=["active"])
def example_statistics(
    first, second, clips, factors, shares, counts, step, agents, capacity, tiles, active, MODE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """An example's tiles put together: its factor, C/‖g‖ or less, and how much the bound leaves (`share_below`)."""
    example, agent = tl.program_id(0), tl.program_id(1)
    if example < tl.load(counts + tl.load(step) * agents + agent):
        at = (agent.to(tl.int64) * capacity + example) * tiles
        one = tl.zeros([BLOCK], dtype=tl.float64)
        two = tl.zeros([BLOCK], dtype=tl.float64)
        for t0 in range(0, tiles, BLOCK):
            t = t0 + tl.arange(0, BLOCK)
            one += tl.load(first + at + t, t < tiles, other=0.0)
            if MODE == COUNT:
                two += tl.load(second + at + t, t < tiles, other=0.0)
        total = tl.sum(one, 0)
        clip = tl.load(clips + agent)
        if MODE == SCALED:
            norm = tl.sqrt(total)
            # A product below float32's normal range is rounded by up to 2⁻¹⁵⁰, however small it is; a factor below it
            # has too few digits to keep the bound, and the example counts as zero.
            limit = clip * (1 - MARGIN) - tl.sqrt(active.to(tl.float64)) * 1.401298464324817e-45
            scaled = tl.where(limit >= 1.1754943508222875e-38 * norm, limit / tl.maximum(norm, limit), 0.0)
            factor = tl.where(norm > clip * (1 - MARGIN), scaled, 1.0)
            factor = tl.where(finite(total), factor, float("nan"))
            tl.store(factors + agent.to(tl.int64) * capacity + example, factor.to(tl.float32))
            share = tl.where(norm <= clip, 1.0, 0.0).to(tl.float64)
        else:
            share = 1 - tl.sum(two, 0) / tl.maximum(total, 1.0)
        tl.store(shares + agent * capacity + example, share)
