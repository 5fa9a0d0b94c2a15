# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator,type-arg"
"""Triton kernels of `embedding.py`. Conventions in `kernels.py` and `sum_kernels.py`."""

import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]

from fedspa.engine.stacked.sum_kernels import account, active_of, bound_below


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
