"""Rows in parts clip, count and add up as whole rows do, for any values and any cut into layers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedspa.mechanisms.base import Clipping
from fedspa.mechanisms.clipping import GradientBlock, LayerGradient, clip_rows, count_not_finite, share_below

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
    assert torch.allclose(made.share_below(clip, value), share_below(wanted, clip, value), rtol=0, atol=1e-12)
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
        found.append((made.count_not_finite(), made.share_below(clip, 0.5), made.clipped(clip, 0.5)(slice(None))))
    for zeroed, shares, total in found:
        assert zeroed == 0
        assert torch.equal(shares, found[0][1])
        assert torch.equal(total, found[0][2])
