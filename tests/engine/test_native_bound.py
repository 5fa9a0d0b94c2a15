"""The native engine's bound against data and models made to break it: what one record adds to a step."""

from __future__ import annotations

import math

import pytest
import torch
from hard_records import Train, all_but_sure, cancelling, contribution
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedspa.engine.local import LocalTask
from fedspa.engine.native import NativeEngine, library
from fedspa.engine.per_example import PerExampleEngine
from fedspa.learning.flat import FlatModel
from fedspa.mechanisms.base import CLIP_UNITS, LARGEST_CLIP, SMALLEST_CLIP, Clipping
from fedspa.mechanisms.gaussian.plan import GaussianPlan

pytestmark = pytest.mark.skipif(library.library() is None, reason="the native engine was not built")


def trained(module: nn.Module, theta: Tensor, level: library.Level) -> Train:
    return lambda task: NativeEngine(module, 1, level).train(theta, [task])[0].delta


@pytest.mark.parametrize("level", library.LEVELS)
@pytest.mark.parametrize("gap", [45.0, 55.0, 60.0])
@pytest.mark.parametrize("clip_value", [1e-28, 1e-30])
def test_gradients_whose_squares_vanish_in_float32_are_clipped(
    level: library.Level, gap: float, clip_value: float
) -> None:
    module, theta, record, mask = all_but_sure(gap)
    ratio = contribution(trained(module, theta, level), theta, record, clip_value, mask)
    assert 0.999 < ratio <= 1 + 1e-5


@settings(max_examples=100, deadline=None)
@given(
    side=st.integers(2, 16),
    kernel=st.integers(1, 2),
    channels=st.sampled_from([1, 3]),
    size=st.sampled_from([1.0, 1e3, 1e6]),
    exponent=st.floats(-6, 0),
    seed=st.integers(0, 2**20),
)
def test_sums_over_pixels_that_cancel_are_clipped(
    side: int, kernel: int, channels: int, size: float, exponent: float, seed: int
) -> None:
    """A convolution's gradient of large terms whose sum is all rounding: the norm must be that of the same rounding."""
    module, theta, record, weights = cancelling(side, kernel, channels, size, seed)
    for level in library.LEVELS:
        for mask in (torch.arange(weights), None):  # the convolution alone: all of it is rounding
            assert contribution(trained(module, theta, level), theta, record, 10.0**exponent, mask) <= 1 + 1e-5


@settings(max_examples=100, deadline=None)
@given(
    features=st.integers(1, 40),
    classes=st.integers(2, 20),
    size=st.floats(-22, 14),
    gap=st.floats(0, 60),
    exponent=st.floats(-30, 3),
    seed=st.integers(0, 2**20),
)
def test_linear_layers_are_clipped_by_the_product_of_norms(
    features: int, classes: int, size: float, gap: float, exponent: float, seed: int
) -> None:
    """Every coordinate active: the norm is bounded, not measured. The bound must hold, and hardly be above the norm."""
    generator = torch.Generator().manual_seed(seed)
    module = nn.Sequential(nn.Flatten(), nn.Linear(features, classes))
    theta = torch.zeros(classes * features + classes)
    theta[-1] = gap  # derivatives of the other classes are as small as e^-gap
    record = 10.0**size * torch.randn(1, features, generator=generator)
    clip_value = 10.0**exponent
    slopes = torch.softmax(theta[-classes:].double(), 0)
    slopes[0] -= 1
    norm = float(slopes.norm() * torch.sqrt(1 + record.double().square().sum()))
    for level in library.LEVELS:
        ratio = contribution(trained(module, theta, level), theta, record, clip_value)
        assert ratio <= 1 + 1e-5
        if 1.01 * clip_value < norm < 1e37 * clip_value:  # a factor below float32's normal range counts as zero
            assert ratio > 0.999


@pytest.mark.parametrize("level", library.LEVELS)
@pytest.mark.parametrize("clip", ["coordinate", "l2"])
@pytest.mark.parametrize("pixels", [0, 1, 2])  # of a convolution; 0 stands for a linear layer
@pytest.mark.parametrize("exponent", [5, 9, 12])
def test_one_record_cannot_change_how_others_are_rounded(
    level: library.Level, clip: str, pixels: int, exponent: int
) -> None:
    """It lifts the running sum over a power of two, before many records of about half a float32 step there.

    Records of the other sign bring the sum back afterwards, so that θ's own rounding is small.
    """
    module = ONE_WEIGHT_A_CLASS[pixels]
    half, small = 2**exponent - 1, 1.2 * 2.0 ** (exponent - 23)
    parts = [torch.full((half,), 2.0), torch.tensor([2.0]), torch.full((half,), small), torch.full((half,), 2.0)]
    x = torch.cat(parts).view(-1, 1, 1, 1).expand(-1, 1, 1, max(pixels, 1)).clone()
    y = torch.cat([torch.zeros(2 * half + 1), torch.ones(half)]).long()
    bound = 1.0 if clip == "coordinate" else math.sqrt(2)  # gradients are (-x / 2, x / 2)
    theta = torch.tensor([0.0, 0.0, *(MEAN_OF_PIXELS if pixels == 2 else [])])
    mask = torch.arange(2) if pixels == 2 else None
    plan = GaussianPlan(len(theta), 2, clip, bound, "fixed", len(y), len(y), 1, 1, 1e-9, "replace-one", 1e-5)  # type: ignore[arg-type]
    deltas = []
    for record in (2.0, math.nan):
        x[half] = record
        task = LocalTask(x.clone(), y, mask, 1.0, 1.0 * len(y), plan, bytes(32))
        deltas.append(NativeEngine(module, 1, level).train(theta, [task])[0].delta.double())
    change = deltas[0] - deltas[1]
    assert 1 - 1e-5 < float(change.norm()) / plan.clip_norm <= 1 + 1e-6
    assert float(change.abs().max()) <= 1 + 1e-6


