# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator,type-arg"
"""Triton kernels of `weighted.py`: forward, backward and the sums of gradients. Conventions in `kernels.py`."""

import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]

from fedspa.engine.stacked.kernels import account, active_of, bound_below, finite

__all__ = ["NONE", "RELU", "TANH", "backward", "channels_last", "conv_sums", "forward", "linear_sums", "turn_weights"]

NONE, RELU, TANH = (tl.constexpr(i) for i in range(3))


@triton.jit
def turn_weights(
    theta, ahead, back, dimension, weight, N: tl.constexpr, C: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr
):
    """A convolution's weights [n, c, tap] as [tap, n, c] and as [tap, c, n]: what is summed over becomes contiguous."""
    agent = tl.program_id(2)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = (n < N)[:, None] & (c < C)[None, :]
    source = theta + agent.to(tl.int64) * dimension + weight + (n[:, None] * C + c[None, :]) * TAPS
    first = agent.to(tl.int64) * (N * C * TAPS)
    for tap in range(TAPS):
        value = tl.load(source + tap, valid, other=0.0)
        tl.store(ahead + first + tap * (N * C) + ((n * C)[:, None] + c[None, :]), value, valid)
        tl.store(back + first + tap * (N * C) + (n[:, None] + (c * N)[None, :]), value, valid)


