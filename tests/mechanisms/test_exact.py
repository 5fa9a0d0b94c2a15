"""The exact path: no row beyond its bound by even one unit, noise with exactly the law it claims.

Statistical tests have fixed keys; each has a false-alarm rate of 1e-6 (4.9 standard deviations, two sides).
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from fractions import Fraction

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from scipy import stats
from scripted import Scripted

from fedspa.errors import PrivacyError
from fedspa.mechanisms.gaussian import exact
from fedspa.mechanisms.gaussian.exact import make_grid, rounded_gaussian
from fedspa.mechanisms.gaussian.release import integer_sum, to_grid
from fedspa.mechanisms.gaussian.release import release_on_grid as release
from fedspa.randomness.streams import Stream, derive_key, root_key

ROOT = root_key("seeded", 2012)
FALSE_ALARM = 1e-6
SIGMAS = 4.9

clips = st.sampled_from(["l2", "coordinate"])
multipliers = st.floats(2.0**-20, 2.0**20)
rows = hnp.arrays(
    np.float64,
    st.tuples(st.integers(1, 4), st.integers(1, 40)),
    elements=st.one_of(st.floats(-2, 2), st.floats(allow_nan=True, allow_infinity=True), st.just(1.0)),
)


def square_norms(integers: torch.Tensor) -> list[int]:
    return [sum(q * q for q in row) for row in integers.tolist()]


# ---- the bound


@given(clips, st.floats(1e-6, 1e6), st.integers(1, 10**6), multipliers)
def test_limits_never_allow_more_than_the_noise_multiplier(clip: str, value: float, active: int, z: float) -> None:
    grid = make_grid(clip, value, active, z)  # type: ignore[arg-type]
    norm_square = (2**grid.noise_bits / Fraction(z)) ** 2  # 2^m/z, squared, exactly
    largest = active * grid.limit**2 if clip == "coordinate" else grid.limit_square
    assert largest <= norm_square
    assert largest >= norm_square * (1 - Fraction(1, 10**5))  # and wastes nothing
    assert 2**29 <= math.isqrt(grid.limit_square) <= 2**30
    norm = value * math.sqrt(active) if clip == "coordinate" else value
    assert grid.unit * 2.0**grid.noise_bits == pytest.approx(z * norm, rel=2e-6)


@settings(max_examples=100)
@given(rows, clips, st.floats(1e-3, 1e3), st.floats(0.01, 100))
def test_no_row_passes_its_bound_whatever_comes_in(
    values: NDArray[np.float64], clip: str, value: float, z: float
) -> None:
    grid = make_grid(clip, value, values.shape[1], z)  # type: ignore[arg-type]
    integers = to_grid(torch.from_numpy(values) * value, grid)
    assert integers.dtype == torch.int64
    assert int(integers.abs().max()) <= grid.limit
    bound = (2**grid.noise_bits / Fraction(z)) ** 2
    assert all(square <= bound for square in square_norms(integers))


@pytest.mark.parametrize("active", [15, 16, 17, 64])
def test_squares_that_wrap_around_int64_are_caught(active: int) -> None:
    """16 coordinates of 2^30 have a square sum of 2^64, which int64 takes for 0."""
    grid = make_grid("l2", 1.0, active, 1.0)
    assert grid.limit == 2**30
    integers = to_grid(torch.full((1, active), 1e30), grid)
    assert grid.limit_square * (1 - 1e-6) <= square_norms(integers)[0] <= grid.limit_square


def test_one_unit_too_many_is_too_many() -> None:
    """(2^30, 1) against a limit of 2^60 on the square: over by 1, which no float64 could tell."""
    grid = make_grid("l2", 1.0, 2, 1.0)
    inside, over = to_grid(torch.tensor([[2.0**30 + 0.5, 0.5], [2.0**30 + 0.5, 1.5]]).double() * grid.unit, grid)
    assert inside.tolist() == [2**30, 0]
    assert over.tolist() == [2**30 - 1, 0]


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
    ],
)
@pytest.mark.parametrize("clip", ["l2", "coordinate"])
@pytest.mark.parametrize("z", [0.3, 1.0, 1.83, 100.0])
def test_the_worst_pair_attains_the_bound_and_no_more(clip: str, dtype: torch.dtype, z: float) -> None:
    """±(c, …, c): the farthest that replacing one record can move the sum, in units of the noise, is 2/z."""
    active = 5000
    value = 0.37 if clip == "coordinate" else 0.37 * math.sqrt(active)
    grid = make_grid(clip, value, active, z)  # type: ignore[arg-type]
    pair = to_grid(torch.tensor([[0.37], [-0.37]], dtype=dtype).expand(2, active), grid)
    square = sum(q * q for q in (pair[0] - pair[1]).tolist())
    assert square <= 4 * (2**grid.noise_bits / Fraction(z)) ** 2
    assert math.sqrt(square) / 2.0**grid.noise_bits == pytest.approx(2 / z, rel=3e-6)


@given(st.integers(0, 2**32), st.floats(1e-9, 1e-2))
@settings(max_examples=50)
def test_overlong_rows_are_shortened_to_just_inside(seed: int, excess: float) -> None:
    row = torch.from_numpy(Stream(derive_key(ROOT, seed)).gaussian(300)[None])
    row *= (1 + 1e-5 + excess) / row.norm()
    grid = make_grid("l2", 1.0, 300, 1.3)
    integers = to_grid(row, grid)
    assert grid.limit_square * (1 - 1e-6) <= square_norms(integers)[0] <= grid.limit_square
    direction = integers.double() / integers.double().norm()
    assert torch.allclose(direction, row / row.norm(), atol=1e-8)


# ---- what rounding costs


@given(st.integers(0, 2**32), clips, st.floats(0.05, 100))
@settings(max_examples=50)
def test_truncation_is_off_by_less_than_a_step_and_toward_zero(seed: int, clip: str, z: float) -> None:
    values = torch.from_numpy(Stream(derive_key(ROOT, seed)).gaussian(4 * 200).reshape(4, 200))
    values *= 0.999 / values.norm(dim=1, keepdim=True)
    grid = make_grid(clip, 1.0, 200, z)  # type: ignore[arg-type]
    steps = values / grid.unit
    integers = to_grid(values, grid).double()
    assert bool(((steps - integers).abs() < 1).all())
    assert bool((integers.abs() <= steps.abs()).all())


def test_sums_do_not_depend_on_chunks_or_order() -> None:
    values = torch.from_numpy(Stream(ROOT).gaussian(37 * 9000).reshape(37, 9000)).float()
    values /= values.norm(dim=1, keepdim=True)
    grid = make_grid("l2", 1.0, 9000, 1.0)
    total = integer_sum(values, grid)
    assert torch.equal(total, to_grid(values, grid).sum(0))
    assert torch.equal(total, integer_sum(values.flip(0), grid))
    assert torch.equal(total, sum(integer_sum(part, grid) for part in values.split(5)))
    assert torch.equal(integer_sum(values[:0], grid), torch.zeros(9000, dtype=torch.int64))  # Poisson may draw nobody


# ---- the noise


def test_the_law_is_the_rounded_gaussian_to_two_to_the_minus_118() -> None:
    """At 32 steps to a σ a cell is as wide as a step: P(|R| = r) from the very table that is used, against Φ."""
    ends = [0, *exact._cell_table(), 2**128]
    with mpmath.workdps(60):
        shares = [mpmath.mpf(high - low) / 2**128 for low, high in itertools.pairwise(ends)]

        def kept(cell: int, a: str, b: str) -> mpmath.mpf:
            """∫ exp(−(2·cell·f + f²)/2048) df: the part of a cell's proposals that lie in [a, b] and are accepted."""
            edge = mpmath.sqrt(2048)
            low, high = ((cell + mpmath.mpf(end)) / edge for end in (a, b))
            scale = mpmath.exp(mpmath.mpf(cell * cell) / 2048) * edge * mpmath.sqrt(mpmath.pi) / 2
            return scale * (mpmath.erfc(low) - mpmath.erfc(high))

        lower = [share * kept(j, "0", "0.5") for j, share in enumerate(shares)]
        upper = [share * kept(j, "0.5", "1") for j, share in enumerate(shares)]
        accepted = sum(lower) + sum(upper)
        law = [lower[0] / accepted, *((a + b) / accepted for a, b in zip(upper, lower[1:])), upper[-1] / accepted]

        def tail(x: mpmath.mpf) -> mpmath.mpf:
            return mpmath.erfc(x / 32 / mpmath.sqrt(2))  # P(|N| > x/32)

        half = mpmath.mpf("0.5")
        gaussian = [1 - tail(half), *(tail(r - half) - tail(r + half) for r in range(1, len(law)))]
        distance = (sum(abs(p - q) for p, q in zip(law, gaussian)) + tail(len(law) - half)) / 2
        assert distance < mpmath.mpf(2) ** -118


