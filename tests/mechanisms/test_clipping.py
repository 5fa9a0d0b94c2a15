"""Clipping: the bound holds for any rows, is attained, and makes the plan's sensitivity true and tight."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import get_args

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedspa.mechanisms import clipping as sums
from fedspa.mechanisms.base import Clipping
from fedspa.mechanisms.clipping import (
    CLIP_MARGIN,
    PLAIN,
    SPAN,
    GradientBlock,
    LayerGradient,
    RowSum,
    clip_rows,
    count_not_finite,
    two_sum,
)
from fedspa.mechanisms.gaussian.plan import GaussianPlan
from fedspa.mechanisms.gaussian.release import noisy_mean
from fedspa.privacy.event import Neighbours
from fedspa.randomness.streams import Stream

CLIPPINGS = get_args(Clipping)
K = 6

any_rows = hnp.arrays(np.float32, st.tuples(st.integers(1, 8), st.just(K)), elements=st.floats(width=32))
bounds = st.floats(1e-3, 1e3)


def plan(clip: Clipping, value: float, neighbours: Neighbours) -> GaussianPlan:
    return GaussianPlan(10, K, clip, value, "poisson", 4, 100, 1, 1, 1.0, neighbours, 1e-3)


@pytest.mark.parametrize("clip", CLIPPINGS)
@given(rows=any_rows, value=bounds)
def test_no_row_passes_the_bound_whatever_it_holds(clip: Clipping, rows: np.ndarray, value: float) -> None:
    clipped = clip_rows(torch.from_numpy(rows), clip, value).to(torch.float64)
    assert torch.isfinite(clipped).all()
    if clip == "coordinate":
        assert clipped.abs().max() <= np.float32(value)
    else:
        assert clipped.norm(dim=1).max() <= value * (1 + 1e-6)


@pytest.mark.parametrize("clip", CLIPPINGS)
@pytest.mark.parametrize("value", [0.1, 1e-7])
def test_the_bound_holds_for_rows_at_the_end_of_float32(clip: Clipping, value: float) -> None:
    """There value/norm is a subnormal number, with so few digits that the clipped norm came to twice the bound."""
    rows = torch.logspace(30, 38.5, 200).unsqueeze(1) * torch.ones(1, K)
    clipped = clip_rows(rows, clip, value).to(torch.float64)
    limit = value if clip == "l2" else math.sqrt(K) * value
    assert clipped.norm(dim=1).max() <= limit * (1 + 1e-6)


@pytest.mark.parametrize("clip", CLIPPINGS)
@given(rows=any_rows, value=bounds)
def test_rows_within_the_bound_are_left_alone(clip: Clipping, rows: np.ndarray, value: float) -> None:
    clipped = clip_rows(torch.from_numpy(rows), clip, value)
    again = clip_rows(clipped, clip, value * 1.001)
    assert torch.equal(again, clipped)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("clip", CLIPPINGS)
def test_a_row_with_a_bad_number_counts_as_zero_and_spoils_no_other(clip: Clipping, bad: float) -> None:
    rows = torch.ones(2, K)
    rows[0, 3] = bad
    clipped = clip_rows(rows, clip, 0.5)
    assert (clipped[0] == 0).all()
    assert (clipped[1] > 0).all()


@given(seed=st.integers(0, 2**20), exponent=st.floats(-6, 6), value=bounds, size=st.sampled_from([1, 7, 1000]))
def test_float32_rows_do_not_exceed_the_bound_by_their_rounding(
    seed: int, exponent: float, value: float, size: int
) -> None:
    """Not by the last bit: the accountant has no margin for it."""
    rows = 10.0**exponent * torch.randn(3, size, generator=torch.Generator().manual_seed(seed))
    assert float(clip_rows(rows, "l2", value).double().norm(dim=1).max()) <= value
    assert float(clip_rows(rows, "coordinate", value).double().abs().max()) <= value


@pytest.mark.parametrize("neighbours", get_args(Neighbours))
@pytest.mark.parametrize("clip", CLIPPINGS)
@given(common=any_rows, one=any_rows, other=any_rows, value=bounds)
def test_neighbouring_sums_differ_by_at_most_the_plans_sensitivity(
    clip: Clipping, neighbours: Neighbours, common: np.ndarray, one: np.ndarray, other: np.ndarray, value: float
) -> None:
    def total(*blocks: np.ndarray) -> torch.Tensor:
        return sum(clip_rows(torch.from_numpy(b).double(), clip, value).sum(dim=0) for b in blocks)  # type: ignore

    left = total(common, one[:1])
    right = total(common) if neighbours == "add-remove" else total(common, other[:1])
    allowed = plan(clip, value, neighbours).sensitivity
    assert (left - right).norm() <= allowed * (1 + 1e-9)


@pytest.mark.parametrize("neighbours", get_args(Neighbours))
@pytest.mark.parametrize("clip", CLIPPINGS)
def test_a_worst_pair_attains_the_sensitivity(clip: Clipping, neighbours: Neighbours) -> None:
    """The paper's sensitivity for replace-one, √2·√p·G, is smaller than what this pair shows."""
    value = 0.7
    up = clip_rows(torch.full((1, K), 1e6, dtype=torch.float64), clip, value)[0]
    down = clip_rows(torch.full((1, K), -1e6, dtype=torch.float64), clip, value)[0]
    distance = float((up - down).norm() if neighbours == "replace-one" else up.norm())
    chosen = plan(clip, value, neighbours)
    assert chosen.sensitivity * (1 - 1.01 * CLIP_MARGIN) <= distance <= chosen.sensitivity * (1 + 1e-12)
    if neighbours == "replace-one":
        assert distance > math.sqrt(2) * chosen.clip_norm * 1.4


