"""cpSGD's plan derives everything; its compression has an inverse; its trials are the fewest that serve."""

from __future__ import annotations

import math
import struct
from bisect import bisect_right
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from sample_plans import BINOMIAL_PLAN
from scipy import stats
from scripted import Scripted, stream

from fedspa.algorithms.cpsgd import respond as module
from fedspa.algorithms.cpsgd.plan import (
    BinomialEvent,
    BinomialPlan,
    surely_infinite,
    trials_for_compression,
    with_least_trials,
)
from fedspa.algorithms.cpsgd.respond import binomial
from fedspa.errors import PrivacyError
from fedspa.privacy import accounting

PLAN = BINOMIAL_PLAN


def test_derived_by_hand() -> None:
    assert PLAN.levels == 4
    assert PLAN.clip_norm == pytest.approx(5.0)  # √100·0.5
    assert PLAN.step == pytest.approx(1 / 3)  # 2·0.5/3
    assert PLAN.sigma == pytest.approx(100 / 2 / 3)  # s·√10,000/2
    assert PLAN.noise_multiplier == pytest.approx(100 / 6 * 10 / 5)
    assert PLAN.compression == pytest.approx(math.log2(10_004) / 32)
    assert (PLAN.sampling, PLAN.neighbours, PLAN.local_steps) == ("fixed", "replace-one", 1)


SUMMED = replace(PLAN, adversary="secure-aggregation", members=12, colluders=4)


def test_secure_aggregation_counts_the_honest_members() -> None:
    assert (SUMMED.event.honest, SUMMED.event.members, SUMMED.event.colluders) == (8, 12, 4)
    assert SUMMED.worst_case_event == PLAN.event
    assert cost(PLAN) > cost(SUMMED) == cost(replace(PLAN, trials=8 * PLAN.trials))
    assert cost(replace(SUMMED, colluders=11)) == cost(PLAN)
    assert SUMMED.noise_multiplier == PLAN.noise_multiplier  # of the agent's own share
    assert ("members", "12", "added up at least, of whom up to 4 may collude") in SUMMED.report_rows()


def test_the_sum_of_everyones_numbers_lies_within_its_bounds() -> None:
    """Each is a level, 0 to 3, and Binomial(10,000, ½): over 20 agents, though 12 are enough."""
    found = SUMMED.aggregation
    assert (found.members, found.colluders, found.honest) == (12, 4, 8)
    assert (found.low, found.high, found.count) == (0, 20 * 10_003, 100)