@pytest.mark.parametrize("bits", [5, 8])
def test_draws_follow_the_law(bits: int) -> None:
    n = 1_000_000
    draws = rounded_gaussian(n, bits, Stream(derive_key(ROOT, "law", bits)))
    reach = 4 * 2**bits
    edges = np.arange(-reach, reach + 2) - 0.5
    counts = np.histogram(draws, edges)[0]
    expected = n * np.diff(stats.norm.cdf(edges / 2.0**bits))
    outside = np.array([n - counts.sum()]), np.array([n - expected.sum()])
    assert stats.chisquare(np.append(counts, outside[0]), np.append(expected, outside[1])).pvalue > FALSE_ALARM
    variance = 4.0**bits + 1 / 12  # rounding adds a twelfth
    assert np.var(draws) == pytest.approx(variance, rel=SIGMAS * math.sqrt(2 / n))


@pytest.mark.parametrize("bits", [20, 50])
def test_fine_draws_are_gaussian_down_to_their_last_bit(bits: int) -> None:
    n = 400_000
    draws = rounded_gaussian(n, bits, Stream(derive_key(ROOT, "fine", bits)))
    values = draws / 2.0**bits
    assert stats.kstest(values, "norm").pvalue > FALSE_ALARM
    for power, mean, variance in [(1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)]:
        assert abs(np.mean(values**power) - mean) < SIGMAS * math.sqrt(variance / n)
    assert stats.chisquare(np.bincount(draws & 15, minlength=16)).pvalue > FALSE_ALARM
    for limit in (3, 4):
        count, expected = int(np.sum(np.abs(values) > limit)), 2 * n * stats.norm.sf(limit)
        assert stats.poisson.sf(count - 1, expected) > FALSE_ALARM
        assert stats.poisson.cdf(count, expected) > FALSE_ALARM
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < SIGMAS / math.sqrt(n)


