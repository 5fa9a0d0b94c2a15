# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator,type-arg"
"""Triton kernels of `weighted.py`: the sums of gradients. Conventions in `kernels.py` and `sum_kernels.py`."""

import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]

from fedspa.engine.stacked.sum_kernels import account, active_of, bound_below


@triton.jit
def _weight_tile(
    delta, x, to, masks, clip, factors, first, second, part, count, agent, capacity, dimension, weight, tile, tiles,
    o, j,
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
    mask = active_of(masks, agent, dimension, weight, place, valid, MASKED)
    total = tl.zeros([BO, BJ], dtype=tl.float64)
    for r in range(part, count, SPLIT):
        example = agent.to(tl.int64) * capacity + r
        deltas, image = delta + example * (N * Q), x + example * (C * H * W)
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
        total = account(g, total, mask, clip, factors, first, second, example, example * tiles + tile, MODE)
    tl.store(to + place, total, valid)


@triton.jit
def _bias_tile(
    delta, to, masks, clip, factors, first, second, part, count, agent, capacity, dimension, weight, tile, tiles, o,
    N: tl.constexpr, K: tl.constexpr, Q: tl.constexpr, MASKED: tl.constexpr, MODE: tl.constexpr,
    SPLIT: tl.constexpr, BO: tl.constexpr, BQ: tl.constexpr,
):  # fmt: skip
    """The gradients of biases o: for each example the sum of δ over the positions."""
    place, valid = (N * K + o)[:, None], (o < N)[:, None]
    mask = active_of(masks, agent, dimension, weight, place, valid, MASKED)
    total = tl.zeros([BO, 1], dtype=tl.float64)
    for r in range(part, count, SPLIT):
        example = agent.to(tl.int64) * capacity + r
        several = tl.zeros([BO, BQ], dtype=tl.float32)
        for q0 in range(0, Q, BQ):
            q = q0 + tl.arange(0, BQ)
            at = (o * Q)[:, None] + q[None, :]
            several += tl.load(delta + example * (N * Q) + at, valid & (q < Q)[None, :], other=0.0)
        g = tl.sum(several, 1)[:, None]
        total = account(g, total, mask, clip, factors, first, second, example, example * tiles + tile, MODE)
    tl.store(to + place, total, valid)


@triton.jit
def conv_sums(
    delta, x, sums, masks, clips, factors, first, second, counts, step, agents, capacity, dimension, weight, tile,
    tiles, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, N: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
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
    clip = bound_below(tl.load(clips + agent))
    to = sums + (part * agents + agent).to(tl.int64) * (N * (K + BIAS))
    tile += tl.program_id(0)
    if column < J:
        j = column * BJ + tl.arange(0, BJ)
        _weight_tile(
            delta, x, to, masks, clip, factors, first, second, part, count, agent, capacity, dimension, weight, tile,
            tiles, o, j, C, H, W, N, KH, KW, SH, SW, PH, PW, OH, OW, MASKED, MODE, PRECISION, SPLIT, BO, BJ, BQ,
        )  # fmt: skip
    else:
        _bias_tile(
            delta, to, masks, clip, factors, first, second, part, count, agent, capacity, dimension, weight, tile,
            tiles, o, N, K, OH * OW, MASKED, MODE, SPLIT, BO, BQ,
        )  # fmt: skip


@triton.jit
def linear_sums(
    delta, x, sums, masks, clips, factors, first, second, counts, step, agents, capacity, dimension, weight, tile,
    tiles, C: tl.constexpr, N: tl.constexpr, BIAS: tl.constexpr, MASKED: tl.constexpr, MODE: tl.constexpr,
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
    mask = active_of(masks, agent, dimension, weight, place, valid, MASKED)
    clip = bound_below(tl.load(clips + agent))
    total = tl.zeros([BO, BJ], dtype=tl.float64)
    count = tl.load(counts + tl.load(step) * agents + agent)
    for r in range(part, count, SPLIT):
        example = agent.to(tl.int64) * capacity + r
        d = tl.load(delta + example * N + o, o < N, other=0.0)
        a = tl.load(x + example * C + j, j < C, other=0.0)
        if BIAS:
            a = tl.where(j == C, 1.0, a)
        g = d[:, None] * a[None, :]
        at = example * tiles + tile + tl.program_id(0)
        total = account(g, total, mask, clip, factors, first, second, example, at, MODE)
    tl.store(sums + (part * agents + agent).to(tl.int64) * (N * (C + BIAS)) + place, total, valid)
