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

SUM, CLAMP, COUNT, SCALED = (tl.constexpr(i) for i in range(4))
# `CLIP_MARGIN`: covers the rounding of the factor, 2⁻²⁴, and of the sums.
MARGIN = tl.constexpr(2e-6)


@triton.jit
def _account(g, total, mask, c, factors, first, second, row, at, MODE: tl.constexpr):
    """What one example's tile of gradients adds: to the sum, and to its row's statistics."""
    if MODE == SUM:
        total += g.to(tl.float64)
    elif MODE == SCALED:
        wide = tl.where(mask, g, 0.0).to(tl.float64)
        tl.store(first + at, tl.sum(tl.sum(wide * wide, 1), 0))
        total += g.to(tl.float64) * tl.load(factors + row).to(tl.float64)
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
def _bound_below(clip):
    """The greatest float32 that is not above the plan's bound."""
    near = clip.to(tl.float32)
    return tl.where(
        near.to(tl.float64) > clip, (near.to(tl.int32, bitcast=True) - 1).to(tl.float32, bitcast=True), near
    )


@triton.jit
def _active(masks, agent, dimension, weight, place, valid, MASKED: tl.constexpr):
    """Which of the tile's parameters are in the agent's mask."""
    if MASKED:
        valid = valid & (tl.load(masks + agent.to(tl.int64) * dimension + weight + place, valid, other=0) != 0)
    return valid