def test_a_coarse_draw_is_the_fine_draw_rounded() -> None:
    fine, coarse = (rounded_gaussian(20_000, bits, Stream(ROOT)) for bits in (50, 12))
    assert np.array_equal(np.rint(fine / 2.0**38).astype(np.int64), coarse)


def test_the_long_decision_agrees_with_the_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = rounded_gaussian(3000, 30, Stream(ROOT))
    monkeypatch.setattr(exact, "_DOUBT", 2.0)  # now every acceptance is decided in decimals
    assert np.array_equal(rounded_gaussian(3000, 30, Stream(ROOT)), quick)


@pytest.mark.parametrize("cell", [0, 1, 40, 447])
def test_close_acceptances_are_decided_by_later_bits(cell: int) -> None:
    """The coin agrees with the probability at f = ½ in its first 63 bits: only what follows can decide."""
    place = 1 << 63
    with mpmath.workdps(100):
        probability = mpmath.exp(-(mpmath.mpf(cell) + mpmath.mpf("0.25")) / 2048)
        coin = int(mpmath.floor(probability * 2**63))
        rest = probability * 2**63 - coin
        following = int(mpmath.floor(rest * 2**64))
    for offset, expected in [(-(2**40), True), (2**40, False)]:
        stream = Scripted([0, following + offset])
        assert exact._accept(cell, place, coin, stream) is expected
        assert not stream.words  # the later bits were asked for
    assert exact._accept(cell, place, coin - 2, Scripted([])) is True
    assert exact._accept(cell, place, coin + 2, Scripted([])) is False


