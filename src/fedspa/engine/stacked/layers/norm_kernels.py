# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator,type-arg"
"""Triton kernels of `norm.py`. Conventions in `kernels.py`."""

import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]

from fedspa.engine.stacked.kernels import account, active_of, bound_below


@triton.jit
def normalize(
    x, theta, out, normal, scales, counts, step, agents, capacity, dimension, weight, bias,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, PARAMETERS: tl.constexpr, INNER: tl.constexpr, EPSILON: tl.constexpr,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One group of SIZE values to mean 0 and variance 1 (`normal`), then weight and bias (`out`)."""
    group, example, agent = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if example < tl.load(counts + tl.load(step) * agents + agent):
        first = ((agent.to(tl.int64) * capacity + example) * GROUPS + group) * SIZE
        parameters = theta + agent.to(tl.int64) * dimension
        total = tl.zeros([BLOCK], dtype=tl.float32)
        for start in range(0, SIZE, BLOCK):
            at = start + tl.arange(0, BLOCK)
            total += tl.load(x + first + at, at < SIZE, other=0.0)
        mean = tl.sum(total, 0) / SIZE
        squares = tl.zeros([BLOCK], dtype=tl.float32)
        for start in range(0, SIZE, BLOCK):
            at = start + tl.arange(0, BLOCK)
            centred = tl.where(at < SIZE, tl.load(x + first + at, at < SIZE, other=0.0) - mean, 0.0)
            squares += centred * centred
        scale = 1 / tl.sqrt_rn(tl.sum(squares, 0) / SIZE + EPSILON)
        tl.store(scales + (agent.to(tl.int64) * capacity + example) * GROUPS + group, scale)
        for start in range(0, SIZE, BLOCK):
            at = start + tl.arange(0, BLOCK)
            value = (tl.load(x + first + at, at < SIZE, other=0.0) - mean) * scale
            tl.store(normal + first + at, value, at < SIZE)
            place = ((group * SIZE + at) // INNER) % PARAMETERS
            if WEIGHT:
                value *= tl.load(parameters + weight + place, at < SIZE, other=0.0)
            if BIAS:
                value += tl.load(parameters + bias + place, at < SIZE, other=0.0)
            tl.store(out + first + at, value, at < SIZE)


@triton.jit
def normalize_backward(
    delta, theta, normal, scales, back, counts, step, agents, capacity, dimension, weight,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, PARAMETERS: tl.constexpr, INNER: tl.constexpr,
    WEIGHT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """δ of a group's inputs: scale · (δ' − mean δ' − x̂ · mean δ'x̂), where δ' is δ times the weights."""
    group, example, agent = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if example < tl.load(counts + tl.load(step) * agents + agent):
        first = ((agent.to(tl.int64) * capacity + example) * GROUPS + group) * SIZE
        parameters = theta + agent.to(tl.int64) * dimension + weight
        total = tl.zeros([BLOCK], dtype=tl.float32)
        along = tl.zeros([BLOCK], dtype=tl.float32)
        for start in range(0, SIZE, BLOCK):
            at = start + tl.arange(0, BLOCK)
            d = tl.load(delta + first + at, at < SIZE, other=0.0)
            if WEIGHT:
                d *= tl.load(parameters + ((group * SIZE + at) // INNER) % PARAMETERS, at < SIZE, other=0.0)
            total += d
            along += d * tl.load(normal + first + at, at < SIZE, other=0.0)
        mean, slope = tl.sum(total, 0) / SIZE, tl.sum(along, 0) / SIZE
        scale = tl.load(scales + (agent.to(tl.int64) * capacity + example) * GROUPS + group)
        for start in range(0, SIZE, BLOCK):
            at = start + tl.arange(0, BLOCK)
            d = tl.load(delta + first + at, at < SIZE, other=0.0)
            if WEIGHT:
                d *= tl.load(parameters + ((group * SIZE + at) // INNER) % PARAMETERS, at < SIZE, other=0.0)
            value = tl.load(normal + first + at, at < SIZE, other=0.0)
            tl.store(back + first + at, scale * (d - mean - value * slope), at < SIZE)


@triton.jit
def norm_sums(
    delta, normal, sums, masks, clips, factors, first, second, counts, step, agents, capacity, dimension, weight, tile,
    tiles, OUTER: tl.constexpr, PARAMETERS: tl.constexpr, INNER: tl.constexpr, WEIGHT: tl.constexpr,
    KINDS: tl.constexpr, MASKED: tl.constexpr, MODE: tl.constexpr, SPLIT: tl.constexpr, BO: tl.constexpr,
    BQ: tl.constexpr,
):  # fmt: skip
    """The weight's gradients Σ δ·x̂ over a parameter's places, then (the later half of the programs) the bias's, Σ δ."""
    TILES: tl.constexpr = (PARAMETERS + BO - 1) // BO
    Q: tl.constexpr = OUTER * INNER
    part, agent = tl.program_id(1), tl.program_id(2)
    kind = tl.program_id(0) // TILES
    p = (tl.program_id(0) % TILES) * BO + tl.arange(0, BO)
    place, valid = (kind * PARAMETERS + p)[:, None], (p < PARAMETERS)[:, None]
    mask = active_of(masks, agent, dimension, weight, place, valid, MASKED)
    clip = bound_below(tl.load(clips + agent))
    count = tl.load(counts + tl.load(step) * agents + agent)
    total = tl.zeros([BO, 1], dtype=tl.float64)
    for r in range(part, count, SPLIT):
        example = agent.to(tl.int64) * capacity + r
        several = tl.zeros([BO, BQ], dtype=tl.float32)
        for q0 in range(0, Q, BQ):
            q = q0 + tl.arange(0, BQ)
            at = (p * INNER)[:, None] + ((q // INNER) * (PARAMETERS * INNER) + q % INNER)[None, :]
            inside = valid & (q < Q)[None, :]
            d = tl.load(delta + example * (PARAMETERS * Q) + at, inside, other=0.0)
            if WEIGHT:
                d *= tl.load(normal + example * (PARAMETERS * Q) + at, inside & (kind == 0), other=1.0)
            several += d
        g = tl.sum(several, 1)[:, None]
        at_tile = example * tiles + tile + tl.program_id(0)
        total = account(g, total, mask, clip, factors, first, second, example, at_tile, MODE)
    tl.store(sums + (part * agents + agent).to(tl.int64) * (KINDS * PARAMETERS) + place, total, valid)


@triton.jit
def embed(
    x, theta, out, counts, step, agents, capacity, dimension, weight,
    TOKENS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each token's line of the weight."""
    example, agent = tl.program_id(1), tl.program_id(2)
    if example < tl.load(counts + tl.load(step) * agents + agent):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside, number = at < TOKENS * WIDTH, agent.to(tl.int64) * capacity + example
        word = tl.load(x + number * TOKENS + at // WIDTH, inside, other=0.0).to(tl.int32)
        value = tl.load(theta + agent.to(tl.int64) * dimension + weight + word * WIDTH + at % WIDTH, inside, other=0.0)
        tl.store(out + number * (TOKENS * WIDTH) + at, value, inside)


@triton.jit
def embedding_sums(
    delta, x, sums, masks, clips, factors, first, second, counts, step, agents, capacity, dimension, weight, tile,
    tiles, WORDS: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr, MASKED: tl.constexpr,
    MODE: tl.constexpr, SPLIT: tl.constexpr, BO: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    """A word's gradient: the sum of δ over its places in the example, before anything is clipped."""
    ACROSS: tl.constexpr = (WIDTH + BJ - 1) // BJ
    part, agent = tl.program_id(1), tl.program_id(2)
    o = (tl.program_id(0) // ACROSS) * BO + tl.arange(0, BO)
    j = (tl.program_id(0) % ACROSS) * BJ + tl.arange(0, BJ)
    place, valid = o[:, None] * WIDTH + j[None, :], (o < WORDS)[:, None] & (j < WIDTH)[None, :]
    mask = active_of(masks, agent, dimension, weight, place, valid, MASKED)
    clip = bound_below(tl.load(clips + agent))
    count = tl.load(counts + tl.load(step) * agents + agent)
    total = tl.zeros([BO, BJ], dtype=tl.float64)
    for r in range(part, count, SPLIT):
        example = agent.to(tl.int64) * capacity + r
        g = tl.zeros([BO, BJ], dtype=tl.float32)
        for t in range(TOKENS):
            word = tl.load(x + example * TOKENS + t).to(tl.int32)
            d = tl.load(delta + (example * TOKENS + t) * WIDTH + j, j < WIDTH, other=0.0)
            g += tl.where(o[:, None] == word, d[None, :], 0.0)
        at = example * tiles + tile + tl.program_id(0)
        total = account(g, total, mask, clip, factors, first, second, example, at, MODE)
    tl.store(sums + (part * agents + agent).to(tl.int64) * (WORDS * WIDTH) + place, total, valid)
