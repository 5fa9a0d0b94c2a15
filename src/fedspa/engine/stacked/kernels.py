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
