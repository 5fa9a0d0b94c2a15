# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator,type-arg"
"""Triton kernels over a stack of agents: row r of agent w is example r of its batch, and w has its own parameters.

An agent's batch has any size: programs beyond its count leave at once, so padding costs no arithmetic. No tile is
chosen by the number of agents or by other agents' batches, so an agent's numbers do not depend on its company. The
twins are in `rules.py`; nothing non-finite is hidden here, see `Stack.flags`.

Positions of a convolution that a 2 × 2 max-pool follows are counted window by window (4·window + place in it), so that
a window's four values are neighbours in a tile.
"""

import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]

SUM, CLAMP, NORM, COUNT = (tl.constexpr(i) for i in range(4))
NONE, RELU, TANH = (tl.constexpr(i) for i in range(3))


@triton.jit
def gather(pool, index, x, counts, step, agents, rows, records, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """x[w, r] = agent w's record number index[step, w, r]."""
    row, agent, s = tl.program_id(1), tl.program_id(2), tl.load(step)
    if row < tl.load(counts + s * agents + agent):
        record = tl.load(index + (s * agents + agent).to(tl.int64) * rows + row)
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        source = pool + (agent.to(tl.int64) * records + record) * SIZE
        tl.store(x + (agent.to(tl.int64) * rows + row) * SIZE + at, tl.load(source + at, at < SIZE), at < SIZE)


@triton.jit
def loss_gradient(
    logits, labels, index, delta, counts, step, flags, agents, rows, records, C: tl.constexpr, BLOCK: tl.constexpr
):
    """δ = softmax(logits) − one-hot(y). A logit that is not finite raises the agent's flag."""
    row, agent, s = tl.program_id(0), tl.program_id(1), tl.load(step)
    if row < tl.load(counts + s * agents + agent):
        at = tl.arange(0, BLOCK)
        base = (agent.to(tl.int64) * rows + row) * C
        z = tl.load(logits + base + at, at < C, other=-float("inf"))
        broken = tl.sum((at < C) & ((z - z) != 0), 0)
        if broken > 0:
            tl.atomic_max(flags + agent, 1)
        e = tl.exp(z - tl.max(z, 0))
        record = tl.load(index + (s * agents + agent).to(tl.int64) * rows + row)
        y = tl.load(labels + agent.to(tl.int64) * records + record)
        tl.store(delta + base + at, e / tl.sum(e, 0) - tl.where(at == y, 1.0, 0.0), at < C)


@triton.jit
def _place(q, OW: tl.constexpr, POOLED: tl.constexpr):
    """Row and column of output position q, and the window it belongs to."""
    if POOLED:
        window = q // 4
        y = (window // (OW // 2)) * 2 + (q % 4) // 2
        x = (window % (OW // 2)) * 2 + q % 2
    else:
        window = q
        y = q // OW
        x = q % OW
    return y, x, window


@triton.jit
def forward(
    x, theta, out, winner, counts, step, agents, rows, dimension, weight,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, N: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    BIAS: tl.constexpr, POOLED: tl.constexpr, ACT: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out = activation(pool(weight · patches + bias)); `winner` is the place of each window's maximum."""
    K: tl.constexpr = C * KH * KW
    WINDOWS: tl.constexpr = (OH // 2) * (OW // 2) if POOLED else OH * OW
    Q: tl.constexpr = 4 * WINDOWS if POOLED else WINDOWS
    agent = tl.program_id(2)
    total = tl.load(counts + tl.load(step) * agents + agent) * Q
    if tl.program_id(0) * BM < total:
        m = tl.program_id(0) * BM + tl.arange(0, BM)
        n = tl.program_id(1) * BN + tl.arange(0, BN)
        row = m // Q
        oy, ox, _window = _place(m % Q, OW, POOLED)
        image = x + (agent.to(tl.int64) * rows + row) * (C * H * W)
        parameters = theta + agent.to(tl.int64) * dimension + weight
        acc = tl.zeros([BM, BN], dtype=tl.float32)
        for k0 in range(0, K, BK):
            k = k0 + tl.arange(0, BK)
            iy = oy[:, None] * SH - PH + ((k % (KH * KW)) // KW)[None, :]
            ix = ox[:, None] * SW - PW + (k % KW)[None, :]
            inside = (m < total)[:, None] & (k < K)[None, :] & (iy >= 0) & (iy < H) & (ix >= 0) & (ix < W)
            patch = tl.load(image[:, None] + (k // (KH * KW))[None, :] * (H * W) + iy * W + ix, inside, other=0.0)
            kernel = tl.load(parameters + n[None, :] * K + k[:, None], (n < N)[None, :] & (k < K)[:, None], other=0.0)
            acc = tl.dot(patch, kernel, acc, input_precision=PRECISION)
        if BIAS:
            acc += tl.load(parameters + N * K + n, n < N, other=0.0)[None, :]
        if POOLED:
            four = tl.reshape(acc, [BM // 4, 4, BN])
            value, place = tl.max(four, axis=1, return_indices=True)
            value += tl.sum(four - four, axis=1)  # a maximum may pass over NaN; this does not
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
        to = (agent.to(tl.int64) * rows + r // WINDOWS) * (N * WINDOWS) + r % WINDOWS
        valid = (r < total // (Q // WINDOWS))[:, None] & (n < N)[None, :]
        tl.store(out + to[:, None] + n[None, :] * WINDOWS, value, valid)
        if POOLED:
            tl.store(winner + to[:, None] + n[None, :] * WINDOWS, place.to(tl.int8), valid)


@triton.jit
def backward(
    delta, winner, theta, x, back, counts, step, agents, rows, dimension, weight,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, N: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    POOLED: tl.constexpr, ACT: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """δ of the inputs, already through the derivative of the activation ACT that made them."""
    RS: tl.constexpr = KH * KW
    WINDOWS: tl.constexpr = (OH // 2) * (OW // 2) if POOLED else OH * OW
    agent = tl.program_id(2)
    total = tl.load(counts + tl.load(step) * agents + agent) * (H * W)
    if tl.program_id(0) * BM < total:
        m = tl.program_id(0) * BM + tl.arange(0, BM)
        c = tl.program_id(1) * BN + tl.arange(0, BN)
        row = agent.to(tl.int64) * rows + m // (H * W)
        iy, ix = (m % (H * W)) // W, m % W
        parameters = theta + agent.to(tl.int64) * dimension + weight
        acc = tl.zeros([BM, BN], dtype=tl.float32)
        for k0 in range(0, N * RS, BK):
            k = k0 + tl.arange(0, BK)
            o = k // RS
            y = iy[:, None] + PH - ((k % RS) // KW)[None, :]
            z = ix[:, None] + PW - (k % KW)[None, :]
            inside = (m < total)[:, None] & (k < N * RS)[None, :] & (y >= 0) & (z >= 0)
            if SH > 1:
                inside = inside & (y % SH == 0)
            if SW > 1:
                inside = inside & (z % SW == 0)
            y = y // SH
            z = z // SW
            if POOLED:
                inside = inside & (y < OH // 2 * 2) & (z < OW // 2 * 2)
                at = row[:, None] * (N * WINDOWS) + (o * WINDOWS)[None, :] + (y // 2) * (OW // 2) + z // 2
                value = tl.load(delta + at, inside, other=0.0)
                place = tl.load(winner + at, inside, other=-1)
                value = tl.where(place == (y % 2) * 2 + z % 2, value, 0.0)
            else:
                inside = inside & (y < OH) & (z < OW)
                at = row[:, None] * (N * WINDOWS) + (o * WINDOWS)[None, :] + y * OW + z
                value = tl.load(delta + at, inside, other=0.0)
            kernel = tl.load(
                parameters + (o * (C * RS) + k % RS)[:, None] + (c * RS)[None, :],
                (k < N * RS)[:, None] & (c < C)[None, :],
                other=0.0,
            )
            acc = tl.dot(value, kernel, acc, input_precision=PRECISION)
        to = row[:, None] * (C * H * W) + (c * (H * W))[None, :] + (m % (H * W))[:, None]
        valid = (m < total)[:, None] & (c < C)[None, :]
        if ACT != NONE:
            made = tl.load(x + to, valid, other=0.0)
            acc = tl.where(made <= 0, 0.0, acc) if ACT == RELU else acc * (1 - made * made)
        tl.store(back + to, acc, valid)


@triton.jit
def _account(g, total, mask, c, first, second, at, MODE: tl.constexpr):
    """What one example's tile of gradients adds: to the sum, or to its row's statistics."""
    if MODE == NORM:
        tl.store(first + at, tl.sum(tl.sum(tl.where(mask, g * g, 0.0), 1), 0))
    else:
        # Clamping would turn an infinity or NaN into c; g − g is 0 for finite numbers and NaN for those.
        total += tl.minimum(tl.maximum(g, -c), c) + (g - g)
        if MODE == COUNT:
            size = tl.abs(g)
            tl.store(first + at, tl.sum(tl.sum(tl.where(mask & (size > 0), 1.0, 0.0), 1), 0))
            tl.store(second + at, tl.sum(tl.sum(tl.where(mask & (size > c), 1.0, 0.0), 1), 0))
    return total


@triton.jit
def _tile_setup(
    masks, clips, agent, dimension, weight, o, j, N: tl.constexpr, K: tl.constexpr, BIAS: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Where the tile's parameters are within the layer (column K is the bias), which are active, and the clip."""
    place = tl.where(j[None, :] < K, o[:, None] * K + j[None, :], N * K + o[:, None])
    valid = (o < N)[:, None] & (j < K + BIAS)[None, :]
    mask = valid
    if MASKED:
        mask = valid & (tl.load(masks + agent.to(tl.int64) * dimension + weight + place, valid, other=0) != 0)
    return place, valid, mask, tl.load(clips + agent).to(tl.float32)


@triton.jit
def conv_sums(
    delta, winner, x, sums, masks, clips, factors, first, second, counts, step,
    agents, rows, dimension, weight, tile, tiles,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, N: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    BIAS: tl.constexpr, POOLED: tl.constexpr, MASKED: tl.constexpr, MODE: tl.constexpr, PRECISION: tl.constexpr,
    SPLIT: tl.constexpr, BO: tl.constexpr, BJ: tl.constexpr, BQ: tl.constexpr,
):  # fmt: skip
    """Σ over examples of the (clamped) weight gradient; a tile of one example's lives in registers only.

    Program `part` of SPLIT takes every SPLIT-th example. Column K, of ones, makes the bias.
    """
    K: tl.constexpr = C * KH * KW
    WINDOWS: tl.constexpr = (OH // 2) * (OW // 2) if POOLED else OH * OW
    Q: tl.constexpr = 4 * WINDOWS if POOLED else WINDOWS
    J: tl.constexpr = (K + BIAS + BJ - 1) // BJ
    part, agent = tl.program_id(1), tl.program_id(2)
    o = (tl.program_id(0) // J) * BO + tl.arange(0, BO)
    j = (tl.program_id(0) % J) * BJ + tl.arange(0, BJ)
    place, valid, mask, clip = _tile_setup(masks, clips, agent, dimension, weight, o, j, N, K, BIAS, MASKED)
    jc, jy, jx = (j // (KH * KW)) * (H * W), (j % (KH * KW)) // KW - PH, j % KW - PW
    total = tl.zeros([BO, BJ], dtype=tl.float32)
    count = tl.load(counts + tl.load(step) * agents + agent)
    for r in range(part, count, SPLIT):
        row = agent.to(tl.int64) * rows + r
        g = tl.zeros([BO, BJ], dtype=tl.float32)
        for q0 in range(0, Q, BQ):
            q = q0 + tl.arange(0, BQ)
            oy, ox, window = _place(q, OW, POOLED)
            at = row * (N * WINDOWS) + (o * WINDOWS)[:, None] + window[None, :]
            inside = (o < N)[:, None] & (q < Q)[None, :]
            d = tl.load(delta + at, inside, other=0.0)
            if POOLED:
                d = tl.where(tl.load(winner + at, inside, other=-1) == (q % 4)[None, :], d, 0.0)
            iy = oy[:, None] * SH + jy[None, :]
            ix = ox[:, None] * SW + jx[None, :]
            within = (q < Q)[:, None] & (j < K)[None, :] & (iy >= 0) & (iy < H) & (ix >= 0) & (ix < W)
            patch = tl.load(x + row * (C * H * W) + jc[None, :] + iy * W + ix, within, other=0.0)
            if BIAS:
                patch = tl.where((j == K)[None, :], 1.0, patch)
            g = tl.dot(d, patch, g, input_precision=PRECISION)
        if MODE == SUM:
            total += g * tl.load(factors + row)
        else:
            total = _account(g, total, mask, clip, first, second, row * tiles + tile + tl.program_id(0), MODE)
    if MODE != NORM:
        tl.store(sums + (part * agents + agent).to(tl.int64) * (N * (K + BIAS)) + place, total, valid)


@triton.jit
def linear_sums(
    delta, x, sums, masks, clips, factors, first, second, counts, step, agents, rows, dimension, weight, tile, tiles,
    C: tl.constexpr, N: tl.constexpr, BIAS: tl.constexpr, MASKED: tl.constexpr, MODE: tl.constexpr,
    SPLIT: tl.constexpr, BO: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    """As `conv_sums` for one position: an example's gradient is the outer product δ·xᵀ, in float32."""
    J: tl.constexpr = (C + BIAS + BJ - 1) // BJ
    part, agent = tl.program_id(1), tl.program_id(2)
    o = (tl.program_id(0) // J) * BO + tl.arange(0, BO)
    j = (tl.program_id(0) % J) * BJ + tl.arange(0, BJ)
    place, valid, mask, clip = _tile_setup(masks, clips, agent, dimension, weight, o, j, N, C, BIAS, MASKED)
    total = tl.zeros([BO, BJ], dtype=tl.float32)
    count = tl.load(counts + tl.load(step) * agents + agent)
    for r in range(part, count, SPLIT):
        row = agent.to(tl.int64) * rows + r
        d = tl.load(delta + row * N + o, o < N, other=0.0)
        a = tl.load(x + row * C + j, j < C, other=0.0)
        if BIAS:
            a = tl.where(j == C, 1.0, a)
        g = d[:, None] * a[None, :]
        if MODE == SUM:
            total += g * tl.load(factors + row)
        else:
            total = _account(g, total, mask, clip, first, second, row * tiles + tile + tl.program_id(0), MODE)
    if MODE != NORM:
        tl.store(sums + (part * agents + agent).to(tl.int64) * (N * (C + BIAS)) + place, total, valid)


@triton.jit
def row_statistics(
    first, second, clips, factors, shares, counts, step, agents, rows, tiles, MODE: tl.constexpr, BLOCK: tl.constexpr
):
    """A row's tiles put together: its factor C/‖g‖ and how much of it the bound leaves alone (`share_below`)."""
    row, agent = tl.program_id(0), tl.program_id(1)
    if row < tl.load(counts + tl.load(step) * agents + agent):
        at = (agent.to(tl.int64) * rows + row) * tiles
        one = tl.zeros([BLOCK], dtype=tl.float64)
        two = tl.zeros([BLOCK], dtype=tl.float64)
        for t0 in range(0, tiles, BLOCK):
            t = t0 + tl.arange(0, BLOCK)
            one += tl.load(first + at + t, t < tiles, other=0.0).to(tl.float64)
            if MODE == COUNT:
                two += tl.load(second + at + t, t < tiles, other=0.0).to(tl.float64)
        total = tl.sum(one, 0)
        clip = tl.load(clips + agent)
        if MODE == NORM:
            norm = tl.sqrt(total)
            factor = clip / tl.maximum(norm, clip) + (total - total)  # NaN if any gradient's square is not finite
            tl.store(factors + agent.to(tl.int64) * rows + row, factor.to(tl.float32))
            share = tl.where(norm <= clip, 1.0, 0.0).to(tl.float64)
        else:
            share = 1 - tl.sum(two, 0) / tl.maximum(total, 1.0)
        tl.store(shares + agent * rows + row, share)
