# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator,type-arg"
"""Triton kernels of a round on a GPU: batches, gradients at the active coordinates, clipped sums, noise, step.

Example e of agent w is line w · EXAMPLES + e. A line's numbers are made by tiles that are chosen by the layer alone, in
an order of the layer's, from that line and its agent's parameters: no line has a part in another's, and a number that
is not finite stays in its own. Sums over examples are in float64, in the examples' order; what is added by several
programs at once is whole numbers, whose sum has no order.
"""

import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]

from fedspa.engine.traced.gpu_layers import finite
from fedspa.mechanisms.clipping import CLIP_MARGIN


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
def spread(theta, tiles, out, dimension, BLOCK: tl.constexpr):
    """θ of all agents [agents, d] by layers. A tile is [agent, first coordinate, first number of `out`, size]."""
    tile = tiles + tl.program_id(0) * 4
    at = tl.arange(0, BLOCK)
    inside = at < tl.load(tile + 3)
    source = theta + tl.load(tile) * dimension + tl.load(tile + 1)
    tl.store(out + tl.load(tile + 2) + at, tl.load(source + at, inside), inside)


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
def measure(made, ends, squares, width, examples, tiles, first, parts, BLOCK: tl.constexpr):
    """Σ g² of one tile of a line. `ends` says how many of an agent's columns are used."""
    line = tl.program_id(1).to(tl.int64)
    agent = line // examples
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < tl.load(ends + agent * parts)
    g = tl.load(made + line * width + at, inside, other=0.0)
    wide = g.to(tl.float64)
    tl.store(squares + line * tiles + first + tl.program_id(0), tl.sum(wide * wide, 0))


MARGIN = tl.constexpr(CLIP_MARGIN)
TINY = tl.constexpr(1.1754943508222875e-38)  # float32's least normal number


@triton.jit(do_not_specialize=["examples", "first", "tiles"])
def weigh(
    squares, readable, index, counts, step, clips, factors, zeroed,
    agents, capacity, examples, first, tiles, L2: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """An example's tiles put together: its factor, C/‖g‖ or less, 0 where it has no gradient or its place is empty.
    Examples without a gradient are counted."""
    line, s = tl.program_id(0).to(tl.int64), tl.load(step)
    agent, place = line // examples, first + line % examples
    total = tl.zeros([BLOCK], dtype=tl.float64)
    for t0 in range(0, tiles, BLOCK):
        t = t0 + tl.arange(0, BLOCK)
        total += tl.load(squares + line * tiles + t, t < tiles, other=0.0)
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
    """Standard normals out[w, active]."""
    group, agent = tl.program_id(0), tl.program_id(1)
    lane = tl.arange(0, LANES)
    block = group * LANES + lane
    zero = tl.zeros([LANES], dtype=tl.uint32)
    key = keys + agent * 8
    k0, k1 = _word(tl.load(key), zero), _word(tl.load(key + 1), zero)
    k2, k3 = _word(tl.load(key + 2), zero), _word(tl.load(key + 3), zero)
    k4, k5 = _word(tl.load(key + 4), zero), _word(tl.load(key + 5), zero)
    k6, k7 = _word(tl.load(key + 6), zero), _word(tl.load(key + 7), zero)
    x0, x1, x2, x3 = zero + 0x61707865, zero + 0x3320646E, zero + 0x79622D32, zero + 0x6B206574
    x4, x5, x6, x7, x8, x9, x10, x11 = k0, k1, k2, k3, k4, k5, k6, k7
    x12, x13 = block.to(tl.uint32), _word(tl.load(step), zero)
    x14, x15 = zero, zero
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
    to = out + agent.to(tl.int64) * active
    at = group * (8 * LANES) + lane
    _pair(x0, x1, x2, x3, at, to, active, LANES)
    _pair(x4, x5, x6, x7, at + 2 * LANES, to, active, LANES)
    _pair(x8, x9, x10, x11, at + 4 * LANES, to, active, LANES)
    _pair(x12, x13, x14, x15, at + 6 * LANES, to, active, LANES)


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
    total += sigma * tl.load(noise + agent * active + i, valid, other=0.0)
    mean = total / tl.load(batches + agent)
    local = theta + agent * dimension + at
    tl.store(local, tl.load(local, valid, other=0.0) - (tl.load(sizes + agent) * mean).to(tl.float32), valid)
