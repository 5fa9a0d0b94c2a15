"""The stacked engine's bounds against data and models made to break it: what one record adds to a step.

The torch twins always run; the kernels where there is a CUDA device.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from hard_records import Train, all_but_sure, cancelling, contribution
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedspa.engine import stacked
from fedspa.engine.stacked import StackedEngine
from fedspa.engine.stacked.engine import LayerGradients
from fedspa.engine.task import LocalTask
from fedspa.mechanisms.base import SMALLEST_CLIP, Clipping
from fedspa.mechanisms.gaussian.plan import GaussianPlan

RUNNERS = ["twins", *(pytest.param(runner, marks=pytest.mark.gpu) for runner in ("kernels", "kernels, tf32"))]


def train(runner: str, module: nn.Module, theta: Tensor, task: LocalTask) -> Tensor:
    if runner == "twins":
        return StackedEngine(module, "cpu", tf32=False).train(theta, [task])[0].delta.double()
    from fedspa.engine.stacked.rounds import Rounds  # needs Triton

    device = torch.device("cuda")
    omega = None if task.coordinates is None else task.coordinates.to(device)
    moved = LocalTask(task.x.to(device), task.y.to(device), omega, task.scale, task.local_lr, task.steps, task.key)
    rounds = Rounds(LayerGradients(module.to(device)), device, tf32="tf32" in runner)
    return rounds.train(theta.to(device), [moved])[0].delta.double().cpu()


def trained(runner: str, module: nn.Module, theta: Tensor) -> Train:
    return lambda task: train(runner, module, theta, task)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("gap", [45.0, 60.0])
@pytest.mark.parametrize("clip_value", [1e-28, 1e-30])
def test_gradients_whose_squares_vanish_in_float32_are_clipped(runner: str, gap: float, clip_value: float) -> None:
    module, theta, record, mask = all_but_sure(gap)
    ratio = contribution(trained(runner, module, theta), theta, record, clip_value, mask)
    assert 0.999 < ratio <= 1


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("size", [1e16, 1e24, 3e37])
def test_gradients_whose_squares_overflow_float32_are_clipped(runner: str, size: float) -> None:
    """Finite gradients of any size count, at the bound."""
    module = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    theta = torch.zeros(10)  # derivatives of ±½ whatever the data
    for clip_value in (1e-3, 1e5) if size < 1e37 else (1e5,):  # a factor of 1e-41 would count as zero
        record = torch.full((1, 1, 2, 2), size)
        assert 0.999 < contribution(trained(runner, module, theta), theta, record, clip_value) <= 1


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_factor_too_small_for_float32_counts_as_zero(runner: str) -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    theta, record = torch.zeros(10), torch.full((1, 1, 2, 2), 3e37)
    assert contribution(trained(runner, module, theta), theta, record, SMALLEST_CLIP) <= 1


@pytest.mark.parametrize("runner", RUNNERS)
@settings(max_examples=8 if torch.cuda.is_available() else 60, deadline=None)
@given(
    side=st.integers(2, 12),
    kernel=st.integers(1, 2),
    channels=st.sampled_from([1, 3]),
    size=st.sampled_from([1.0, 1e3, 1e6]),
    exponent=st.floats(-6, 0),
    seed=st.integers(0, 2**20),
)
def test_sums_over_pixels_that_cancel_are_clipped(
    runner: str, side: int, kernel: int, channels: int, size: float, exponent: float, seed: int
) -> None:
    """A convolution's gradient of large terms whose sum is all rounding: the norm must be that of the same rounding."""
    module, theta, record, weights = cancelling(side, kernel, channels, size, seed)
    for mask in (torch.arange(weights), None):  # the convolution alone: all of it is rounding
        assert contribution(trained(runner, module, theta), theta, record, 10.0**exponent, mask) <= 1


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_coordinate_bound_between_two_float32_numbers_is_not_rounded_up(runner: str) -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(1, 2, bias=False))
    value = 0.1  # the nearest float32 is above it
    plan = GaussianPlan(2, 2, "coordinate", value, "fixed", 1, 1, 1, 1, 1e-9, "replace-one", 1e-3)
    deltas = []
    for x in (torch.full((1, 1), 1e3), torch.full((1, 1), math.nan)):
        task = LocalTask(x, torch.zeros(1, dtype=torch.int64), None, 1.0, 2.0**24, plan, bytes(32))
        deltas.append(train(runner, module, torch.zeros(2), task))
    # The margin is more than the noise, 1e-9 of the bound, and the update's own rounding, 6e-8.
    assert float((deltas[0] - deltas[1]).abs().max()) / 2.0**24 <= value


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("clip", ["coordinate", "l2"])
def test_large_records_add_no_more_than_the_bound(runner: str, clip: Clipping) -> None:
    """Gradients of 10¹², whose products are rounded by 10⁴: no trace of that rounding may pass the clip."""
    module = nn.Sequential(nn.Flatten(), nn.Linear(40, 3))
    generator = torch.Generator().manual_seed(4)
    plan = GaussianPlan(123, 123, clip, 0.01, "fixed", 1, 1, 1, 1, 1e-9, "replace-one", 1e-3)
    for _ in range(3):
        theta = torch.zeros(123)
        theta[120:] = torch.randn(3, generator=generator)  # derivatives that are no powers of two
        deltas = []
        for x in (1e12 * torch.randn(1, 40, generator=generator), torch.full((1, 40), math.nan)):
            task = LocalTask(x, torch.zeros(1, dtype=torch.int64), None, 1.0, 2.0**30, plan, bytes(32))
            deltas.append(train(runner, module, theta, task))
        added = (deltas[0] - deltas[1]) / 2.0**30 / 0.01
        assert 0.999 < float(added.abs().max() if clip == "coordinate" else added.norm()) <= 1


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("clip", ["coordinate", "l2"])
def test_a_record_does_not_change_how_others_are_rounded(runner: str, clip: Clipping) -> None:
    """31 gradients of 1, then the record's 1 or 0, then 32 that are 0.6 of float32's last digit above 32: with the
    record, each would count as that whole digit, and without as half of it, 6·10⁻⁵ in all."""
    module = nn.Sequential(nn.Flatten(), nn.Linear(1, 2, bias=False))  # derivatives of ±½ at θ = 0
    value = 1.00001 if clip == "coordinate" else 1.00001 * math.sqrt(2)
    plan = GaussianPlan(2, 2, clip, value, "fixed", 256, 256, 1, 1, 1e-9, "replace-one", 1e-3)
    deltas = []
    for record in (2.0, 0.0):
        x = torch.zeros(256, 1)  # the kernels share the examples out among four programs: this is the first one's
        x[::4, 0] = torch.tensor([*[2.0] * 31, record, *[1.2 * 2.0**-18] * 32])
        step = 256 * 2.0**14
        task = LocalTask(x, torch.zeros(256, dtype=torch.int64), None, 1.0, step, plan, bytes(32))
        deltas.append(train(runner, module, torch.zeros(2), task) / 2.0**14)
    # Updates of 32 are rounded by 2e-6.
    assert (deltas[0] - deltas[1]).abs().tolist() == pytest.approx([1.0, 1.0], abs=1e-5)


def test_no_kernel_subtracts_a_number_from_itself() -> None:
    """As a test for NaN and infinity it is wrong where it is contracted (`kernels.finite`)."""
    files = [path for path in Path(stacked.__file__).parent.rglob("*.py") if "@triton.jit" in path.read_text("utf-8")]
    assert len(files) >= 3
    for path in files:
        assert re.findall(r"\b([a-z]\w*) - \1\b(?!\()", path.read_text("utf-8")) == [], path.name