@triton.jit
def _weight_tile(
    delta, x, to, masks, clip, factors, first, second, part, count, agent, rows, dimension, weight, tile, tiles, o, j,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, N: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    MASKED: tl.constexpr, MODE: tl.constexpr, PRECISION: tl.constexpr,
    SPLIT: tl.constexpr, BO: tl.constexpr, BJ: tl.constexpr, BQ: tl.constexpr,
):  # fmt: skip
    """The gradients of weights [o, j]: for each example δ · patchesᵀ over the positions."""
    K: tl.constexpr = C * KH * KW
    Q: tl.constexpr = OH * OW
    jy, jx = (j % (KH * KW)) // KW - PH, j % KW - PW
    there = (j // (KH * KW)) * (H * W) + jy * W + jx
    place, valid = o[:, None] * K + j[None, :], (o < N)[:, None] & (j < K)[None, :]
    mask = _active(masks, agent, dimension, weight, place, valid, MASKED)
    total = tl.zeros([BO, BJ], dtype=tl.float64)
    for r in range(part, count, SPLIT):
        row = agent.to(tl.int64) * rows + r
        deltas, image = delta + row * (N * Q), x + row * (C * H * W)
        g = tl.zeros([BO, BJ], dtype=tl.float32)
        for q0 in range(0, Q, BQ):
            q = q0 + tl.arange(0, BQ)
            oy, ox = (q // OW) * SH, (q % OW) * SW
            d = tl.load(deltas + ((o * Q)[:, None] + q[None, :]), (o < N)[:, None] & (q < Q)[None, :], other=0.0)
            inside = (j < K)[:, None] & (q < Q)[None, :]
            if PH > 0 or PW > 0:
                iy, ix = jy[:, None] + oy[None, :], jx[:, None] + ox[None, :]
                inside = inside & (iy >= 0) & (iy < H) & (ix >= 0) & (ix < W)
            # Positions last, as in `backward`.
            patch = tl.load(image + (there[:, None] + (oy * W + ox)[None, :]), inside, other=0.0)
            g = tl.dot(d, tl.trans(patch), g, input_precision=PRECISION)
        total = _account(g, total, mask, clip, factors, first, second, row, row * tiles + tile, MODE)
    tl.store(to + place, total, valid)


@triton.jit
def _bias_tile(
    delta, to, masks, clip, factors, first, second, part, count, agent, rows, dimension, weight, tile, tiles, o,
    N: tl.constexpr, K: tl.constexpr, Q: tl.constexpr, MASKED: tl.constexpr, MODE: tl.constexpr,
    SPLIT: tl.constexpr, BO: tl.constexpr, BQ: tl.constexpr,
):  # fmt: skip
    """The gradients of biases o: for each example the sum of δ over the positions."""
    place, valid = (N * K + o)[:, None], (o < N)[:, None]
    mask = _active(masks, agent, dimension, weight, place, valid, MASKED)
    total = tl.zeros([BO, 1], dtype=tl.float64)
    for r in range(part, count, SPLIT):
        row = agent.to(tl.int64) * rows + r
        several = tl.zeros([BO, BQ], dtype=tl.float32)
        for q0 in range(0, Q, BQ):
            q = q0 + tl.arange(0, BQ)
            at = (o * Q)[:, None] + q[None, :]
            several += tl.load(delta + row * (N * Q) + at, valid & (q < Q)[None, :], other=0.0)
        g = tl.sum(several, 1)[:, None]
        total = _account(g, total, mask, clip, factors, first, second, row, row * tiles + tile, MODE)
    tl.store(to + place, total, valid)


@triton.jit
def conv_sums(
    delta, x, sums, masks, clips, factors, first, second, counts, step, agents, rows, dimension, weight, tile, tiles,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, N: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    BIAS: tl.constexpr, MASKED: tl.constexpr, MODE: tl.constexpr, PRECISION: tl.constexpr,
    SPLIT: tl.constexpr, BO: tl.constexpr, BJ: tl.constexpr, BQ: tl.constexpr,
):  # fmt: skip
    """Σ over examples of the (clamped) gradients; a tile of one example's lives in registers only.

    Program `part` of SPLIT takes every SPLIT-th example. The last tile of a group of outputs is their biases.
    """
    K: tl.constexpr = C * KH * KW
    J: tl.constexpr = (K + BJ - 1) // BJ
    part, agent = tl.program_id(1), tl.program_id(2)
    o = (tl.program_id(0) // (J + BIAS)) * BO + tl.arange(0, BO)
    column = tl.program_id(0) % (J + BIAS)
    count = tl.load(counts + tl.load(step) * agents + agent)
    clip = _bound_below(tl.load(clips + agent))
    to = sums + (part * agents + agent).to(tl.int64) * (N * (K + BIAS))
    tile += tl.program_id(0)
    if column < J:
        j = column * BJ + tl.arange(0, BJ)
        _weight_tile(
            delta, x, to, masks, clip, factors, first, second, part, count, agent, rows, dimension, weight, tile, tiles,
            o, j, C, H, W, N, KH, KW, SH, SW, PH, PW, OH, OW, MASKED, MODE, PRECISION, SPLIT, BO, BJ, BQ,
        )  # fmt: skip
    else:
        _bias_tile(
            delta, to, masks, clip, factors, first, second, part, count, agent, rows, dimension, weight, tile, tiles,
            o, N, K, OH * OW, MASKED, MODE, SPLIT, BO, BQ,
        )  # fmt: skip


@triton.jit
def linear_sums(
    delta, x, sums, masks, clips, factors, first, second, counts, step, agents, rows, dimension, weight, tile, tiles,
    C: tl.constexpr, N: tl.constexpr, BIAS: tl.constexpr, MASKED: tl.constexpr, MODE: tl.constexpr,
    SPLIT: tl.constexpr, BO: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    """As `conv_sums` for one position: an example's gradient is the outer product δ·xᵀ, in float32. Column C, of ones,
    makes the bias."""
    J: tl.constexpr = (C + BIAS + BJ - 1) // BJ
    part, agent = tl.program_id(1), tl.program_id(2)
    o = (tl.program_id(0) // J) * BO + tl.arange(0, BO)
    j = (tl.program_id(0) % J) * BJ + tl.arange(0, BJ)
    place = tl.where(j[None, :] < C, o[:, None] * C + j[None, :], N * C + o[:, None])
    valid = (o < N)[:, None] & (j < C + BIAS)[None, :]
    mask = _active(masks, agent, dimension, weight, place, valid, MASKED)
    clip = _bound_below(tl.load(clips + agent))
    total = tl.zeros([BO, BJ], dtype=tl.float64)
    count = tl.load(counts + tl.load(step) * agents + agent)
    for r in range(part, count, SPLIT):
        row = agent.to(tl.int64) * rows + r
        d = tl.load(delta + row * N + o, o < N, other=0.0)
        a = tl.load(x + row * C + j, j < C, other=0.0)
        if BIAS:
            a = tl.where(j == C, 1.0, a)
        g = d[:, None] * a[None, :]
        at = row * tiles + tile + tl.program_id(0)
        total = _account(g, total, mask, clip, factors, first, second, row, at, MODE)
    tl.store(sums + (part * agents + agent).to(tl.int64) * (N * (C + BIAS)) + place, total, valid)


@triton.jit(do_not_specialize=["active"])
def row_statistics(
    first, second, clips, factors, shares, counts, step, agents, rows, tiles, active, MODE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A row's tiles put together: its factor, C/‖g‖ or less, and how much the bound leaves alone (`share_below`)."""
    row, agent = tl.program_id(0), tl.program_id(1)
    if row < tl.load(counts + tl.load(step) * agents + agent):
        at = (agent.to(tl.int64) * rows + row) * tiles
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
            # has too few digits to keep the bound, and the row counts as zero.
            limit = clip * (1 - MARGIN) - tl.sqrt(active.to(tl.float64)) * 1.401298464324817e-45
            scaled = tl.where(limit >= 1.1754943508222875e-38 * norm, limit / tl.maximum(norm, limit), 0.0)
            factor = tl.where(norm > clip * (1 - MARGIN), scaled, 1.0)
            factor = tl.where(finite(total), factor, float("nan"))
            tl.store(factors + agent.to(tl.int64) * rows + row, factor.to(tl.float32))
            share = tl.where(norm <= clip, 1.0, 0.0).to(tl.float64)
        else:
            share = 1 - tl.sum(two, 0) / tl.maximum(total, 1.0)
        tl.store(shares + agent * rows + row, share)
