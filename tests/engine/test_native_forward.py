"""The native engine's forward passes: torch's outputs, and the fast transforms within a step."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from native_nets import KEY, MARGIN, gradient_scale, margins, nets, records, small_net
from torch import nn

from fedspa.engine.local import LocalTask
from fedspa.engine.native import NativeEngine, library
from fedspa.engine.per_example import float64_reference
from fedspa.learning.flat import FlatModel
from fedspa.mechanisms.gaussian.plan import GaussianPlan

pytestmark = pytest.mark.skipif(library.library() is None, reason="the native engine was not built")


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(net=nets(), count=st.sampled_from([0, 1, 7, 40]), level=st.sampled_from(library.LEVELS))
def test_logits_are_torchs(net: tuple[nn.Sequential, tuple[int, ...]], count: int, level: library.Level) -> None:
    module, shape = net
    x = torch.randn(count, *shape, generator=torch.Generator().manual_seed(count))
    engine, theta = NativeEngine(module, 1, level), FlatModel(module).flatten()
    found = engine.logits(theta, x)
    with torch.no_grad():
        truth = module.double()(x.double())
    module.float()
    assert found.shape == truth.shape
    assert torch.allclose(found.double(), truth, rtol=1e-5, atol=1e-5 * float(truth.abs().max() if count else 1))
    if count > 1:  # a record's logits are its own, on any thread
        assert torch.equal(NativeEngine(module, 3, level).logits(theta, x[1:]), found[1:])


@pytest.mark.parametrize("level", library.LEVELS)
@pytest.mark.parametrize("place", range(4))
def test_a_nan_survives_max_pooling(level: library.Level, place: int) -> None:
    """As in torch: evaluation finds a diverged model by it."""
    module = nn.Sequential(nn.Conv2d(1, 1, 1, bias=False), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(1, 2, bias=False))
    x = torch.ones(1, 1, 2, 2)
    x.view(-1)[place] = math.nan
    assert NativeEngine(module, 1, level).logits(torch.ones(3), x).isnan().all()


def check_convolution(level: library.Level, convolution: nn.Conv2d, pooled: bool, shape: tuple[int, int]) -> None:
    """One step of a net around a convolution with a given forward pass, within 1e-5 of the clip value."""
    inputs = convolution.in_channels
    generator = torch.Generator().manual_seed(inputs)
    behind = [nn.MaxPool2d(2), nn.ReLU()] if pooled else [nn.Tanh()]
    features = nn.Sequential(nn.Conv2d(2, inputs, 1), nn.Tanh(), convolution, *behind, nn.Flatten())
    module = nn.Sequential(*features, nn.Linear(features(torch.zeros(1, 2, *shape)).shape[1], 4))
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) / math.sqrt(p[0].numel() if p.dim() > 1 else 4))
    x, y = records(module, (2, *shape), 7, inputs)
    theta = FlatModel(module).flatten()
    bound = gradient_scale(module, x, y, "coordinate")
    plan = GaussianPlan(len(theta), len(theta), "coordinate", bound, "fixed", 7, 7, 1, 1, 1e-3, "replace-one", 1e-3)
    task = LocalTask(x, y, None, 1.0, 7 * 2.0**12, plan, KEY)
    ours = NativeEngine(module, 1, level).train(theta, [task])[0].delta.double()
    truth = float64_reference(module).train(theta, [task])[0].delta
    assert float((ours - truth).abs().max()) / 2.0**12 < 1e-5 * bound


@pytest.mark.parametrize("level", library.LEVELS)
@pytest.mark.parametrize(("inputs", "outputs"), [(16, 16), (20, 24), (33, 50)])
@pytest.mark.parametrize("pooled", [False, True])
def test_the_fast_transform_of_3x3_convolutions(level: library.Level, inputs: int, outputs: int, pooled: bool) -> None:
    """16 input channels and more, stride 1, an even output: where the forward pass takes Winograd's way."""
    check_convolution(level, nn.Conv2d(inputs, outputs, 3, padding=1), pooled, (6, 6))


@pytest.mark.parametrize("level", library.LEVELS)
@pytest.mark.parametrize(
    ("inputs", "outputs", "pooled"), [(1, 9, False), (3, 8, True), (10, 20, True), (17, 33, False)]
)
@pytest.mark.parametrize(
    ("height", "stride", "shape"),
    [(5, 1, (13, 12)), (5, 1, (9, 10)), (5, 1, (7, 12)), (3, 2, (6, 11)), (1, 1, (5, 14))],
)
def test_the_fast_transform_of_convolutions_five_wide(
    level: library.Level, inputs: int, outputs: int, pooled: bool, height: int, stride: int, shape: tuple[int, int]
) -> None:
    """Rows of 8, 7 and 10 pixels, in strips of four that overlap where they must."""
    check_convolution(level, nn.Conv2d(inputs, outputs, (height, 5), stride=(stride, 1)), pooled, shape)


@pytest.mark.parametrize("level", library.LEVELS)
@pytest.mark.parametrize(("shape", "outputs"), [((9, 26, 19), 20), ((5, 17, 17), 48), ((9, 10, 25), 33)])
def test_the_fast_transforms_are_accurate_where_clipping_is_hard(
    level: library.Level, shape: tuple[int, int, int], outputs: int
) -> None:
    """Weights of full size, a clip value of a tenth of the largest gradient: F(4, 5) in both directions fails here."""
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        features = nn.Sequential(nn.Conv2d(shape[0], outputs, 5), nn.MaxPool2d(2), nn.Flatten())
        module = nn.Sequential(*features, nn.Linear(features(torch.zeros(1, *shape)).shape[1], 5))
        with torch.no_grad():
            for p in module.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) / math.sqrt(p[0].numel() if p.dim() > 1 else 4))
        x, y = records(module, shape, 9, seed)
        theta = FlatModel(module).flatten()
        d, bound = len(theta), 0.1 * gradient_scale(module, x, y, "coordinate")
        plan = GaussianPlan(d, d, "coordinate", bound, "fixed", len(y), len(y), 1, 1, 1e-3, "replace-one", 1e-3)
        task = LocalTask(x, y, None, 1.0, len(y) * 2.0**12, plan, KEY)
        ours = NativeEngine(module, 1, level).train(theta, [task])[0].delta.double() / 2.0**12
        truth = float64_reference(module).train(theta, [task])[0].delta.double() / 2.0**12
        assert float((ours - truth).abs().max()) <= 1e-5 * bound + 1e-6 * float(truth.abs().max())


def test_records_near_a_kink_are_rare() -> None:
    module = small_net()
    x = torch.randn(2000, 1, 12, 12, generator=torch.Generator().manual_seed(1))
    left_out = int((margins(module, x) <= MARGIN).sum())
    assert 0 < left_out < 100  # measured: 20 of 2000