MEAN_OF_PIXELS = [0.5, 0.5, 0.0, 0.0, 0.0, 0.0, 0.5, 0.5]  # the second convolution, which the mask leaves out
ONE_WEIGHT_A_CLASS = {
    0: nn.Sequential(nn.Flatten(), nn.Linear(1, 2, bias=False)),
    1: nn.Sequential(nn.Conv2d(1, 2, 1, bias=False), nn.Flatten()),
    2: nn.Sequential(nn.Conv2d(1, 2, 1, bias=False), nn.Conv2d(2, 2, (1, 2), bias=False), nn.Flatten()),
}


@pytest.mark.parametrize("level", library.LEVELS)
@pytest.mark.parametrize("clip", ["coordinate", "l2"])
def test_the_order_of_records_changes_no_bit(level: library.Level, clip: str) -> None:
    """Clipped gradients are whole numbers of units, biases' among them: their sum knows no order and no chunks."""
    generator = torch.Generator().manual_seed(2)
    module = nn.Sequential(nn.Conv2d(1, 3, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(27, 4))
    theta = 0.3 * torch.randn(len(FlatModel(module).flatten()), generator=generator)
    x, y = torch.randn(301, 1, 8, 8, generator=generator), torch.randint(0, 4, (301,), generator=generator)
    plan = GaussianPlan(len(theta), len(theta), clip, 0.3, "fixed", 301, 301, 1, 1, 1e-3, "replace-one", 1e-3)  # type: ignore[arg-type]
    deltas = []
    for order in (torch.arange(301), torch.randperm(301, generator=generator)):
        task = LocalTask(x[order], y[order], None, 1.0, 10.0, plan, bytes(32))
        deltas.append(NativeEngine(module, 1, level).train(theta, [task])[0].delta)
    assert torch.equal(*deltas)


@pytest.mark.parametrize("level", library.LEVELS)
@pytest.mark.parametrize("clip", ["coordinate", "l2"])
@pytest.mark.parametrize("scale", [1e20, 3e37])
def test_derivatives_that_overflow_count_as_zero_as_in_the_generic_engine(
    level: library.Level, clip: str, scale: float
) -> None:
    """Small activations, weights so large that backward overflows."""
    module = nn.Sequential(
        *(nn.Flatten(), nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)),
    )
    generator = torch.Generator().manual_seed(1)
    parts = []
    for p, size in zip(module.parameters(), (1e-3, 0.0, scale, 0.0, scale, 0.0)):
        parts.append(size * torch.randn(p.numel(), generator=generator))
    theta = torch.cat(parts)
    d = len(FlatModel(module).flatten())
    plan = GaussianPlan(d, d, clip, 1.0, "fixed", 1, 4, 1, 1, 1e-3, "replace-one", 1e-3)  # type: ignore[arg-type]
    x, y = torch.zeros(4, 1, 2, 2), torch.zeros(4, dtype=torch.int64)
    task = LocalTask(x, y, None, 1.0, 1.0, plan, bytes(32))
    ours, theirs = (
        engine.train(theta, [task])[0] for engine in (NativeEngine(module, 1, level), PerExampleEngine(module))
    )
    assert ours.zeroed == theirs.zeroed == 1
    assert torch.allclose(ours.delta, theirs.delta, rtol=1e-5, atol=1e-7)


@settings(max_examples=150, deadline=None)
@given(
    clip=st.sampled_from(["coordinate", "l2"]),
    size=st.sampled_from([1e-30, 1e-6, 1.0, 1e3, 1e18, 1e38]),
    weight=st.sampled_from([0.0, 1e-3, 1.0, 1e6, 1e30]),
    clip_value=st.sampled_from([SMALLEST_CLIP, 1e-3, 1.0, LARGEST_CLIP]),
    level=st.sampled_from(library.LEVELS),
    share=st.sampled_from([0.02, 0.4, 1.0]),
    seed=st.integers(0, 2**20),
)
def test_one_examples_whole_numbers_stay_within_the_clip(
    clip: Clipping, size: float, weight: float, clip_value: float, level: library.Level, share: float, seed: int
) -> None:
    """What the sensitivity of cpSGD and of shares rests on, exactly: 2^24 units to the clip value, whatever the record,
    the model and the mask."""
    module = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 4))
    generator = torch.Generator().manual_seed(seed)
    theta = weight * torch.randn(FlatModel(module).dimension, generator=generator)
    x = size * torch.randn(1, 1, 6, 6, generator=generator)
    drawn = torch.randperm(len(theta), generator=generator)[: max(1, round(share * len(theta)))]
    mask = None if share == 1 else drawn.sort().values
    y = torch.tensor([seed % 4])
    units, zeroed = NativeEngine(module, 1, level).clipped_sum(theta, x, y, clip, clip_value, mask)
    assert len(units) == len(drawn)
    numbers = [int(unit) for unit in units]
    assert zeroed in (0, 1)
    assert not zeroed or not any(numbers)
    most = max(map(abs, numbers)) if clip == "coordinate" else math.isqrt(sum(n * n for n in numbers)) + 1
    assert most <= CLIP_UNITS
