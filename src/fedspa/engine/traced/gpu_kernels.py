# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator,type-arg"
"""Triton kernels over per-example gradients that a program made: their norms under the mask, and their clipped sums.

Example e of agent w is line w · EXAMPLES + e. Sums over examples are in float64, in the examples' order; what is added
by several programs at once is whole numbers, whose sum has no order. `gpu_twins.py` has the same in torch.
"""

import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]


@triton.jit
def measure(
    made, masks, clips, squares, alive, above, size, examples, tiles, first,
    MASKED: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of one tile of an example's active gradients: Σ g², and how many are not zero and how many above the clip."""
    line = tl.program_id(1).to(tl.int64)
    agent = line // examples
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    if MASKED:
        inside = inside & (tl.load(masks + agent * size + at, inside, other=0) != 0)
    g = tl.load(made + line * size + at, inside, other=0.0)
    wide = g.to(tl.float64)
    to = line * tiles + first + tl.program_id(0)
    tl.store(squares + to, tl.sum(wide * wide, 0))
    if COUNT:
        length = tl.abs(wide)
        tl.store(alive + to, tl.sum(tl.where(length > 0, 1, 0), 0).to(tl.float64))
        tl.store(above + to, tl.sum(tl.where(length > tl.load(clips + agent), 1, 0), 0).to(tl.float64))


@triton.jit
def add(
    made, factors, bounds, coordinates, sums, size, examples, dimension,
    CLAMP: tl.constexpr, MORE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums of an agent's clipped gradients; an example with factor 0 adds nothing, whatever it holds."""
    agent = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    total = tl.zeros([BLOCK], dtype=tl.float64)
    bound = tl.load(bounds + agent)
    for first in range(0, examples, ROWS):
        example = first + tl.arange(0, ROWS)
        factor = tl.load(factors + agent * examples + example, example < examples, other=0.0)
        counted = (factor != 0)[:, None] & inside[None, :]
        line = made + (agent * examples + example)[:, None] * size + at[None, :]
        g = tl.load(line, counted, other=0.0).to(tl.float64)
        g = tl.minimum(tl.maximum(g, -bound), bound) if CLAMP else g * factor[:, None]
        total += tl.sum(g, 0)
    to = sums + agent * dimension + tl.load(coordinates + at, inside, other=0)
    if MORE:
        total += tl.load(to, inside, other=0.0)
    tl.store(to, total, inside)


@triton.jit
def scatter(
    values, tokens, factors, bounds, units, sums, examples, words, features, size,
    CLAMP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows of an Embedding: a value goes to its token's row, as a whole number of units."""
    line = tl.program_id(1).to(tl.int64)
    agent = line // examples
    factor = tl.load(factors + line)
    if factor != 0:
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = at < size
        g = tl.load(values + line * size + at, inside, other=0.0).to(tl.float64)
        if CLAMP:
            bound = tl.load(bounds + agent)
            g = tl.minimum(tl.maximum(g, -bound), bound)
        else:
            g = g * factor
        token = tl.load(tokens + line * (size // features) + at // features, inside, other=0)
        whole = (g * tl.load(units + agent)).to(tl.int64)
        tl.atomic_add(sums + (agent * words + token) * features + at % features, whole, inside & (whole != 0))
