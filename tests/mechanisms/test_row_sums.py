"""One row moves a sum of any number by no more than its bound, and sums of few rows keep their bits."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedspa.mechanisms import clipping as sums
from fedspa.mechanisms.base import Clipping
from fedspa.mechanisms.clipping import CLIP_MARGIN, PLAIN, SPAN, GradientBlock, LayerGradient, RowSum, two_sum
from fedspa.mechanisms.gaussian.plan import QUANTILE_NOISE_FACTOR, GaussianPlan
from fedspa.mechanisms.gaussian.release import noisy_mean
from fedspa.randomness.streams import Stream

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
    with_shares = QUANTILE_NOISE_FACTOR**2  # gradients and shares, by what each has in the cost of a record
    assert 2 * _U * (PLAIN**2 + SPAN * 60_000_000) * with_shares + _OF_A_ROW < CLIP_MARGIN


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
    plan = GaussianPlan(6, 6, clip, 0.5, "poisson", 8, 100, 10, 1, 1.5, "add-remove", 1e-3, clip_rule="quantile")
    rows = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
    rows[7] = torch.nan
    columns = torch.tensor([[5, 4]] * 40)

    def in_parts() -> GradientBlock:
        parts = [LayerGradient(rows[:, :4].clone(), 0), LayerGradient(rows[:, [5, 4]].clone(), columns)]
        return GradientBlock(parts, 6, torch.ones(40, dtype=torch.bool))

    def released(chunks: list[Tensor | GradientBlock]) -> tuple[Tensor, float]:
        return noisy_mean(chunks, plan, Stream(bytes(32)))

    expected, moved = released([rows])
    monkeypatch.setattr(sums, "PLAIN", 10)
    monkeypatch.setattr(sums, "SPAN", 4)
    for chunks in ([rows], [in_parts()], [rows[:3], rows[3:]], [*rows.split(1)]):
        mean, clip_value = released(chunks)  # type: ignore[arg-type]
        torch.testing.assert_close(mean, expected, rtol=0, atol=1e-7)
        assert clip_value == pytest.approx(moved, rel=1e-12)