@triton.jit
def channels_last(x, out, counts, step, agents, capacity, C: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr):
    """Images [C, P] as [P, C]."""
    example, agent = tl.program_id(1), tl.program_id(2)
    if example < tl.load(counts + tl.load(step) * agents + agent):
        across: tl.constexpr = (P + BLOCK - 1) // BLOCK
        c = (tl.program_id(0) // across) * BLOCK + tl.arange(0, BLOCK)
        p = (tl.program_id(0) % across) * BLOCK + tl.arange(0, BLOCK)
        valid = (c < C)[:, None] & (p < P)[None, :]
        first = (agent.to(tl.int64) * capacity + example) * (C * P)
        value = tl.load(x + first + ((c * P)[:, None] + p[None, :]), valid, other=0.0)
        tl.store(out + first + (c[:, None] + (p * C)[None, :]), value, valid)


@triton.jit
def _over_taps(
    acc, values, weights, example, y0, x0, live, n,
    H: tl.constexpr, W: tl.constexpr, D: tl.constexpr, N: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    SIGN: tl.constexpr, BOUNDED: tl.constexpr, PRECISION: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """acc[m, n] += Σ over taps and channels i of values[example, y0 ± ky, x0 ± kx, i] · weights[tap, n, i].

    A block lies within one tap, so that bounds are a matter of positions alone, and loads are whole vectors."""
    BLOCKS: tl.constexpr = D // BK
    for block in range(KH * KW * BLOCKS):
        tap = block // BLOCKS
        i = (block % BLOCKS) * BK + tl.arange(0, BK)
        y, z = y0 + SIGN * (tap // KW), x0 + SIGN * (tap % KW)
        inside = live
        if BOUNDED:
            inside = inside & (y >= 0) & (y < H) & (z >= 0) & (z < W)
        value = tl.load(values + ((((example * H + y) * W + z) * D)[:, None] + i[None, :]), inside[:, None], other=0.0)
        kernel = tl.load(weights + (((tap * N + n) * D)[:, None] + i[None, :]), (n < N)[:, None], other=0.0)
        acc = tl.dot(value, tl.trans(kernel), acc, input_precision=PRECISION)
    return acc


@triton.jit
def forward(
    x, theta, turned, out, winner, copy, counts, step, agents, capacity, dimension, weight,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, N: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    BIAS: tl.constexpr, POOLED: tl.constexpr, ACT: tl.constexpr, LAST: tl.constexpr, COPY: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out = activation(pool(weight · patches + bias)); `winner` is the place of each window's maximum.

    Where a 2 × 2 max-pool follows, positions are counted window by window (4·window + place in it), so that a window's
    four values are neighbours in a tile. LAST: x has its channels last, and `turned` are the weights. COPY: `copy` gets
    the output with its channels last.
    """
    K: tl.constexpr = C * KH * KW
    Q: tl.constexpr = OH * OW
    WINDOWS: tl.constexpr = Q // 4 if POOLED else Q
    agent = tl.program_id(2)
    total = tl.load(counts + tl.load(step) * agents + agent) * Q
    if tl.program_id(0) * BM < total:
        m = tl.program_id(0) * BM + tl.arange(0, BM)
        n = tl.program_id(1) * BN + tl.arange(0, BN)
        q = m % Q
        if POOLED:
            oy = (q // 4 // (OW // 2)) * 2 + (q % 4) // 2
            ox = (q // 4 % (OW // 2)) * 2 + q % 2
        else:
            oy = q // OW
            ox = q % OW
        images = x + agent.to(tl.int64) * capacity * (C * H * W)
        here = (m // Q) * (C * H * W) + (oy * SH - PH) * W + ox * SW - PW
        parameters = theta + agent.to(tl.int64) * dimension + weight
        acc = tl.zeros([BM, BN], dtype=tl.float32)
        if LAST:
            acc = _over_taps(
                acc, images, turned + agent.to(tl.int64) * (N * K), m // Q, oy - PH, ox - PW, m < total, n,
                H, W, C, N, KH, KW, 1, PH + PW > 0, PRECISION, BK,
            )  # fmt: skip
        for k0 in range(0, 0 if LAST else K, BK):
            k = k0 + tl.arange(0, BK)
            ky, kx = (k % (KH * KW)) // KW, k % KW
            inside = (m < total)[:, None] & (k < K)[None, :]
            if PH > 0 or PW > 0:
                iy = (oy * SH - PH)[:, None] + ky[None, :]
                ix = (ox * SW - PW)[:, None] + kx[None, :]
                inside = inside & (iy >= 0) & (iy < H) & (ix >= 0) & (ix < W)
            there = (k // (KH * KW)) * (H * W) + ky * W + kx
            patch = tl.load(images + (here[:, None] + there[None, :]), inside, other=0.0)
            kernel = tl.load(parameters + (n[None, :] * K + k[:, None]), (n < N)[None, :] & (k < K)[:, None], other=0.0)
            acc = tl.dot(patch, kernel, acc, input_precision=PRECISION)
        if BIAS:
            acc += tl.load(parameters + N * K + n, n < N, other=0.0)[None, :]
        if POOLED:
            four = tl.reshape(acc, [BM // 4, 4, BN])
            value, place = tl.max(four, axis=1, return_indices=True)
            # A maximum may pass over NaN; this does not.
            value = tl.where(tl.sum(tl.where(finite(four), 0, 1), axis=1) > 0, float("nan"), value)
            r = tl.program_id(0) * (BM // 4) + tl.arange(0, BM // 4)
        else:
            value = acc
            place = acc
            r = m
        if ACT == RELU:
            value = tl.where(value <= 0, 0.0, value)
        if ACT == TANH:
            e = tl.exp(-2 * tl.abs(value))
            value = tl.where(value < 0, -1.0, 1.0) * (1 - e) / (1 + e)
        first = agent.to(tl.int64) * capacity * (N * WINDOWS)
        to = ((r // WINDOWS) * (N * WINDOWS) + r % WINDOWS)[:, None] + (n * WINDOWS)[None, :]
        valid = (r < total // (Q // WINDOWS))[:, None] & (n < N)[None, :]
        tl.store(out + first + to, value, valid)
        if COPY:
            tl.store(copy + first + ((r * N)[:, None] + n[None, :]), value, valid)
        if POOLED:
            tl.store(winner + first + to, place.to(tl.int8), valid)


@triton.jit
def backward(
    delta, theta, turned, x, winner, back, counts, step, agents, capacity, dimension, weight,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, N: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    ACT: tl.constexpr, UNPOOL: tl.constexpr, LAST: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """δ of the inputs, through the derivative of the activation ACT that made them, and back through the pooling
    before it: UNPOOL is the width of the pooling's own input (0: none), `winner` where each maximum was. LAST: δ has
    its channels last, and `turned` are the weights."""
    RS: tl.constexpr = KH * KW
    agent = tl.program_id(2)
    total = tl.load(counts + tl.load(step) * agents + agent) * (H * W)
    if tl.program_id(0) * BM < total:
        m = tl.program_id(0) * BM + tl.arange(0, BM)
        c = tl.program_id(1) * BN + tl.arange(0, BN)
        example = m // (H * W)
        iy, ix = (m % (H * W)) // W + PH, m % W + PW
        deltas = delta + agent.to(tl.int64) * capacity * (N * OH * OW)
        parameters = theta + agent.to(tl.int64) * dimension + weight
        acc = tl.zeros([BM, BN], dtype=tl.float32)
        if LAST:
            acc = _over_taps(
                acc, deltas, turned + agent.to(tl.int64) * (N * C * RS), example, iy, ix, m < total, c,
                OH, OW, N, C, KH, KW, -1, True, PRECISION, BK,
            )  # fmt: skip
        for k0 in range(0, 0 if LAST else N * RS, BK):
            k = k0 + tl.arange(0, BK)
            o, ky, kx = k // RS, (k % RS) // KW, k % KW
            inside = (m < total)[:, None] & (k < N * RS)[None, :]
            if H * W * RS == 1 and PH + PW == 0:
                at = (example * N)[:, None] + o[None, :]
            elif SH * SW == 1:
                y, z = iy[:, None] - ky[None, :], ix[:, None] - kx[None, :]
                inside = inside & (y >= 0) & (y < OH) & (z >= 0) & (z < OW)
                at = (example * (N * OH * OW) + iy * OW + ix)[:, None] + (o * (OH * OW) - ky * OW - kx)[None, :]
            else:
                y, z = iy[:, None] - ky[None, :], ix[:, None] - kx[None, :]
                inside = inside & (y >= 0) & (z >= 0) & (y % SH == 0) & (z % SW == 0)
                inside = inside & (y < OH * SH) & (z < OW * SW)
                at = (example * (N * OH * OW))[:, None] + (o * (OH * OW))[None, :] + (y // SH) * OW + z // SW
            value = tl.load(deltas + at, inside, other=0.0)
            # Read with k last: the matrix units want both factors' inner dimension contiguous.
            kernel = tl.load(
                parameters + ((c * RS)[:, None] + (o * (C * RS) + k % RS)[None, :]),
                (c < C)[:, None] & (k < N * RS)[None, :],
                other=0.0,
            )
            acc = tl.dot(value, tl.trans(kernel), acc, input_precision=PRECISION)
        valid = (m < total)[:, None] & (c < C)[None, :]
        first = agent.to(tl.int64) * capacity * (C * H * W)
        to = (example * (C * H * W) + m % (H * W))[:, None] + (c * (H * W))[None, :]
        if ACT != NONE:
            made = tl.load(x + first + to, valid, other=0.0)
            acc = tl.where(made <= 0, 0.0, acc) if ACT == RELU else acc * (1 - made * made)
        if UNPOOL == 0:
            tl.store(back + first + to, acc, valid)
        else:
            # Pooled values lie plane by plane, line by line, and so do the windows of two lines below them. A sum of
            # two vectors, and one store at a time: offsets of their own for each value took half of all registers.
            place = tl.load(winner + first + to, valid, other=0)
            if H * W == 1:
                down, across = example * (4 * C), (c // (UNPOOL // 2)) * (2 * UNPOOL) + (c % (UNPOOL // 2)) * 2
            else:
                down, across = (
                    example * (4 * C * H * W) + ((m % (H * W)) // W) * (2 * UNPOOL) + (m % W) * 2,
                    c * (4 * H * W),
                )
            for spot in tl.static_range(4):
                window = back + 4 * first + (spot // 2) * UNPOOL + spot % 2
                tl.store(window + (down[:, None] + across[None, :]), tl.where(place == spot, acc, 0.0), valid)


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
