# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator,type-arg"
"""Triton kernels of a round on a GPU: layers, gradients at the active coordinates, clipped sums, noise, step.

Example e of agent w is line w · EXAMPLES + e. A line's numbers are made by tiles that are chosen by the layer alone, in
an order of the layer's, from that line and its agent's parameters: no line has a part in another's, and a number that
is not finite stays in its own. Sums over examples are in float64, in the examples' order; what is added by several
programs at once is whole numbers, whose sum has no order. `gpu_stack.py` has the twins of the kernels in torch, but for
the layers', whose twins are in `ops.py`.
"""

import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]

from fedspa.mechanisms.clipping import CLIP_MARGIN


@triton.jit
def finite(x):
    """Not by x − x: where x is a product, that may be compiled to fma(a, b, −x), which is x's rounding and not 0."""
    return tl.abs(x) < float("inf")


@triton.jit(do_not_specialize=["first", "examples"])
def gather(pool, index, counts, step, out, agents, capacity, records, examples, first, SIZE, BLOCK: tl.constexpr):
    """The records of a block of places, from place `first` of the step's batch on; zeros at an empty place."""
    line, s = tl.program_id(1), tl.load(step)
    agent, place = line // examples, first + line % examples
    record = tl.load(index + (s * agents + agent).to(tl.int64) * capacity + place)
    there = (place < tl.load(counts + s * agents + agent)) & (record >= 0)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(pool + (agent.to(tl.int64) * records + record) * SIZE + at, (at < SIZE) & there, other=0)
    tl.store(out + line.to(tl.int64) * SIZE + at, value, at < SIZE)


@triton.jit
def turn_weights(weight, out, N, C, TAPS, AHEAD: tl.constexpr, BLOCK: tl.constexpr):
    """A convolution's weights [n, c, tap] as [tap, n, c], or as [tap, c, n]: what is summed over becomes contiguous."""
    first = tl.program_id(2).to(tl.int64) * (N * C * TAPS)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = (n < N)[:, None] & (c < C)[None, :]
    for tap in range(TAPS):
        value = tl.load(weight + first + (n[:, None] * C + c[None, :]) * TAPS + tap, valid, other=0.0)
        to = (n * C)[:, None] + c[None, :] if AHEAD else n[:, None] + (c * N)[None, :]
        tl.store(out + first + tap * (N * C) + to, value, valid)