def test_shares_are_calibrated_against_the_honest_ones() -> None:
    alone, shared = (with_least_trials(plan, 2.0) for plan in (PLAN, SUMMED))
    assert shared.trials == -(-alone.trials // 8)
    assert (shared.members, shared.colluders) == (12, 4)


@pytest.mark.parametrize(
    "changes",
    [
        {"members": 21},
        {"members": 1, "colluders": 0},
        {"colluders": 12},
        {"members": 0},
        {"adversary": "local"},
    ],
)
def test_no_cohort_that_cannot_be(changes: dict[str, Any]) -> None:
    with pytest.raises(PrivacyError):
        replace(SUMMED, **changes)


def test_too_little_noise_has_no_guarantee() -> None:
    """5 trials: that a number is 6 or more tells a record apart, with a chance of 100·0.3·2⁻⁵ a release."""
    weak = replace(PLAN, trials=5)
    assert cost(weak) == math.inf
    edge = with_least_trials(weak, 1e9).trials
    assert cost(replace(PLAN, trials=edge)) < math.inf
    assert cost(replace(PLAN, trials=edge - 1)) == math.inf


@pytest.mark.parametrize(
    ("compression", "bits", "trials"),
    [(0.4, 1, 7130), (0.1, 3, 1), (0.25, 8, 0), (0.99, 1, 0)],
)
def test_trials_of_a_compression(compression: float, bits: int, trials: int) -> None:
    """2^(32·0.4) = 7131.55 → 7132 − 2; 2^3.2 = 9.19 → 9 − 2 and 9 − 8; 2^8 − 2^8 = 0 is refused."""
    if trials:
        assert trials_for_compression(compression, bits) == trials
        return
    with pytest.raises(PrivacyError, match="compression"):
        trials_for_compression(compression, bits)


@given(st.integers(1, 2**31 - 2**16), st.integers(1, 16))
def test_compression_and_trials_are_inverses(trials: int, bits: int) -> None:
    plan = replace(PLAN, trials=trials, bits=bits)
    again = trials_for_compression(plan.compression, bits) if plan.compression < 0.96 else trials
    assert abs(again - trials) <= 1e-12 * 32 * (trials + 2**bits) + 0.5


def cost(plan: BinomialPlan) -> float:
    return accounting.epsilon({plan.event: plan.participations}, plan.delta, neighbours="replace-one")


@pytest.mark.parametrize("epsilon", [0.5, 100.0])
def test_calibrated_to_the_fewest_trials(epsilon: float) -> None:
    plan = with_least_trials(replace(PLAN, trials=1), epsilon)
    assert cost(plan) <= epsilon
    assert cost(replace(plan, trials=plan.trials - 1)) > epsilon


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("clip_value", 0.0),
        ("clip_value", math.nan),
        ("bits", 0),
        ("trials", 0),
        ("trials", 2.5),
        ("adversary", "nobody"),
        ("agents", 0),
        ("batch", 601),
        ("delta", 0.01),
    ],
)
def test_no_inconsistent_plan_exists(field: str, value: object) -> None:
    with pytest.raises(PrivacyError):
        replace(PLAN, **{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("bits", [1, 4, 8])
@pytest.mark.parametrize("delta", [1e-3, 1e-6])
def test_the_quick_test_for_no_epsilon_says_what_the_accountant_says(bits: int, delta: float) -> None:
    """Where it says that there is none, the accountant has none; where not, the accountant has one here."""
    plan = replace(PLAN, bits=bits, delta=delta)
    edge = with_least_trials(plan, 1e9).trials
    for trials in {1, edge // 2, edge - 1, edge, 2 * edge}:
        weak = replace(plan, trials=max(1, trials))
        assert surely_infinite(weak.event, weak.participations, delta) is (cost(weak) == math.inf)


# Binomial noise: its law, its table, and that it is whole numbers from the stream alone.


@pytest.mark.parametrize("trials", [1, 17, 1000])
def test_the_table_is_the_law_to_the_last_unit(trials: int) -> None:
    """Against exact fractions: an end is off by no more than a few units of 2⁻³⁸⁴, and what is left out."""
    first, ends, heads = module._table(trials)
    running = Fraction(sum(math.comb(trials, i) for i in range(first)), 2**trials)
    for i, end in enumerate(ends):
        running += Fraction(math.comb(trials, first + i), 2**trials)
        assert abs(running - Fraction(end, 2**384)) < Fraction(8, 2**384) + Fraction(2, 2**288)  # 2·e^(−20²/2)
        assert int(heads[i]) == end >> 320
    assert len(ends) == min(trials, first + len(ends)) - first


@pytest.mark.parametrize("trials", [1, 7, 7130, 2**31 - 1])
def test_draws_follow_the_law(trials: int) -> None:
    """Kolmogorov–Smirnov on 40,000 draws, mean and variance: each at a false-alarm rate of 10⁻⁶."""
    draws = binomial(40_000, trials, stream("law", trials))
    law = stats.binom(trials, 0.5)
    points = np.unique(draws)
    empirical = np.searchsorted(np.sort(draws), points, side="right") / len(draws)
    assert np.abs(empirical - law.cdf(points)).max() < stats.kstwobign.isf(1e-6) / math.sqrt(len(draws))
    deviation = math.sqrt(trials / 4 / len(draws))
    assert abs(draws.mean() - trials / 2) < stats.norm.isf(5e-7) * deviation
    if trials > 10:
        ratio = draws.var() / (trials / 4)
        assert abs(ratio - 1) < stats.norm.isf(5e-7) * math.sqrt(2 / len(draws))
    assert draws.min() >= 0
    assert draws.max() <= trials
    assert draws.dtype == np.int64


def test_in_blocks_as_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = binomial(1000, 500, stream("blocks"))
    monkeypatch.setattr(module, "AT_ONCE", 64)
    assert np.array_equal(binomial(1000, 500, stream("blocks")), whole)


def test_a_word_that_meets_an_end_is_decided_by_more_bits() -> None:
    """Where 64 bits equal an end's, the next 320 choose the side."""
    first, ends, heads = module._table(100)
    at = len(ends) // 2

    def drawn(more: int) -> int:
        words = Scripted([int(heads[at]), *struct.unpack(">5Q", more.to_bytes(40, "big"))])
        return int(binomial(1, 100, words)[0])

    low = ends[at] & (2**320 - 1)
    assert drawn(max(low - 1, 0)) == first + at + (low == 0)
    assert drawn(low) == first + at + 1


@pytest.mark.parametrize("trials", [1, 7130, 2**31 - 1])
def test_the_cells_find_what_a_search_finds(trials: int) -> None:
    """At every end, a word below and above it, the ends of cells, 0 and the last word."""
    first, ends, heads = module._table(trials)
    _, shift = module._starts(trials)
    at = [*map(int, heads[:: max(1, len(heads) // 500)]), *(cell << int(shift) for cell in range(500))]
    chosen = {word + change for word in at for change in (-1, 0, 1)} | {0, 2**64 - 1}
    words = np.array(sorted(word for word in chosen if 0 <= word < 2**64), dtype=np.uint64)
    more = 2**63

    class Given:
        def uint64(self, n: int) -> NDArray[np.uint64]:
            return words if n == len(words) else np.full(n, more, dtype=np.uint64)

    plain = [bisect_right(ends, int.from_bytes(struct.pack(">6Q", int(word), *[more] * 5), "big")) for word in words]
    assert binomial(len(words), trials, Given()).tolist() == [first + found for found in plain]  # type: ignore[arg-type]


@pytest.mark.parametrize("delta", [1e-6, 1e-10, 1e-12])
@pytest.mark.parametrize(("bits", "batch", "trials"), [(10, 2, 16384), (8, 1, 4096), (11, 1, 4096)])
def test_epsilon_holds_for_the_law_as_it_is_drawn(bits: int, batch: int, trials: int, delta: float) -> None:
    """Where a record moves a number by eight standard deviations and more, what a table leaves out of one law is likely
    under the other."""
    first, ends, _ = module._table(trials)
    law = {first + i: Fraction(high - low, 2**384) for i, (low, high) in enumerate(pairwise([0, *ends, 2**384]))}
    event = BinomialEvent(batch, batch, 1, 1, bits, trials)
    cost = accounting.epsilon({event: 1}, delta, neighbours="replace-one")
    if math.isfinite(cost):
        gamma, shift = Fraction(math.exp(cost)), -(-(2**bits - 1) // batch)
        found = sum(max(Fraction(0), chance - gamma * law.get(y + shift, 0)) for y, chance in law.items())
        assert found <= delta
    else:
        assert (bits, trials) == (11, 4096)  # 64 deviations: nothing is left


@pytest.mark.parametrize("trials", [0, -1, 2**31])
def test_trials_have_bounds(trials: int) -> None:
    with pytest.raises(PrivacyError, match="trials"):
        binomial(1, trials, stream())
