# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
"""Triton kernels of a step's end: ChaCha20 noise (twin: `chacha.py`), the step itself, the private quantile's clip."""

import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]

from fedspa.engine.stacked.kernels import finite


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
