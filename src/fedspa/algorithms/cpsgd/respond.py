"""cpSGD: communication-efficient and private distributed SGD (Agarwal, Suresh, Yu, Kumar, McMahan, NeurIPS 2018).

    a round    every agent takes part, with one step
    an agent   B records of its own at random ─► each gradient clipped ─► their mean, rounded at random onto 2^b levels
               ─► + Binomial(m, ½) ─► integers
    the server −X + s·(Y − m/2) is an unbiased estimate of the mean; averaged over agents, θ steps by it

The guarantee is of one record, as everywhere here (docs/how-it-works.md). Local DP counts an agent's own noise only;
under secure aggregation the server gets no more than the sum of the integers, and the noise of all honest agents
counts.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Sequence
from functools import lru_cache, partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedspa.algorithms.base import Agent, Answer, IntegerUpdate, Terms, made_ahead
from fedspa.algorithms.cpsgd.plan import FAR, MOST_TRIALS, BinomialPlan, reach
from fedspa.engine.local import Engine, SlotAssignment, seeded
from fedspa.errors import PayloadError, PrivacyError
from fedspa.examples import moved
from fedspa.randomness.streams import AT_ONCE, DIGITS, Stream, derive_key, draw_batch, heads, settle, upper_ends
from fedspa.wire import coding as codings
from fedspa.wire.coding import best_scale
from fedspa.wire.payload import Coding, Expected, Header, Update, opened, packed, sealed, unpacked, word_type

# cpSGD's release: a mean of clipped gradients, rounded at random onto 2^b levels, plus Binomial noise. Integers only.
#
# From an example's clipped gradient on, everything is a whole number: the sum over the batch, the rounding, which
# compares with a uniform integer, and the noise. So the rounding is unbiased to the last bit, the distances that
# docs/how-it-works.md bounds are distances of integers, and floating point has no say in what leaves. An engine that
# clips and adds up by itself hands its sum to `noised`; the others' gradients are added up by `engine.local`.

Integers = NDArray[np.int64]
_MOST_CELL_BITS = 20


def noised(total: Integers, plan: BinomialPlan, rounding: Stream, noise: Stream) -> Integers:
    """Return what may leave, of a sum in which an example stays within `CLIP_UNITS`: levels
    0 … 2^b − 1 plus Binomial(m, ½), one for each coordinate."""
    return quantized(total, plan, rounding) + binomial(plan.dimension, plan.trials, noise)


def quantized(total: Integers, plan: BinomialPlan, rounding: Stream) -> Integers:
    """Return the levels of a batch's sum: rounded up or down at random, so that the mean is the value itself."""
    half, top = reach(plan), plan.levels - 1
    # An engine's sum that passes the levels is brought back to the last: that moves no two apart.
    inside = np.clip(total, -half, half)
    levels: Integers = ((inside + half) * top + rounding.integers_below(len(inside), 2 * half)) // (2 * half)
    return levels


def dequantized(numbers: Integers | NDArray[np.float64], plan: BinomialPlan) -> NDArray[np.float64]:
    """Return the server's unbiased estimate of the mean gradient: −X + s·(Y − m/2); Y may be a mean of some."""
    values: NDArray[np.float64] = (numbers.astype(np.float64) - plan.trials / 2) * plan.step - plan.clip_value
    return values


