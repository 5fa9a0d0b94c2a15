"""The table of coding `int`: its arithmetic against exact mathematics, constriction against the documented coder."""

from __future__ import annotations

import math
import zlib

import constriction
import mpmath
import numpy as np
import pytest

from fedspa.wire.coding import PRECISION, SCALES, _gaussian_weights, best_scale, entropy_model, frequencies, radius


def deviation(scale: int) -> float:
    return 2.0 ** (scale / 8 - 2)


@pytest.mark.parametrize("scale", range(SCALES))
def test_frequencies_are_a_table(scale: int) -> None:
    table = frequencies(scale)
    assert sum(table) == 2**PRECISION
    assert min(table) >= 1
    assert len(table) == 2 * radius(scale) + 2
    assert table[:-1] == table[-2::-1]  # symmetric but for the escape
    assert 8 * deviation(scale) <= radius(scale) < 16 * deviation(scale) + 1e-9


@pytest.mark.parametrize("scale", range(SCALES))
def test_q_is_the_floor_it_claims_to_be(scale: int) -> None:
    """Exact mathematics, with a margin: no platform that computes q to 40 digits can floor it differently."""
    with mpmath.workdps(80):
        s = mpmath.mpf(2) ** (mpmath.mpf(scale) / 8 - 2)
        exact = mpmath.exp(-1 / (2 * s * s)) * 2**64
        assert int(mpmath.floor(exact)) == _gaussian_weights(scale)[1]
        assert 1e-15 < exact - mpmath.floor(exact) < 1 - 1e-15


@pytest.mark.parametrize("scale", [0, 13, 20, 47, 79])
def test_weights_follow_the_gaussian(scale: int) -> None:
    for j, weight in enumerate(_gaussian_weights(scale)):
        assert weight / 2**64 == pytest.approx(math.exp(-(j**2) / (2 * deviation(scale) ** 2)), rel=1e-6, abs=1e-15)


def test_tables_are_pinned() -> None:
    """All 80 tables, as 4-byte words one after another: a change of them changes the format."""
    everything = b"".join(np.array(frequencies(scale), dtype="<u4").tobytes() for scale in range(SCALES))
    assert frequencies(0) == PINNED_0
    assert zlib.crc32(everything) == PINNED_ALL


PINNED_0 = (2730, 8348, 16752330, 8348, 2730, 2730)
PINNED_ALL = 0xA4B2935E


@pytest.mark.parametrize("scale", range(0, SCALES, 7))
def test_constriction_uses_exactly_our_frequencies(scale: int) -> None:
    """An ANS coder whose state is x < 2^24 decodes the symbol whose interval holds x: probe the interval's two ends."""
    model = entropy_model(scale)
    ends = np.cumsum(frequencies(scale))
    starts = ends - np.array(frequencies(scale))
    for symbol in {0, 1, radius(scale), len(ends) - 2, len(ends) - 1, len(ends) // 3}:
        for quantile in (int(starts[symbol]), int(ends[symbol]) - 1):
            coder = constriction.stream.stack.AnsCoder(np.array([quantile, 1], dtype=np.uint32))
            assert coder.decode(model) == symbol


@pytest.mark.parametrize("true", [0.2, 1.0, 200.0])
def test_best_scale_is_best(true: float) -> None:
    integers = np.rint(np.random.default_rng(1).normal(0, true, 4000)).astype(np.int64)
    magnitudes = np.abs(integers)

    def bits(scale: int) -> float:
        table = np.array(frequencies(scale), dtype=np.float64)[radius(scale) :]
        cost = PRECISION - np.log2(table)
        cost[-1] += 32
        return float(cost[np.minimum(magnitudes, radius(scale) + 1)].sum())

    assert bits(best_scale(integers)) <= min(map(bits, range(SCALES))) + 1e-6


@pytest.mark.parametrize("integers", [[0], [0, 0, 0], [2**31 - 1], [-(2**31) + 1, 0]])
def test_best_scale_of_odd_input_exists(integers: list[int]) -> None:
    assert 0 <= best_scale(np.array(integers, dtype=np.int64)) < SCALES
