# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator,type-arg"
"""Triton kernels of layers, forwards and backwards. Their twins in torch are in `ops.py`.

A line's numbers are made by tiles that are chosen by the layer alone, in an order of the layer's, from that line and
its agent's parameters: no line has a part in another's, and a number that is not finite stays in its own.
"""

import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]


@triton.jit
def finite(x):
    """Not by x − x: where x is a product, that may be compiled to fma(a, b, −x), which is x's rounding and not 0."""
    return tl.abs(x) < float("inf")


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