@triton.jit
def channels_last(x, out, C, P, BLOCK: tl.constexpr):
    """Images [C, P] as [P, C]."""
    across = (P + BLOCK - 1) // BLOCK
    c = (tl.program_id(1) // across) * BLOCK + tl.arange(0, BLOCK)
    p = (tl.program_id(1) % across) * BLOCK + tl.arange(0, BLOCK)
    valid = (c < C)[:, None] & (p < P)[None, :]
    first = tl.program_id(0).to(tl.int64) * (C * P)
    value = tl.load(x + first + ((c * P)[:, None] + p[None, :]), valid, other=0.0)
    tl.store(out + first + (c[:, None] + (p * C)[None, :]), value, valid)


@triton.jit
def _over_taps(
    acc, values, weights, example, y0, x0, live, n,
    H, W, D, N, KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, BACK: tl.constexpr,
    PRECISION: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """acc[m, n] += Σ over taps and channels i of values[example, y, x, i] · weights[tap, n, i], where y is y0 + ky, or
    (y0 − ky)/stride on the way back, and x likewise.

    A block lies within one tap, so that bounds are a matter of positions alone, and loads are whole vectors."""
    blocks = D // BK
    for block in range(KH * KW * blocks):
        tap = block // blocks
        i = (block % blocks) * BK + tl.arange(0, BK)
        inside = live
        if BACK:
            y, z = y0 - tap // KW, x0 - tap % KW
            inside = inside & (y >= 0) & (z >= 0)
            if SH * SW > 1:
                inside = inside & (y % SH == 0) & (z % SW == 0)
                y, z = y // SH, z // SW
            inside = inside & (y < H) & (z < W)
        else:
            y, z = y0 + tap // KW, x0 + tap % KW
            inside = inside & (y >= 0) & (y < H) & (z >= 0) & (z < W)
        at = values + example * (H * W * D) + (y * W + z) * D
        value = tl.load(at[:, None] + i[None, :], inside[:, None], other=0.0)
        kernel = tl.load(weights + ((tap * N + n) * D)[:, None] + i[None, :], (n < N)[:, None], other=0.0)
        acc = tl.dot(value, tl.trans(kernel), acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=["lines"])
def convolve(
    x, weight, bias, out, lines,
    C, H, W, N, PH, PW, OH, OW, KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PADDED: tl.constexpr, BIAS: tl.constexpr, LAST: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out = weight · patches + bias. LAST: x has its channels last, and the weights are turned."""
    K = C * KH * KW
    Q = OH * OW
    agent = tl.program_id(2).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    live, q, example = m < lines * Q, m % Q, (m // Q).to(tl.int64)
    y0, x0 = (q // OW) * SH - PH, (q % OW) * SW - PW
    images, weights = x + agent * lines * (C * H * W), weight + agent * (N * K)
    acc = tl.zeros([BM, BN], dtype=tl.float32)
    if LAST:
        acc = _over_taps(
            acc, images, weights, example, y0, x0, live, n,
            H, W, C, N, KH, KW, 1, 1, False, PRECISION, BK,
        )  # fmt: skip
    else:
        here = images + (example * (C * H * W) + y0 * W + x0)
        for k0 in range(0, K, BK):
            k = k0 + tl.arange(0, BK)
            ky, kx = (k % (KH * KW)) // KW, k % KW
            inside = live[:, None] & (k < K)[None, :]
            if PADDED:
                iy, ix = y0[:, None] + ky[None, :], x0[:, None] + kx[None, :]
                inside = inside & (iy >= 0) & (iy < H) & (ix >= 0) & (ix < W)
            there = (k // (KH * KW)) * (H * W) + ky * W + kx
            patch = tl.load(here[:, None] + there[None, :], inside, other=0.0)
            # Read with k last: the matrix units want both factors' inner dimension contiguous.
            kernel = tl.load(weights + (n[:, None] * K + k[None, :]), (n < N)[:, None] & (k < K)[None, :], other=0.0)
            acc = tl.dot(patch, tl.trans(kernel), acc, input_precision=PRECISION)
    if BIAS:
        acc += tl.load(bias + agent * N + n, n < N, other=0.0)[None, :]
    to = (agent * lines + example) * (N * Q) + q
    tl.store(out + to[:, None] + (n * Q)[None, :], acc, live[:, None] & (n < N)[None, :])


@triton.jit(do_not_specialize=["lines"])
def convolve_back(
    delta, weight, back, lines,
    C, H, W, N, PH, PW, OH, OW, KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PADDED: tl.constexpr, LAST: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """δ of the inputs. LAST: δ has its channels last, and the weights are turned."""
    RS: tl.constexpr = KH * KW
    P = H * W
    agent = tl.program_id(2).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.program_id(1) * BN + tl.arange(0, BN)
    live, p, example = m < lines * P, m % P, (m // P).to(tl.int64)
    iy, ix = p // W + PH, p % W + PW
    deltas, weights = delta + agent * lines * (N * OH * OW), weight + agent * (N * C * RS)
    acc = tl.zeros([BM, BN], dtype=tl.float32)
    if LAST:
        acc = _over_taps(
            acc, deltas, weights, example, iy, ix, live, c, OH, OW, N, C, KH, KW, SH, SW, True, PRECISION, BK
        )
    else:
        here = deltas + example * (N * OH * OW)
        for k0 in range(0, N * RS, BK):
            k = k0 + tl.arange(0, BK)
            o, ky, kx = k // RS, (k % RS) // KW, k % KW
            y, z = iy[:, None] - ky[None, :], ix[:, None] - kx[None, :]
            inside = live[:, None] & (k < N * RS)[None, :] & (y >= 0) & (z >= 0)
            if SH * SW > 1:
                inside = inside & (y % SH == 0) & (z % SW == 0)
                y, z = y // SH, z // SW
            inside = inside & (y < OH) & (z < OW)
            value = tl.load(here[:, None] + ((o * (OH * OW))[None, :] + y * OW + z), inside, other=0.0)
            there = (c * RS)[:, None] + (o * (C * RS) + k % RS)[None, :]
            kernel = tl.load(weights + there, (c < C)[:, None] & (k < N * RS)[None, :], other=0.0)
            acc = tl.dot(value, tl.trans(kernel), acc, input_precision=PRECISION)
    to = (agent * lines + example) * (C * P) + p
    tl.store(back + to[:, None] + (c * P)[None, :], acc, live[:, None] & (c < C)[None, :])


@triton.jit
def pool(
    x, out, winner, PH, PW, PLANES, H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The maximum of each window, and its place there; as torch, the first of equal ones, and the last NaN."""
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live, line = at < PLANES * OH * OW, tl.program_id(0).to(tl.int64)
    plane, oy, ox = at // (OH * OW), (at // OW) % OH, at % OW
    best = tl.full([BLOCK], -float("inf"), tl.float32)
    place = tl.full([BLOCK], -1, tl.int32)
    for spot in tl.static_range(KH * KW):
        y, z = oy * SH - PH + spot // KW, ox * SW - PW + spot % KW
        inside = live & (y >= 0) & (y < H) & (z >= 0) & (z < W)
        value = tl.load(x + line * (PLANES * H * W) + (plane * (H * W) + y * W + z), inside, other=0.0)
        better = inside & ((place < 0) | (value > best) | (value != value))
        best, place = tl.where(better, value, best), tl.where(better, spot, place)
    tl.store(out + line * (PLANES * OH * OW) + at, best, live)
    tl.store(winner + line * (PLANES * OH * OW) + at, place.to(tl.int16), live)


@triton.jit
def pool_back(
    delta, winner, back, PH, PW, PLANES, H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """δ of the windows' maxima to where they were."""
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live, first = at < PLANES * H * W, tl.program_id(0).to(tl.int64) * (PLANES * OH * OW)
    plane, iy, ix = at // (H * W), (at // W) % H + PH, at % W + PW
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for down in tl.static_range((KH + SH - 1) // SH):
        for across in tl.static_range((KW + SW - 1) // SW):
            oy, ox = iy // SH - down, ix // SW - across
            ky, kx = iy - oy * SH, ix - ox * SW
            inside = live & (oy >= 0) & (oy < OH) & (ky < KH) & (ox >= 0) & (ox < OW) & (kx < KW)
            where = first + (plane * (OH * OW) + oy * OW + ox)
            place = tl.load(winner + where, inside, other=-1)
            total += tl.load(delta + where, inside & (place == ky * KW + kx), other=0.0)
    tl.store(back + tl.program_id(0).to(tl.int64) * (PLANES * H * W) + at, total, live)


@triton.jit
def spread(theta, tiles, out, dimension, BLOCK: tl.constexpr):
    """θ of all agents [agents, d] by layers. A tile is [agent, first coordinate, first number of `out`, size]."""
    tile = tiles + tl.program_id(0) * 4
    at = tl.arange(0, BLOCK)
    inside = at < tl.load(tile + 3)
    source = theta + tl.load(tile) * dimension + tl.load(tile + 1)
    tl.store(out + tl.load(tile + 2) + at, tl.load(source + at, inside), inside)


@triton.jit(do_not_specialize=["lines"])
def group_norm(x, weight, bias, out, means, scales, lines, P, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Each group of SIZE channels less its mean, over its deviation; times the channel's weight, plus its bias."""
    line, group, groups = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    length = SIZE * P
    first, channel = (line * groups + group) * length, (line // lines) * (groups * SIZE) + group * SIZE
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, length, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(x + first + at, at < length, other=0.0)
    mean = tl.sum(total, 0) / length
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, length, BLOCK):
        at = start + tl.arange(0, BLOCK)
        away = tl.where(at < length, tl.load(x + first + at, at < length, other=0.0) - mean, 0.0)
        total += away * away
    scale = 1 / tl.sqrt(tl.sum(total, 0) / length + eps)
    tl.store(means + line * groups + group, mean)
    tl.store(scales + line * groups + group, scale)
    for start in range(0, length, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside, c = at < length, channel + at // P
        found = (tl.load(x + first + at, inside, other=0.0) - mean) * scale
        found = found * tl.load(weight + c, inside, other=0.0) + tl.load(bias + c, inside, other=0.0)
        tl.store(out + first + at, found, inside)


@triton.jit(do_not_specialize=["lines"])
def group_norm_back(
    delta, x, means, scales, weight, back, of_weight, of_bias, lines, P,
    SIZE: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """δ of x, and each line's gradients of weight and bias: channels by positions, a tile at a time."""
    line, group, groups = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    first, channel = (line * groups + group) * (SIZE * P), group * SIZE
    own = weight + (line // lines) * (groups * SIZE) + channel
    mean, scale = tl.load(means + line * groups + group), tl.load(scales + line * groups + group)
    plain, along = tl.zeros([BC], dtype=tl.float32), tl.zeros([BC], dtype=tl.float32)
    for c0 in range(0, SIZE, BC):
        c = c0 + tl.arange(0, BC)
        deltas, products = tl.zeros([BC, BP], dtype=tl.float32), tl.zeros([BC, BP], dtype=tl.float32)
        for p0 in range(0, P, BP):
            p = p0 + tl.arange(0, BP)
            inside = (c < SIZE)[:, None] & (p < P)[None, :]
            at = first + (c * P)[:, None] + p[None, :]
            d = tl.load(delta + at, inside, other=0.0)
            deltas += d
            products += tl.where(inside, d * ((tl.load(x + at, inside, other=0.0) - mean) * scale), 0.0)
        to = line * (groups * SIZE) + channel + c
        tl.store(of_bias + to, tl.sum(deltas, 1), c < SIZE)
        tl.store(of_weight + to, tl.sum(products, 1), c < SIZE)
        w = tl.load(own + c, c < SIZE, other=0.0)
        plain += w * tl.sum(deltas, 1)
        along += w * tl.sum(products, 1)
    of_mean, of_scale = tl.sum(plain, 0) / (SIZE * P), tl.sum(along, 0) / (SIZE * P)
    for c0 in range(0, SIZE, BC):
        c = c0 + tl.arange(0, BC)
        w = tl.load(own + c, c < SIZE, other=0.0)
        for p0 in range(0, P, BP):
            p = p0 + tl.arange(0, BP)
            inside = (c < SIZE)[:, None] & (p < P)[None, :]
            at = first + (c * P)[:, None] + p[None, :]
            normed = (tl.load(x + at, inside, other=0.0) - mean) * scale
            found = w[:, None] * tl.load(delta + at, inside, other=0.0) - of_mean - normed * of_scale
            tl.store(back + at, scale * found, inside)


@triton.jit(do_not_specialize=["rows", "each"])
def layer_norm(
    x, weight, bias, out, means, scales, rows, each, F, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Each row of F features less its mean, over its deviation; times the weight and plus the bias of its agent, who
    has `each` rows."""
    r, f = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    inside = (r < rows)[:, None] & (f < F)[None, :]
    value = tl.load(x + (r * F)[:, None] + f[None, :], inside, other=0.0)
    mean = tl.sum(value, 1) / F
    away = tl.where(inside, value - mean[:, None], 0.0)
    scale = 1 / tl.sqrt(tl.sum(away * away, 1) / F + eps)
    own = ((r // each) * F)[:, None] + f[None, :]
    found = away * scale[:, None] * tl.load(weight + own, inside, other=0.0) + tl.load(bias + own, inside, other=0.0)
    tl.store(out + (r * F)[:, None] + f[None, :], found, inside)
    tl.store(means + r, mean, r < rows)
    tl.store(scales + r, scale, r < rows)


@triton.jit(do_not_specialize=["lines"])
def layer_norm_back(
    delta, x, means, scales, weight, back, of_weight, of_bias, lines, T, F,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """δ of x, and each line's gradients of weight and bias, over its T rows in their order."""
    line, f = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    w = tl.load(weight + (line // lines) * F + f, f < F, other=0.0)
    deltas, products = tl.zeros([ROWS, BLOCK], dtype=tl.float32), tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for t0 in range(0, T, ROWS):
        t = t0 + tl.arange(0, ROWS)
        inside = (t < T)[:, None] & (f < F)[None, :]
        at = ((line * T + t) * F)[:, None] + f[None, :]
        mean = tl.load(means + line * T + t, t < T, other=0.0)[:, None]
        scale = tl.load(scales + line * T + t, t < T, other=0.0)[:, None]
        d = tl.load(delta + at, inside, other=0.0)
        normed = tl.where(inside, (tl.load(x + at, inside, other=0.0) - mean) * scale, 0.0)
        deltas += d
        products += d * normed
        weighted = d * w[None, :]
        of_mean, of_scale = tl.sum(weighted, 1)[:, None] / F, tl.sum(weighted * normed, 1)[:, None] / F
        tl.store(back + at, scale * (weighted - of_mean - normed * of_scale), inside)
    tl.store(of_bias + line * F + f, tl.sum(deltas, 0), f < F)
    tl.store(of_weight + line * F + f, tl.sum(products, 0), f < F)


@triton.jit
def attend(
    q, k, v, out, scale, q0, q1, q2, k0, k1, k2, v0, v1, v2, T, S, D, HEADS,
    PRECISION: tl.constexpr, BT: tl.constexpr, BS: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """softmax(q · kᵀ · scale) · v of one head, as [line, T, head, D]; q0, q1 and q2 are the strides of q [n, heads, T,
    D] but for its last, which is 1."""
    line, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    t, s, e = tl.arange(0, BT), tl.arange(0, BS), tl.arange(0, BD)
    rows, others = (t < T)[:, None] & (e < D)[None, :], (s < S)[:, None] & (e < D)[None, :]
    one = tl.load(q + line * q0 + head * q1 + (t * q2)[:, None] + e[None, :], rows, other=0.0)
    keys = tl.load(k + line * k0 + head * k1 + (s * k2)[:, None] + e[None, :], others, other=0.0)
    values = tl.load(v + line * v0 + head * v1 + (s * v2)[:, None] + e[None, :], others, other=0.0)
    shares = _shares(one, keys, scale, s, S, PRECISION)
    found = tl.dot(shares, values, input_precision=PRECISION)
    tl.store(out + (line * T + t)[:, None] * (HEADS * D) + head * D + e[None, :], found, rows)


@triton.jit
def _shares(q, k, scale, s, S, PRECISION: tl.constexpr):
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    scores = tl.where((s < S)[None, :], scores, -float("inf"))
    e = tl.exp(scores - tl.max(scores, 1)[:, None])
    return e / tl.sum(e, 1)[:, None]


@triton.jit
def attend_back(
    delta, q, k, v, to_q, to_k, to_v, scale, d0, d1, d2, q0, q1, q2, k0, k1, k2, v0, v1, v2, T, S, D, HEADS,
    PRECISION: tl.constexpr, BT: tl.constexpr, BS: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """δ of q, k and v, as `attend` writes its result."""
    line, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    t, s, e = tl.arange(0, BT), tl.arange(0, BS), tl.arange(0, BD)
    rows, others = (t < T)[:, None] & (e < D)[None, :], (s < S)[:, None] & (e < D)[None, :]
    one = tl.load(q + line * q0 + head * q1 + (t * q2)[:, None] + e[None, :], rows, other=0.0)
    keys = tl.load(k + line * k0 + head * k1 + (s * k2)[:, None] + e[None, :], others, other=0.0)
    values = tl.load(v + line * v0 + head * v1 + (s * v2)[:, None] + e[None, :], others, other=0.0)
    d = tl.load(delta + line * d0 + head * d1 + (t * d2)[:, None] + e[None, :], rows, other=0.0)
    shares = _shares(one, keys, scale, s, S, PRECISION)
    to = (line * S + s)[:, None] * (HEADS * D) + head * D + e[None, :]
    tl.store(to_v + to, tl.dot(tl.trans(shares), d, input_precision=PRECISION), others)
    of_shares = tl.dot(d, tl.trans(values), input_precision=PRECISION)
    of_scores = shares * (of_shares - tl.sum(shares * of_shares, 1)[:, None]) * scale
    tl.store(to_k + to, tl.dot(tl.trans(of_scores), one, input_precision=PRECISION), others)
    back = tl.dot(of_scores, keys, input_precision=PRECISION)
    tl.store(to_q + (line * T + t)[:, None] * (HEADS * D) + head * D + e[None, :], back, rows)


@triton.jit
def hold(index, held, good, size, allowed, values, ALLOWED: tl.constexpr, BLOCK: tl.constexpr):
    """A line's indices within 0 … size - 1 (or `allowed`), those outside as 0; and whether there were none."""
    line, bad = tl.program_id(0).to(tl.int64), tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, values, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(index + line * values + at, at < values, other=0)
        inside = (value >= 0) & (value < size)
        if ALLOWED:
            inside = inside | (value == allowed)
        tl.store(held + line * values + at, tl.where(inside, value, 0), at < values)
        bad += tl.where((at < values) & (inside == 0), 1, 0)
    tl.store(good + line, tl.where(tl.sum(bad, 0) == 0, 1, 0).to(tl.uint8))


@triton.jit
def class_delta(scores, classes, delta, out, ignored, C: tl.constexpr, BLOCK: tl.constexpr):
    """(softmax(scores) − one-hot(class)) · δ of each line."""
    line = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    z = tl.load(scores + line * C + at, at < C, other=-float("inf"))
    y = tl.load(classes + line)
    e = tl.exp(z - tl.max(z, 0))
    found = (e / tl.sum(e, 0) - tl.where(at == y, 1.0, 0.0)) * tl.load(delta + line)
    # A maximum may pass over NaN; this does not.
    broken = tl.sum(((at < C) & (finite(z) == 0)).to(tl.int32), 0) > 0
    found = tl.where(broken, float("nan"), tl.where(y == ignored, 0.0, found))
    tl.store(out + line * C + at, found, at < C)


@triton.jit
def shift_columns(x, out, C, H, W, PH, PW, KW: tl.constexpr, BLOCK: tl.constexpr):
    """Images [C, H, W] as [KW, C, H + 2 PH, W]: copy z is moved by z − PW columns, with zeros around it. A
    convolution's patches that are as wide as the images are whole pieces of these."""
    line, at, size = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), (H + 2 * PH) * W
    c, y, column = at // size, (at % size) // W - PH, at % W
    there = (at < C * size) & (y >= 0) & (y < H)
    for z in tl.static_range(KW):
        from_x = column + z - PW
        inside = there & (from_x >= 0) & (from_x < W)
        value = tl.load(x + line * (C * H * W) + (c * (H * W) + y * W + from_x), inside, other=0.0)
        tl.store(out + (line * KW + z) * (C * size) + at, value, at < C * size)


@triton.jit
def _over_positions(
    g, deltas, image, o, jy, jx, there, live, q0, N, H: tl.constexpr, W: tl.constexpr, OW: tl.constexpr,
    Q: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PADDED: tl.constexpr, SHIFTED: tl.constexpr,
    PRECISION: tl.constexpr, BQ: tl.constexpr,
):  # fmt: skip
    """g[o, j] += Σ over BQ positions from q0 on of δ[o, position] · patches[j, position]."""
    q = q0 + tl.arange(0, BQ)
    d = tl.load(deltas + ((o * Q)[:, None] + q[None, :]), (o < N)[:, None] & (q < Q)[None, :], other=0.0)
    inside = live[:, None] & (q < Q)[None, :]
    if SHIFTED:
        patch = tl.load(image + (there[:, None] + q[None, :]), inside, other=0.0)
    else:
        oy, ox = (q // OW) * SH, (q % OW) * SW
        if PADDED:
            iy, ix = jy[:, None] + oy[None, :], jx[:, None] + ox[None, :]
            inside = inside & (iy >= 0) & (iy < H) & (ix >= 0) & (ix < W)
        patch = tl.load(image + (there[:, None] + (oy * W + ox)[None, :]), inside, other=0.0)
    return tl.dot(d, tl.trans(patch), g, input_precision=PRECISION)


@triton.jit(do_not_specialize=["number", "lines"])
def cut_convolved(
    delta, x, rows, columns, firsts, width, stride, number, lines,
    C, N, PH, PW, H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, KH: tl.constexpr,
    KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PADDED: tl.constexpr, SHIFTED: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr, SPLIT: tl.constexpr,
    BO: tl.constexpr, BJ: tl.constexpr, BQ: tl.constexpr,
):  # fmt: skip
    """Each line's gradient of a convolution's weights, δ · patchesᵀ over the positions, a tile in registers at a time;
    the active coordinates go to the columns of the line's row that `columns` names, or all of them in their order.
    SHIFTED: x comes from `shift_columns`."""
    K = C * KH * KW
    Q: tl.constexpr = OH * OW
    J = (K + BJ - 1) // BJ
    part, agent = tl.program_id(1), tl.program_id(2).to(tl.int64)
    o = (tl.program_id(0) // J) * BO + tl.arange(0, BO)
    j = (tl.program_id(0) % J) * BJ + tl.arange(0, BJ)
    jy, jx = (j % (KH * KW)) // KW - PH, j % KW - PW
    if SHIFTED:  # W is a multiple of four: whole vectors are read
        there = tl.multiple_of(((j % KW) * C + j // (KH * KW)) * ((H + 2 * PH) * W) + (jy + PH) * W, 4)
        image_size = KW * C * ((H + 2 * PH) * W)
    else:
        there = (j // (KH * KW)) * (H * W) + jy * W + jx
        image_size = C * (H * W)
    place, valid = o[:, None] * K + j[None, :], (o < N)[:, None] & (j < K)[None, :]
    if MASKED:
        column = tl.load(columns + agent * stride + place, valid, other=-1)
        valid = column >= 0
    else:
        column = tl.load(firsts + number) + place
    for r in range(part, lines, SPLIT):
        line = agent * lines + r
        deltas, image = delta + line * (N * Q), x + line * image_size
        g = tl.zeros([BO, BJ], dtype=tl.float32)
        if Q <= BQ:  # without a loop within, that over lines can load ahead
            g = _over_positions(
                g, deltas, image, o, jy, jx, there, j < K, 0, N, H, W, OW, Q, SH, SW, PADDED, SHIFTED, PRECISION, BQ
            )
        else:
            for q0 in range(0, Q, BQ):
                g = _over_positions(
                    g, deltas, image, o, jy, jx, there, j < K, q0,
                    N, H, W, OW, Q, SH, SW, PADDED, SHIFTED, PRECISION, BQ,
                )  # fmt: skip
        tl.store(rows + line * width + column, g, valid)


@triton.jit(do_not_specialize=["number", "lines"])
def cut(
    made, x, rows, where, firsts, width, stride, parts, number, lines, SIZE, K,
    OUTER: tl.constexpr, EXAMPLES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The active ones of the numbers that a program made for each line. OUTER: those are products δ · xᵀ that nobody
    made, of one row per line. Tables have a line per agent, or one for all (`stride` and `parts` are 0)."""
    agent, group = tl.program_id(2).to(tl.int64), tl.program_id(1)
    low = tl.load(firsts + agent * parts + number)
    high = tl.load(firsts + agent * parts + number + 1)
    for start in range(low + tl.program_id(0) * BLOCK, high, tl.num_programs(0) * BLOCK):
        c = start + tl.arange(0, BLOCK)
        inside = c < high
        at = tl.load(where + agent * stride + c, inside, other=0)
        for r in range(group * EXAMPLES, min(group * EXAMPLES + EXAMPLES, lines)):
            line = agent * lines + r
            if OUTER:
                g = tl.load(made + line * (SIZE // K) + at // K, inside, other=0.0)
                g = g * tl.load(x + line * K + at % K, inside, other=0.0)
            else:
                g = tl.load(made + line * SIZE + at, inside, other=0.0)
            tl.store(rows + line * width + c, g, inside)


@triton.jit(do_not_specialize=["examples", "tiles", "first"])
def measure(
    made, ends, clips, squares, alive, above, width, examples, tiles, first, parts,
    COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of one tile of a line: Σ g², and how many are not zero and how many above the clip. `ends` says how many of an
    agent's columns are used."""
    line = tl.program_id(1).to(tl.int64)
    agent = line // examples
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < tl.load(ends + agent * parts)
    g = tl.load(made + line * width + at, inside, other=0.0)
    wide = g.to(tl.float64)
    to = line * tiles + first + tl.program_id(0)
    tl.store(squares + to, tl.sum(wide * wide, 0))
    if COUNT:
        length = tl.abs(wide)
        tl.store(alive + to, tl.sum(tl.where(length > 0, 1, 0), 0).to(tl.float64))
        tl.store(above + to, tl.sum(tl.where(length > tl.load(clips + agent), 1, 0), 0).to(tl.float64))


MARGIN = tl.constexpr(CLIP_MARGIN)
TINY = tl.constexpr(1.1754943508222875e-38)  # float32's least normal number


@triton.jit(do_not_specialize=["examples", "first", "tiles"])
def weigh(
    squares, alive, above, readable, index, counts, step, clips, factors, shares, zeroed,
    agents, capacity, examples, first, tiles, L2: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """An example's tiles put together: its factor, C/‖g‖ or less, 0 where it has no gradient or its place is empty;
    and how much the bound leaves alone (`share_below`). Examples without a gradient are counted."""
    line, s = tl.program_id(0).to(tl.int64), tl.load(step)
    agent, place = line // examples, first + line % examples
    total = tl.zeros([BLOCK], dtype=tl.float64)
    some = tl.zeros([BLOCK], dtype=tl.float64)
    more = tl.zeros([BLOCK], dtype=tl.float64)
    for t0 in range(0, tiles, BLOCK):
        t = t0 + tl.arange(0, BLOCK)
        total += tl.load(squares + line * tiles + t, t < tiles, other=0.0)
        if COUNT:
            some += tl.load(alive + line * tiles + t, t < tiles, other=0.0)
            more += tl.load(above + line * tiles + t, t < tiles, other=0.0)
    square, clip = tl.sum(total, 0), tl.load(clips + agent)
    there = (place < tl.load(counts + s * agents + agent)) & (
        tl.load(index + (s * agents + agent) * capacity + place) >= 0
    )
    counted = (tl.load(readable + line) != 0) & finite(square)
    norm, limit = tl.sqrt(square), clip * (1 - MARGIN)
    factor = limit / tl.maximum(norm, limit) if L2 else tl.full([], 1.0, tl.float64)
    tl.store(factors + line, tl.where(there & counted & (factor >= TINY), factor, 0.0))
    if there & (counted == 0):
        tl.atomic_add(zeroed + agent, 1)
    if COUNT:
        share = (
            tl.where(norm <= clip, 1.0, 0.0).to(tl.float64)
            if L2
            else 1 - tl.sum(more, 0) / tl.maximum(tl.sum(some, 0), 1.0)
        )
        tl.store(shares + agent * capacity + place, tl.where(there, tl.where(counted, share, 1.0), 0.5))


@triton.jit(do_not_specialize=["examples"])
def add(
    rows, factors, clips, coordinates, ends, sums, width, examples, dimension, stride, parts,
    CLAMP: tl.constexpr, MORE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums of an agent's clipped gradients; an example with factor 0 adds nothing, whatever it holds."""
    agent = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < tl.load(ends + agent * parts)
    total = tl.zeros([BLOCK], dtype=tl.float64)
    bound = tl.load(clips + agent) * (1 - MARGIN)
    for first in range(0, examples, ROWS):
        example = first + tl.arange(0, ROWS)
        factor = tl.load(factors + agent * examples + example, example < examples, other=0.0)
        counted = (factor != 0)[:, None] & inside[None, :]
        line = rows + (agent * examples + example)[:, None] * width + at[None, :]
        g = tl.load(line, counted, other=0.0).to(tl.float64)
        g = tl.minimum(tl.maximum(g, -bound), bound) if CLAMP else g * factor[:, None]
        total += tl.sum(g, 0)
    to = sums + agent * dimension + tl.load(coordinates + agent * stride + at, inside, other=0)
    if MORE:
        total += tl.load(to, inside, other=0.0)
    tl.store(to, total, inside)


@triton.jit(do_not_specialize=["examples"])
def scatter(
    values, tokens, factors, clips, sums, examples, words, features, size,
    CLAMP: tl.constexpr, UNITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows of an Embedding: a value goes to its token's row, as a whole number of units."""
    line = tl.program_id(1).to(tl.int64)
    agent = line // examples
    factor = tl.load(factors + line)
    if factor != 0:
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside, clip = at < size, tl.load(clips + agent)
        g = tl.load(values + line * size + at, inside, other=0.0).to(tl.float64)
        if CLAMP:
            bound = clip * (1 - MARGIN)
            g = tl.minimum(tl.maximum(g, -bound), bound)
        else:
            g = g * factor
        token = tl.load(tokens + line * (size // features) + at // features, inside, other=0)
        whole = (g * (UNITS / clip)).to(tl.int64)
        tl.atomic_add(sums + (agent * words + token) * features + at % features, whole, inside & (whole != 0))


@triton.jit
def _quarter(a, b, c, d):
    a += b
    d ^= a
    d = (d << 16) | (d >> 16)
    c += d
    b ^= c
    b = (b << 12) | (b >> 20)
    a += b
    d ^= a
    d = (d << 8) | (d >> 24)
    c += d
    b ^= c
    b = (b << 7) | (b >> 25)
    return a, b, c, d


@triton.jit
def _word(value, zero):
    return zero + value.to(tl.uint32, bitcast=True)


@triton.jit
def _pair(low0, high0, low1, high1, at, out, active, LANES: tl.constexpr):
    """Two values from four words, stored LANES apart."""
    first = low0.to(tl.uint64) | (high0.to(tl.uint64) << 32)
    second = low1.to(tl.uint64) | (high1.to(tl.uint64) << 32)
    finer = ((second & 2047).to(tl.int64).to(tl.float64) + 0.5) * 5.293955920339377e-23  # as `Stream.gaussian`
    uniform = (first >> 1).to(tl.int64).to(tl.float64) * 1.0842021724855044e-19 + finer
    radius = tl.sqrt(-2.0 * tl.log(uniform))
    angle = second.to(tl.int64, bitcast=True).to(tl.float64) * 3.4061215800865545e-19
    tl.store(out + at, radius * tl.cos(angle), at < active)
    tl.store(out + at + LANES, radius * tl.sin(angle), at + LANES < active)


@triton.jit
def noise(keys, step, out, active, LANES: tl.constexpr):
    """Standard normals out[w, active + 1]: draw 0 by all programs but the last, which adds one value of draw 1."""
    group, agent = tl.program_id(0), tl.program_id(1)
    last = group == tl.num_programs(0) - 1
    lane = tl.arange(0, LANES)
    block = tl.where(last, 0, group) * LANES + lane
    zero = tl.zeros([LANES], dtype=tl.uint32)
    key = keys + agent * 8
    k0, k1 = _word(tl.load(key), zero), _word(tl.load(key + 1), zero)
    k2, k3 = _word(tl.load(key + 2), zero), _word(tl.load(key + 3), zero)
    k4, k5 = _word(tl.load(key + 4), zero), _word(tl.load(key + 5), zero)
    k6, k7 = _word(tl.load(key + 6), zero), _word(tl.load(key + 7), zero)
    x0, x1, x2, x3 = zero + 0x61707865, zero + 0x3320646E, zero + 0x79622D32, zero + 0x6B206574
    x4, x5, x6, x7, x8, x9, x10, x11 = k0, k1, k2, k3, k4, k5, k6, k7
    x12, x13 = block.to(tl.uint32), _word(tl.load(step), zero)
    x14, x15 = zero + tl.where(last, 1, 0).to(tl.uint32), zero
    for _ in range(10):
        x0, x4, x8, x12 = _quarter(x0, x4, x8, x12)
        x1, x5, x9, x13 = _quarter(x1, x5, x9, x13)
        x2, x6, x10, x14 = _quarter(x2, x6, x10, x14)
        x3, x7, x11, x15 = _quarter(x3, x7, x11, x15)
        x0, x5, x10, x15 = _quarter(x0, x5, x10, x15)
        x1, x6, x11, x12 = _quarter(x1, x6, x11, x12)
        x2, x7, x8, x13 = _quarter(x2, x7, x8, x13)
        x3, x4, x9, x14 = _quarter(x3, x4, x9, x14)
    x0, x1, x2, x3 = x0 + 0x61707865, x1 + 0x3320646E, x2 + 0x79622D32, x3 + 0x6B206574
    x4, x5, x6, x7 = x4 + k0, x5 + k1, x6 + k2, x7 + k3
    x8, x9, x10, x11 = x8 + k4, x9 + k5, x10 + k6, x11 + k7
    x12 += block.to(tl.uint32)
    x13 += _word(tl.load(step), zero)
    x14 += tl.where(last, 1, 0).to(tl.uint32)
    to = out + agent.to(tl.int64) * (active + 1)
    at = tl.where(last, active, group * (8 * LANES)) + lane
    size = tl.where(last, active + 1, active)
    _pair(x0, x1, x2, x3, at, to, size, LANES)
    _pair(x4, x5, x6, x7, at + 2 * LANES, to, size, LANES)
    _pair(x8, x9, x10, x11, at + 4 * LANES, to, size, LANES)
    _pair(x12, x13, x14, x15, at + 6 * LANES, to, size, LANES)


@triton.jit
def take_step(
    theta, coordinates, sums, noise, clips, sigmas, batches, sizes, dimension, active,
    MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """θ[ω] −= step size · (Σ clipped + noise)/B, with the noise added in float64 and rounded after; `sigmas` are in
    units of the clip value."""
    agent = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = i < active
    at = i.to(tl.int64)
    if MASKED:
        at = tl.load(coordinates + agent * active + i, valid, other=0)
    total = tl.load(sums + agent * dimension + at, valid, other=0.0)
    sigma = tl.load(sigmas + agent) * tl.load(clips + agent)
    total += sigma * tl.load(noise + agent * (active + 1) + i, valid, other=0.0)
    mean = total / tl.load(batches + agent)
    local = theta + agent * dimension + at
    tl.store(local, tl.load(local, valid, other=0.0) - (tl.load(sizes + agent) * mean).to(tl.float32), valid)


@triton.jit
def move_clip(
    shares, noise, clips, count_sigmas, batches, counts, step, agents, capacity, active,
    RATE: tl.constexpr, QUANTILE: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The private quantile (`noisy_mean`): log C moves by −RATE · (noisy share below C − QUANTILE), within bounds."""
    agent = tl.program_id(0)
    count = tl.load(counts + tl.load(step) * agents + agent)
    total = tl.zeros([BLOCK], dtype=tl.float64)
    for r0 in range(0, count, BLOCK):
        r = r0 + tl.arange(0, BLOCK)
        total += tl.where(r < count, tl.load(shares + agent * capacity + r, r < count, other=0.0) - 0.5, 0.0)
    drawn = tl.load(noise + agent.to(tl.int64) * (active + 1) + active)
    noisy = tl.sum(total, 0) + tl.load(count_sigmas + agent) * drawn
    share = 0.5 + noisy / tl.load(batches + agent)
    moved = tl.load(clips + agent) * tl.exp(-RATE * (share - QUANTILE))
    tl.store(clips + agent, tl.minimum(tl.maximum(moved, LEAST), MOST))