def test_the_place_can_decide_too() -> None:
    """The coin's cell ends where the probability lies within the place's cell: it takes later bits of both."""
    cell, end = 447, 7 * 2**60  # a probability of 7/8, which this cell has at f = 0.31
    with mpmath.workdps(100):
        loss = -mpmath.log(mpmath.mpf(end) / 2**63)
        place = int(mpmath.floor((mpmath.sqrt(cell**2 + 2048 * loss) - cell) * 2**64))
    top = 2**64 - 1
    assert exact._accept(cell, place, end - 1, Scripted([top, top])) is False
    assert exact._accept(cell, place, end - 1, Scripted([0, 0])) is True


@pytest.mark.parametrize("verdict", [True, False])
@pytest.mark.parametrize("offset", [-(2**20), 2**20])
def test_doubtful_acceptances_are_not_left_to_floating_point(
    monkeypatch: pytest.MonkeyPatch, offset: int, verdict: bool
) -> None:
    coin = int(mpmath.floor(mpmath.exp(-mpmath.mpf("0.25") / 2048) * 2**64)) + offset
    monkeypatch.setattr(exact, "_accept", lambda *_: verdict)
    assert exact._accepted_draws(1, 30, Scripted([0, 1 << 63, coin])).size == verdict


@pytest.mark.parametrize("cell", [0, 5, 100])
def test_ties_between_cells_are_decided_by_later_bits(cell: int) -> None:
    end = exact._cell_table()[cell]
    head, rest = divmod(end, 2**64)
    for low, expected in [(rest - 1, cell), (rest, cell + 1)]:
        # one proposal: the cell's word, a place of 0, a coin of 0 (accepted, positive), and then the deciding word
        draw = exact._accepted_draws(1, 30, Scripted([head, 0, 0, low]))
        assert draw.tolist() == [expected << 25]


def test_the_far_tail_is_reached() -> None:
    """All ones in both words of the choice: the last cell, 14σ out. All ones in the first: beyond 9σ already."""
    top = 2**64 - 1
    assert exact._accepted_draws(1, 30, Scripted([top, 0, 1, top])).tolist() == [-(447 << 25)]
    nine = exact._accepted_draws(1, 30, Scripted([top, 0, 0, 0]))[0]
    assert 9 < nine / 2**30 < 9.5
    assert nine >> 25 == bisect_right(exact._cell_table(), top << 64)


# ---- the release


def test_releases_are_whole_steps_around_the_sum() -> None:
    n = 200_000
    grid = make_grid("l2", 3.0, n, 1.83)
    total = torch.full((n,), 12345678901)
    noisy = release(total, grid, Stream(derive_key(ROOT, "release")))
    assert noisy.dtype == torch.float64
    steps = noisy / grid.unit
    assert torch.allclose(steps, steps.round(), rtol=0, atol=1e-4)
    noise = (steps.round() - 12345678901) * grid.unit
    assert float(noise.var()) == pytest.approx((3.0 * 1.83) ** 2, rel=SIGMAS * math.sqrt(2 / n))


def test_what_a_release_can_be_does_not_depend_on_the_data() -> None:
    """The attack of test_noise finds nothing: both neighbours release whole steps, down to the same last bit."""
    n = 100_000
    grid = make_grid("coordinate", 1.0, 1, 1.0)
    for position, example in enumerate([0.0, 1.0]):
        total = integer_sum(torch.full((1, 1), example), grid).expand(n)
        steps = release(total, grid, Stream(derive_key(ROOT, "support", position))) / grid.unit
        assert torch.equal(steps * grid.unit, steps.round() * grid.unit)
        odd = int((steps.round().long() & 1).sum())
        assert abs(odd - n / 2) < SIGMAS * math.sqrt(n) / 2


@pytest.mark.parametrize(
    "z",
    [
        0.0,
        math.nan,
        2.0**-21,
    ],
)
def test_impossible_noise_is_refused(z: float) -> None:
    with pytest.raises(PrivacyError, match="noise multiplier"):
        make_grid("l2", 1.0, 10, z)


@pytest.mark.parametrize(
    "value",
    [
        0.0,
        math.nan,
    ],
)
def test_impossible_clips_are_refused(value: float) -> None:
    with pytest.raises(PrivacyError, match="clip value"):
        make_grid("coordinate", value, 10, 1.0)