def binomial(n: int, trials: int, stream: Stream) -> NDArray[np.int64]:
    """Return n draws of Binomial(trials, ½), at a cost that does not grow with the trials.

    The table holds values out to `FAR` standard deviations: out to there a number has its chance but for a factor
    1 ± 2⁻⁷⁰, at any number of trials. What lies further the accounting counts as seen. A word's first bits alone mostly
    decide its place among the values; `_starts` knows it then, and the others are searched for.
    """
    if not 1 <= trials <= MOST_TRIALS:
        raise PrivacyError(f"trials is {trials}; it must lie between 1 and {MOST_TRIALS}")
    first, ends, tops = _table(trials)
    starts, shift = _starts(trials)
    values = np.empty(n, dtype=np.int64)
    for start in range(0, n, AT_ONCE):
        drawn = stream.uint64(min(AT_ONCE, n - start))
        cells = (drawn >> shift).view(np.int64)
        found = starts[cells]
        among = np.flatnonzero(starts[cells + 1] != found)  # an end lies in the word's cell: only here can they meet
        found[among] = np.searchsorted(tops, drawn[among], side="right")
        tied = among[tops[np.maximum(found[among], 1) - 1] == drawn[among]]
        for i in tied:
            found[i] = settle(ends, drawn[i], stream)
        values[start : start + len(drawn)] = first + found
    return values


@lru_cache(maxsize=8)
def _starts(trials: int) -> tuple[NDArray[np.int64], np.uint64]:
    """Return the words in cells of equal length: how many ends lie below each cell, and the shift that gives a word's
    cell."""
    tops = _table(trials)[2]
    bits = min(len(tops).bit_length() + 5, _MOST_CELL_BITS)
    shift = np.uint64(64 - bits)
    below = np.searchsorted(tops, np.arange(1 << bits, dtype=np.uint64) << shift)
    return np.append(below, len(tops)), shift


