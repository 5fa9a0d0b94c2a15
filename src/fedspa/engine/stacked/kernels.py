# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator,type-arg"
"""Triton kernels over a stack of agents: example e of agent w is number e of its batch, and w has its own parameters.

An agent's batch has any size: buffers have room for `capacity` examples each, and programs beyond an agent's count
leave at once, so padding costs no arithmetic. No tile is chosen by the number of agents or by other agents' batches, so
an agent's numbers do not depend on its company. The layers have kernels of their own in `layers/`, beside their rules,
which are their twins; nothing non-finite is hidden, see `RoundBuffers.flags`.

Offsets within one agent are 32-bit, so an agent's largest tensor has fewer than 2³¹ values.
"""

import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]

from fedspa.mechanisms.clipping import CLIP_MARGIN


@triton.jit
def finite(x):
    """Not by x − x: where x is a product, that may be compiled to fma(a, b, −x), which is x's rounding and not 0."""
    return tl.abs(x) < float("inf")


@triton.jit
def gather(pool, index, x, counts, step, agents, capacity, records, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """x[w, r] = agent w's record number index[step, w, r]."""
    example, agent, s = tl.program_id(1), tl.program_id(2), tl.load(step)
    if example < tl.load(counts + s * agents + agent):
        record = tl.load(index + (s * agents + agent).to(tl.int64) * capacity + example)
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        source = pool + (agent.to(tl.int64) * records + record) * SIZE
        tl.store(x + (agent.to(tl.int64) * capacity + example) * SIZE + at, tl.load(source + at, at < SIZE), at < SIZE)


@triton.jit
def loss_gradient(
    logits, labels, index, delta, counts, step, flags, agents, capacity, records, C: tl.constexpr, BLOCK: tl.constexpr
):
    """δ = softmax(logits) − one-hot(y). A logit that is not finite, or no label, raises the agent's flag."""
    example, agent, s = tl.program_id(0), tl.program_id(1), tl.load(step)
    if example < tl.load(counts + s * agents + agent):
        at = tl.arange(0, BLOCK)
        base = (agent.to(tl.int64) * capacity + example) * C
        z = tl.load(logits + base + at, at < C, other=-float("inf"))
        record = tl.load(index + (s * agents + agent).to(tl.int64) * capacity + example)
        y = tl.load(labels + agent.to(tl.int64) * records + record)
        broken = tl.sum(((at < C) & (finite(z) == 0)).to(tl.int32), 0)
        if (broken > 0) | (y < 0):
            tl.atomic_max(flags + agent, 1)
        e = tl.exp(z - tl.max(z, 0))
        tl.store(delta + base + at, e / tl.sum(e, 0) - tl.where(at == y, 1.0, 0.0), at < C)


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
    theta, coordinates, sums, table, noise, clips, sigmas, batches, sizes, flags, agents, dimension, active,
    LAYERS: tl.constexpr, SPLITS: tl.constexpr, MASKED: tl.constexpr, NOISY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """θ[ω] −= step size · (Σ clipped + noise)/B, with the noise added in float64 and rounded after.

    `table` says of each layer: its first coordinate, its size, where its partial sums are and how many. `sigmas` are in
    units of the clip value.
    """
    agent = tl.program_id(1)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = i < active
    at = i
    if MASKED:
        at = tl.load(coordinates + agent.to(tl.int64) * active + i, valid, other=0)
    start = tl.zeros([BLOCK], dtype=tl.int64)
    stride = tl.zeros([BLOCK], dtype=tl.int64)
    parts = tl.zeros([BLOCK], dtype=tl.int64)
    for layer in tl.static_range(LAYERS):
        low, size = tl.load(table + 4 * layer), tl.load(table + 4 * layer + 1)
        here = (at >= low) & (at < low + size)
        start = tl.where(here, tl.load(table + 4 * layer + 2) + agent * size + at - low, start)
        stride = tl.where(here, agents * size, stride)
        parts = tl.where(here, tl.load(table + 4 * layer + 3), parts)
    total = tl.zeros([BLOCK], dtype=tl.float64)
    for part in tl.static_range(SPLITS):
        total += tl.load(sums + start + part * stride, valid & (part < parts), other=0.0)
    if tl.sum(tl.where(valid & (finite(total) == 0), 1, 0), 0) > 0:
        tl.atomic_max(flags + agent, 1)
    mean = total
    if NOISY:
        sigma = tl.load(sigmas + agent) * tl.load(clips + agent)
        mean += sigma * tl.load(noise + agent.to(tl.int64) * (active + 1) + i, valid, other=0.0)
    mean = mean / tl.load(batches + agent)
    local = theta + agent.to(tl.int64) * dimension + at
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