# Rows in parts clip, count and add up as whole rows do, for any values and any cut into layers.


CLIPS: list[Clipping] = ["l2", "coordinate"]


def cut(rows: Tensor, widths: list[int], scattered: set[int], generator: torch.Generator) -> list[LayerGradient]:
    """The rows layer by layer; a scattered layer names its columns, in any order, and some that stand nowhere."""
    parts, first = [], 0
    for number, width in enumerate(widths):
        values = rows[:, first : first + width].clone()
        if number not in scattered:
            parts.append(LayerGradient(values, first))
        else:
            order = torch.stack([torch.randperm(width, generator=generator) for _ in rows])
            nowhere = torch.full((len(rows), 2), rows.shape[1])
            columns = torch.cat([first + order, nowhere], 1)
            parts.append(LayerGradient(torch.cat([values.gather(1, order), torch.zeros(len(rows), 2)], 1), columns))
        first += width
    return parts


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tensor, list[LayerGradient], Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    widths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    count = draw(st.integers(1, 6))
    size = 10.0 ** draw(st.sampled_from([-44, -20, -3, 0, 18, 37]))
    rows = size * torch.randn(count, sum(widths), generator=generator)
    rows[torch.rand(rows.shape, generator=generator) < 0.3] = 0.0
    for value in draw(st.lists(st.sampled_from([math.nan, math.inf, -math.inf, 3e38, 1e-45]), max_size=3)):
        rows[draw(st.integers(0, count - 1)), draw(st.integers(0, sum(widths) - 1))] = value
    readable = torch.rand(count, generator=generator) < 0.8
    present = (torch.rand(count, generator=generator) < 0.7) if draw(st.booleans()) else None
    scattered = set(draw(st.lists(st.integers(0, len(widths) - 1), max_size=2)))
    return rows, cut(rows, widths, scattered, generator), readable, present


@settings(max_examples=60)
@given(case=cases(), clip=st.sampled_from(CLIPS), value=st.sampled_from([1e-3, 0.3, 5.0]))
def test_parts_are_rows(
    case: tuple[Tensor, list[LayerGradient], Tensor, Tensor | None], clip: Clipping, value: float
) -> None:
    rows, parts, readable, present = case
    wanted = rows.masked_fill(~readable.unsqueeze(1), math.nan)
    wanted = wanted if present is None else wanted[present]
    made = GradientBlock(parts, rows.shape[1], readable, present)
    assert torch.equal(made.rows().nan_to_num(7.0), wanted.nan_to_num(7.0))
    assert made.count_not_finite() == count_not_finite(wanted)
    total = clip_rows(wanted, clip, value).double().sum(0)
    assert torch.allclose(made.clipped(clip, value)(slice(None)), total, rtol=0, atol=1e-6 * value * len(rows))


@settings(max_examples=60)
@given(case=cases(), clip=st.sampled_from(CLIPS), value=st.sampled_from([1e-3, 0.3, 5.0]))
def test_one_row_adds_no_more_than_the_bound(
    case: tuple[Tensor, list[LayerGradient], Tensor, Tensor | None], clip: Clipping, value: float
) -> None:
    rows, parts, readable, _ = case
    for number in range(len(rows)):
        only = torch.arange(len(rows)) == number
        copies = [LayerGradient(part.values.clone(), part.columns) for part in parts]
        alone = GradientBlock(copies, rows.shape[1], readable, only).clipped(clip, value)(slice(None))
        assert bool(alone.isfinite().all())
        assert float(alone.norm() if clip == "l2" else alone.abs().max()) <= value


@pytest.mark.parametrize("clip", CLIPS)
def test_who_is_not_there_adds_nothing_whatever_lies_at_its_place(clip: Clipping) -> None:
    rows = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    present = torch.tensor([True, False, True, True])
    found = []
    for filler in (rows[1], torch.full((6,), math.nan), torch.full((6,), 3e38), torch.zeros(6)):
        rows[1] = filler
        parts = [LayerGradient(rows[:, :4].clone(), 0), LayerGradient(rows[:, 4:].clone(), torch.tensor([[5, 4]] * 4))]
        made = GradientBlock(parts, 6, torch.ones(4, dtype=torch.bool), present)
        found.append((made.count_not_finite(), made.clipped(clip, 0.5)(slice(None))))
    for zeroed, total in found:
        assert zeroed == 0
        assert torch.equal(total, found[0][1])


