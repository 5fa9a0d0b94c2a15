"""Binomial noise: its law, its table, and that it is whole numbers from the stream alone."""

from __future__ import annotations

import math
import struct
from bisect import bisect_right
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats
from scripted import Scripted, stream

from fedspa.algorithms.cpsgd import respond as module
from fedspa.algorithms.cpsgd.plan import BinomialEvent
from fedspa.algorithms.cpsgd.respond import binomial
from fedspa.errors import PrivacyError
from fedspa.privacy import accounting


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