@lru_cache(maxsize=8)
def _table(trials: int) -> tuple[int, list[int], NDArray[np.uint64]]:
    """Return the least value; the upper ends of all but the last value's share of [0, 1) in units of 2⁻³⁸⁴; their
    heads."""
    middle = trials // 2
    far = math.isqrt(FAR**2 * trials // 4) + 2
    first, last = max(0, middle - far), min(trials, middle + far)
    upward, weight = [], 1 << DIGITS
    for value in range(middle, last):
        weight = weight * (trials - value) // (value + 1)
        upward.append(weight)
    downward, weight = [], 1 << DIGITS
    for value in range(middle, first, -1):
        weight = weight * value // (trials - value + 1)
        downward.append(weight)
    ends = upper_ends([*reversed(downward), 1 << DIGITS, *upward])
    return first, ends, heads(ends)


# cpSGD's update on the wire: whole numbers, without loss. Payload v1 with coding 3 (docs/wire.md).
#
# A number Y lies in 0 … m + 2^b − 1, both public, and spreads like √m/2 around the middle. Its distance from the middle
# is cut into low bits, as many as stay uniform, which travel plainly, and a high part, entropy-coded like coding `int`:
# about ½·log2(m) + 1 bits in all instead of log2(m + 2^b). The body is the low bits (coordinate by coordinate, lowest
# first, filled up with zeros to whole bytes), then the coded high parts.

# Standard deviations up to this many high-part units: the table of coding `int` fits them closely.
_SPREAD_BITS = 6


def encode_integers(update: IntegerUpdate, trials: int, levels: int) -> bytes:
    """Return an update as bytes; `trials` and `levels` are the plan's, and what does not fit them is refused."""
    _check_range(update.values, trials + levels - 1)
    shift, middle = low_bits(trials), (trials + levels - 1) // 2
    away = update.values - middle
    high = away >> shift
    scale = best_scale(high)
    header = Header("whole", scale, update.round, update.dimension, len(away), update.seed, 0.0)
    low = (away & ((1 << shift) - 1)).astype(word_type(shift))
    return sealed(header, packed(low, shift) + codings.pack(high, scale))


def decode_integers(data: bytes, expect: Expected, trials: int, levels: int) -> IntegerUpdate:
    """Return the update in `data`, or raise a PayloadError that names what is wrong. Any bytes may be handed in."""
    shift, middle = low_bits(trials), (trials + levels - 1) // 2
    plain = -(-expect.active * shift // 8)

    def limits(_: str, count: int) -> tuple[int, int]:
        fewest, most = codings.body_limits("int", count)
        return fewest + plain, most + plain

    header, body = opened(data, expect, limits)
    if header.parameter != 0:
        raise PayloadError("step", "whole numbers have no parameter and write 0")
    low = unpacked(body[:plain], header.active, shift)
    if packed(low, shift) != body[:plain]:
        raise PayloadError("body", "the padding of the low bits is not zero")
    numbers = (codings.unpack(body[plain:], header.scale, header.active) << shift) + low.astype(np.int64) + middle
    _check_range(numbers, trials + levels - 1)
    return IntegerUpdate(header.round, header.dimension, header.seed, numbers)


def low_bits(trials: int) -> int:
    """Return how many low bits of a number are as good as uniform beside a noise of √trials/2."""
    return max(0, (math.isqrt(trials) // 2).bit_length() - _SPREAD_BITS)


def _check_range(numbers: NDArray[np.int64], most: int) -> None:
    if int(numbers.min()) < 0 or int(numbers.max()) > most:
        raise PayloadError("bound", f"a number is outside 0 … {most}, where the plan's levels and noise lie")


def respond(theta: Tensor, terms: Terms, agents: Sequence[Agent], engine: Engine) -> Iterator[IntegerUpdate]:
    """Yield the answers of all agents of a round, in as many threads as the engine has."""
    return made_ahead(partial(_answer, theta, terms, engine), agents, engine.threads)


def _answer(theta: Tensor, terms: Terms, engine: Engine, agent: Agent) -> IntegerUpdate:
    plan, seed = terms.plan_of(BinomialPlan), terms.mask_seed or agent.mask_seed
    if agent.records < plan.records:
        raise PrivacyError(f"an agent holds {agent.records} records; the plan's ε holds from {plan.records} on")
    sampling, rounding, noise, forward = (
        Stream(derive_key(agent.key, label)) for label in ("sampling", "rounding", "noise", "forward")
    )
    slots = SlotAssignment(agent.records, agent.max_records, "fixed", agent.key)
    chosen = draw_batch("fixed", plan.batch, 0.0, slots.count, sampling)
    records, _ = slots.records(chosen)  # with fixed-size batches no slot is empty
    x, y = (moved(tree, theta.device) for tree in agent.take(torch.from_numpy(records)))
    x = seeded(x, engine, chosen, slots.count, forward)
    units, zeroed = engine.clipped_sum(theta, x, y, plan.clip, plan.clip_value, one_by_one=agent.exact)
    agent.log_zeroed(terms, zeroed, "sampled examples")
    return IntegerUpdate(terms.round, terms.dimension, seed, noised(units.numpy(), plan, rounding, noise))


def encode(answer: Answer, terms: Terms, coding: Coding) -> bytes:
    """Whole numbers, entropy-coded without loss: coding `int` in the config's words."""
    assert isinstance(answer, IntegerUpdate)
    plan = terms.plan_of(BinomialPlan)
    return encode_integers(answer, plan.trials, plan.levels)


def decode(payload: bytes, terms: Terms, coding: Coding, seed: bytes | None, seen: Container[bytes]) -> Update:
    """Δ = −η·(the estimate of the mean gradient), or a PayloadError."""
    plan = terms.plan_of(BinomialPlan)
    expected = Expected(
        round=terms.round,
        dimension=terms.dimension,
        active=plan.dimension,
        bound=terms.update_bound,
        codings=frozenset({"whole"}),
        seed=terms.mask_seed or seed,
        seen=seen,
    )
    update = decode_integers(payload, expected, plan.trials, plan.levels)
    values = -terms.local_lr * dequantized(update.values, plan)
    return Update(update.round, update.dimension, update.seed, values.astype(np.float32))


def mean(total: Integers, members: int, terms: Terms) -> Update:
    """Return the mean of Δ over a cohort, of the sum of its members' numbers."""
    plan, seed = terms.plan_of(BinomialPlan), terms.mask_seed
    assert seed is not None  # the mask is shared
    values = -terms.local_lr * dequantized(total / members, plan)
    return Update(terms.round, terms.dimension, seed, values.astype(np.float32))