# One row moves a sum of any number by no more than its bound, and sums of few rows keep their bits.


_U = 2.0**-53
_OF_A_ROW = 2 * 2.0**-24  # what clipping a row in float32 may take of the margin


def plainly(blocks: Sequence[Tensor]) -> Tensor:
    total = torch.zeros(blocks[0].shape[1], dtype=torch.float64)
    for block in blocks:
        total += block.sum(0, dtype=torch.float64)
    return total


def summed(blocks: Sequence[Tensor]) -> Tensor:
    found = RowSum(blocks[0].shape[1])
    for block in blocks:
        found.add(len(block), lambda rows, block=block: block[rows].sum(0, dtype=torch.float64))  # type: ignore[misc]
    return found.total


def test_few_rows_have_the_bits_of_a_plain_sum() -> None:
    generator = torch.Generator().manual_seed(0)
    blocks = [torch.randn(size, 3, generator=generator) for size in (5, 60_000, 1, 0, 5_530)]
    assert sum(map(len, blocks)) == PLAIN
    assert torch.equal(summed(blocks), plainly(blocks))


def test_one_row_cannot_change_how_all_later_ones_are_rounded() -> None:
    """A million rows reach a power of two but for a little. One record more lifts the sum over it, where the small
    rows that follow are half of what float64 resolves: a plain sum loses them all, and differs by more than the bound
    of 1 for which the noise is made."""
    many, small = 2**20, torch.full((1,), -(2.0**-33), dtype=torch.float64)

    plain, careful = [], []
    for first in (0.0, 1.0):
        lost = torch.tensor([many - 2.0**-10 + first], dtype=torch.float64)
        kept = RowSum(1)
        kept.add(PLAIN, lambda rows, first=first: torch.tensor([first - 2.0**-10], dtype=torch.float64))  # type: ignore[misc]
        kept.add(SPAN, lambda rows: torch.tensor([float(many)], dtype=torch.float64))
        for _ in range(2**15):
            lost += small
            kept.add(1, lambda rows: small)
        plain.append(lost)
        careful.append(kept.total)
    assert float(plain[1] - plain[0]) > 1 + CLIP_MARGIN
    assert abs(float(careful[1] - careful[0]) - 1) < 1e-9


def test_the_margin_covers_what_is_said_of_it() -> None:
    assert 2 * _U * (PLAIN**2 + SPAN * 65_000_000) + _OF_A_ROW < CLIP_MARGIN


def test_no_sum_after_the_first_rows_is_longer_than_a_span() -> None:
    asked: list[tuple[int, int]] = []
    found = RowSum(1)
    for size in (PLAIN - 3, 2 * SPAN + 5, 1, SPAN):

        def sum_of(rows: slice, size: int = size) -> Tensor:
            asked.append((rows.start, rows.stop))
            return torch.tensor([float(len(range(size)[rows]))], dtype=torch.float64)

        found.add(size, sum_of)
    lengths = [stop - start for start, stop in asked]
    assert lengths == [PLAIN - 3, 3, SPAN, SPAN, 2, 1, SPAN]
    assert float(found.total) == PLAIN - 3 + 3 * SPAN + 6


@given(a=st.floats(-1e30, 1e30), b=st.floats(-1e30, 1e30))
def test_a_sum_and_what_it_lost_are_exact(a: float, b: float) -> None:
    total, lost = two_sum(*(torch.tensor([each], dtype=torch.float64) for each in (a, b)))
    assert Fraction(float(total)) + Fraction(float(lost)) == Fraction(a) + Fraction(b)


@pytest.mark.parametrize("clip", ["l2", "coordinate"])
def test_rows_and_parts_are_released_alike_beyond_the_first(clip: Clipping, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = GaussianPlan(6, 6, clip, 0.5, "poisson", 8, 100, 10, 1, 1.5, "add-remove", 1e-3)
    rows = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
    rows[7] = torch.nan
    columns = torch.tensor([[5, 4]] * 40)

    def in_parts() -> GradientBlock:
        parts = [LayerGradient(rows[:, :4].clone(), 0), LayerGradient(rows[:, [5, 4]].clone(), columns)]
        return GradientBlock(parts, 6, torch.ones(40, dtype=torch.bool))

    def released(chunks: list[Tensor | GradientBlock]) -> Tensor:
        return noisy_mean(chunks, plan, Stream(bytes(32)))

    expected = released([rows])
    monkeypatch.setattr(sums, "PLAIN", 10)
    monkeypatch.setattr(sums, "SPAN", 4)
    for chunks in ([rows], [in_parts()], [rows[:3], rows[3:]], [*rows.split(1)]):
        torch.testing.assert_close(released(chunks), expected, rtol=0, atol=1e-7)  # type: ignore[arg-type]
