"""The native engine against the float64 reference: random nets, batches, clippings, masks and samplers.

Max-pooling and ReLU have kinks: where two pixels or a unit and 0 are closer than float32 can tell, float32 takes
another branch than float64 and the gradients differ for a good reason. Records that come that near a kink (MARGIN, in
float64) are left out before the comparison; they are rare, and a test says how rare.
"""

from __future__ import annotations

import itertools
import math
import platform
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from ctypes import c_int64
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from fedspa.engine.flat import FlatModel
from fedspa.engine.local import CLIP_UNITS
from fedspa.engine.native import NativeEngine, library, supports
from fedspa.engine.reference import ReferenceEngine
from fedspa.engine.task import LocalResult, LocalTask
from fedspa.errors import ConfigError, DataError, PrivacyError
from fedspa.mechanism.clipping import clip_rows
from fedspa.privacy.plan import Clipping, Plan

pytestmark = pytest.mark.skipif(library.library() is None, reason="the native engine was not built")

MARGIN = 2e-5
KEY = bytes(range(32))


def margins(module: nn.Sequential, x: Tensor) -> Tensor:
    """For each record, how near (in float64) its forward pass comes to a kink."""
    nearest = torch.full((len(x),), math.inf, dtype=torch.float64)
    h = x.double()
    for layer in module:
        if isinstance(layer, nn.ReLU):
            # An exact 0 (a window full of padding) is 0 in float32, too.
            distance = torch.where(h == 0, math.inf, h.abs())
            nearest = torch.minimum(nearest, distance.flatten(1).amin(1))
        if isinstance(layer, nn.MaxPool2d):
            kernel, stride, padding = (_pair(v) for v in (layer.kernel_size, layer.stride, layer.padding))
            padded = functional.pad(h, (padding[1], padding[1], padding[0], padding[0]), value=-math.inf)
            windows = padded.unfold(2, kernel[0], stride[0]).unfold(3, kernel[1], stride[1]).flatten(4)
            if windows.shape[-1] > 1:
                top = windows.topk(2, dim=-1).values
                # An exact tie (zeros behind a ReLU, windows in the padding) is one in float32, too: the first wins.
                gap = top[..., 0] - top[..., 1]
                gap = torch.where(gap == 0, math.inf, gap)
                nearest = torch.minimum(nearest, gap.flatten(1).amin(1))
        h = _double(layer)(h)
    return nearest


def _pair(value: int | tuple[int, int]) -> tuple[int, int]:
    return value if isinstance(value, tuple) else (value, value)


def _double(layer: nn.Module) -> nn.Module:
    twin = type(layer).__new__(type(layer))
    twin.__dict__ = dict(layer.__dict__)
    twin._parameters = {
        name: None if p is None else nn.Parameter(p.detach().double()) for name, p in layer._parameters.items()
    }
    return twin


def records(module: nn.Sequential, shape: tuple[int, ...], count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Records away from kinks; their labels."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3 * count + 4, *shape, generator=generator)
    x = x[margins(module, x) > MARGIN][:count]
    classes = module(x[:1]).shape[1]
    return x, torch.randint(0, classes, (len(x),), generator=generator)


def same(a: LocalResult, b: LocalResult) -> bool:
    return torch.equal(a.delta, b.delta) and a.clip_value == b.clip_value


@st.composite
def nets(draw: st.DrawFn) -> tuple[nn.Sequential, tuple[int, ...]]:
    """A random chain: up to three convolutions with strides, paddings, poolings and activations, then linear layers."""
    channels, height, width = draw(st.integers(1, 4)), draw(st.integers(3, 13)), draw(st.integers(3, 13))
    shape = (channels, height, width)
    layers: list[nn.Module] = []
    for _ in range(draw(st.integers(0, 3))):
        kernel = (draw(st.integers(1, min(5, height))), draw(st.integers(1, min(5, width))))
        stride = (draw(st.integers(1, 3)), draw(st.integers(1, 3)))
        padding = (draw(st.integers(0, 2)), draw(st.integers(0, 2)))
        out = draw(st.sampled_from([1, 3, 8, 10, 17, 20, 33]))
        layers.append(nn.Conv2d(channels, out, kernel, stride, padding, bias=draw(st.booleans())))
        channels = out
        height, width = ((s + 2 * p - k) // t + 1 for s, p, k, t in zip((height, width), padding, kernel, stride))
        behind: list[nn.Module] = draw(st.sampled_from([[], [nn.ReLU()], [nn.Tanh()]]))
        if min(height, width) > 1 and draw(st.booleans()):
            side = draw(st.integers(2, min(3, height, width)))
            step, pad = draw(st.integers(1, 3)), draw(st.integers(0, side // 2))
            pool = draw(st.sampled_from([nn.MaxPool2d, nn.MaxPool2d, nn.AvgPool2d]))(side, step, pad)
            height, width = ((s + 2 * pad - side) // step + 1 for s in (height, width))
            behind = draw(st.permutations([*behind, pool]))
        layers += behind
    layers.append(nn.Flatten())
    features = channels * height * width
    for _ in range(draw(st.integers(0, 2))):
        out = draw(st.integers(1, 40))
        layers += [nn.Linear(features, out, bias=draw(st.booleans())), draw(st.sampled_from([nn.ReLU(), nn.Tanh()]))]
        features = out
    layers.append(nn.Linear(features, draw(st.integers(2, 12))))
    module = nn.Sequential(*layers)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    with torch.no_grad():
        for p in module.parameters():
            fan = p[0].numel() if p.dim() > 1 else 4
            p.copy_(torch.randn(p.shape, generator=generator) / math.sqrt(fan))
    return module, shape


def gradient_scale(module: nn.Module, x: Tensor, y: Tensor, clip: str) -> float:
    """The largest coordinate, or norm, of any record's gradient: what a clip value is chosen relative to."""
    if len(y) == 0:
        return 1.0
    model = FlatModel(module)
    rows = model.per_example_gradients()(model.flatten(), x, y)
    return float(rows.abs().max() if clip == "coordinate" else rows.norm(dim=1).max())


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(
    net=nets(),
    clip=st.sampled_from(["coordinate", "l2", None]),
    sampling=st.sampled_from(["poisson", "fixed"]),
    share=st.sampled_from([None, 0.05, 0.5]),
    batch=st.integers(1, 12),
    relative_clip=st.sampled_from([0.1, 0.5, 2.0]),
    level=st.sampled_from(library.LEVELS),
    seed=st.integers(0, 2**20),
)
def test_one_step_agrees_with_the_reference(
    net: tuple[nn.Sequential, tuple[int, ...]],
    clip: str | None,
    sampling: str,
    share: float | None,
    batch: int,
    relative_clip: float,
    level: library.Level,
    seed: int,
) -> None:
    module, shape = net
    x, y = records(module, shape, 20, seed)
    assume(len(y) >= batch)  # three times as many are drawn: all but never too few
    theta = FlatModel(module).flatten()
    d = len(theta)
    generator = torch.Generator().manual_seed(seed)
    k = d if share is None else max(1, int(share * d))
    mask = None if share is None else torch.randperm(d, generator=generator)[:k].sort().values
    bound = relative_clip * gradient_scale(module, x, y, clip or "coordinate")
    assume(bound > 1e-4)  # a net whose last layer is dead has nothing to compare
    plan = None
    if clip is not None:
        relation = "add-remove" if sampling == "poisson" else "replace-one"
        plan = Plan(d, k, clip, bound, sampling, batch, len(y), 1, 1, 0.01, relation, 1e-3)  # type: ignore[arg-type]
    # A step so large that θ's own float32 rounding is small beside it: Δ over the step is then −(sum + noise).
    size = 2.0**12
    task = LocalTask(x, y, mask, 1.0, sampling, batch, 1, size * batch, plan, seed.to_bytes(32, "big"))  # type: ignore[arg-type]
    ours = NativeEngine(module, 1, level).train(theta, [task])[0].delta.double() / size
    truth = ReferenceEngine(module).train(theta, [task])[0].delta.double() / size
    assert ours.shape == truth.shape == (k,)
    # Noise and sums above c round relative to their own size.
    tolerance = 1e-5 * bound + 1e-6 * truth.abs().max()
    assert float((ours - truth).abs().max()) <= tolerance


@pytest.mark.parametrize("level", library.LEVELS)
@pytest.mark.parametrize("clip", ["coordinate", "l2"])
def test_a_whole_batch_at_the_bound(level: library.Level, clip: Clipping) -> None:
    """Twenty equal records, each beyond the clip value: what one stays below it by counts twenty times."""
    module = nn.Sequential(nn.Linear(6, 3))
    x, y = torch.linspace(1, 2, 6).expand(20, 6).contiguous(), torch.zeros(20, dtype=torch.int64)
    plan = Plan(21, 21, clip, 1e-3, "fixed", 20, 20, 1, 1, 1e-3, "replace-one", 1e-3)
    task = LocalTask(x, y, None, 1.0, "fixed", 20, 1, 20 * 2.0**12, plan, KEY)
    theta = torch.zeros(21)
    ours = NativeEngine(module, 1, level).train(theta, [task])[0].delta.double()
    truth = ReferenceEngine(module).train(theta, [task])[0].delta
    assert float(truth.abs().max()) / 2.0**12 > 5e-3  # of a sum that 20 records of 1e-3 can reach
    assert float((ours - truth).abs().max()) / 2.0**12 < 1e-5 * plan.clip_value


@pytest.mark.parametrize("level", library.LEVELS)
@pytest.mark.parametrize("clip", ["coordinate", "l2"])
@pytest.mark.parametrize("count", [0, 1, 9, 300])
def test_clipped_sums_agree_with_the_reference(level: library.Level, clip: Clipping, count: int) -> None:
    """What cpSGD takes: the same up to float32's rounding of each gradient."""
    module = small_net()
    x, y = records(module, (1, 12, 12), count, 3)
    theta = FlatModel(module).flatten()
    bound = 0.3 * gradient_scale(module, x, y, clip)
    units, zeroed = NativeEngine(module, 1, level).clipped_sum(theta, x, y, clip, bound)
    rows = [clip_rows(row, clip, bound) for row in ReferenceEngine(module).rows(theta.double(), x, y, None)]
    truth = torch.stack(rows).sum((0, 1)) if rows else torch.zeros(len(theta))
    assert zeroed == 0
    assert float((units * (bound / CLIP_UNITS) - truth).abs().max()) <= 1e-5 * bound + 1e-6 * float(truth.abs().max())


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
    if count > 1:  # a record's logits are its own
        assert torch.equal(engine.logits(theta, x[1:]), found[1:])


@pytest.mark.parametrize("level", library.LEVELS)
@pytest.mark.parametrize("clip", ["coordinate", "l2"])
def test_clipped_sums_pass_an_int32(level: library.Level, clip: Clipping) -> None:
    engine, theta = NativeEngine(nn.Sequential(nn.Linear(1, 2, bias=False)), 1, level), torch.zeros(2)
    x, y = torch.full((300, 1), 2.0), torch.zeros(300, dtype=torch.int64)
    one, _ = engine.clipped_sum(theta, x[:1], y[:1], clip, 0.5)
    many, _ = engine.clipped_sum(theta, x, y, clip, 0.5)
    assert torch.equal(many, 300 * one)
    assert int(many.abs().max()) > 2**31


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
    plan = Plan(len(theta), len(theta), "coordinate", bound, "fixed", 7, 7, 1, 1, 1e-3, "replace-one", 1e-3)
    task = LocalTask(x, y, None, 1.0, "fixed", 7, 1, 7 * 2.0**12, plan, KEY)
    ours = NativeEngine(module, 1, level).train(theta, [task])[0].delta.double()
    truth = ReferenceEngine(module).train(theta, [task])[0].delta
    assert float((ours - truth).abs().max()) / 2.0**12 < 1e-5 * bound


@pytest.mark.parametrize("level", library.LEVELS)
@pytest.mark.parametrize(("inputs", "outputs"), [(16, 16), (20, 24), (33, 50), (64, 72)])
@pytest.mark.parametrize("pooled", [False, True])
def test_the_fast_transform_of_3x3_convolutions(level: library.Level, inputs: int, outputs: int, pooled: bool) -> None:
    """16 input channels and more, stride 1, an even output: where the forward pass takes Winograd's way."""
    check_convolution(level, nn.Conv2d(inputs, outputs, 3, padding=1), pooled, (6, 6))


@pytest.mark.parametrize("level", library.LEVELS)
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 10), (3, 8), (10, 20), (17, 33)])
@pytest.mark.parametrize(("height", "stride", "shape"), [(5, 1, (9, 12)), (3, 2, (6, 11)), (1, 1, (5, 14))])
@pytest.mark.parametrize("pooled", [False, True])
def test_the_fast_transform_of_convolutions_five_wide(
    level: library.Level, inputs: int, outputs: int, height: int, stride: int, shape: tuple[int, int], pooled: bool
) -> None:
    """Rows of 8, 7 and 10 pixels, in strips of four that overlap where they must."""
    check_convolution(level, nn.Conv2d(inputs, outputs, (height, 5), stride=(stride, 1)), pooled, shape)


@pytest.mark.parametrize("level", library.LEVELS)
@pytest.mark.parametrize("clip", ["coordinate", "l2", None])
@pytest.mark.parametrize("share", [1.0, 0.3, 0.01])
def test_whole_vectors_of_channels(level: library.Level, clip: Clipping | None, share: float) -> None:
    """Channels in whole vectors: gradients are cut by channels and by mask."""
    generator = torch.Generator().manual_seed(4)
    module = nn.Sequential(
        *(nn.Conv2d(2, 64, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(64, 32, 3), nn.ReLU(), nn.Conv2d(32, 16, 1)),
        *(nn.Tanh(), nn.Conv2d(16, 8, 4, padding=1), nn.Flatten(), nn.Linear(72, 3)),
    )
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) / math.sqrt(p[0].numel() if p.dim() > 1 else 4))
    x, y = records(module, (2, 14, 14), 9, 4)
    theta = FlatModel(module).flatten()
    d = len(theta)
    k = int(share * d)
    mask = torch.randperm(d, generator=generator)[:k].sort().values if k < d else None
    bound = gradient_scale(module, x, y, clip or "coordinate") / 2
    plan = Plan(d, k, clip, bound, "fixed", 9, 9, 1, 1, 1e-3, "replace-one", 1e-3) if clip else None
    task = LocalTask(x, y, mask, 1.0, "fixed", 9, 1, 9 * 2.0**12, plan, KEY)
    ours = NativeEngine(module, 1, level).train(theta, [task])[0].delta.double()
    truth = ReferenceEngine(module).train(theta, [task])[0].delta
    assert float((ours - truth).abs().max()) / 2.0**12 < 1e-5 * bound + 1e-6 * float(truth.abs().max()) / 2.0**12


def test_records_near_a_kink_are_rare() -> None:
    module = small_net()
    x = torch.randn(2000, 1, 12, 12, generator=torch.Generator().manual_seed(1))
    left_out = int((margins(module, x) <= MARGIN).sum())
    assert 0 < left_out < 100  # measured: 20 of 2000


def small_net() -> nn.Sequential:
    generator = torch.Generator().manual_seed(5)
    module = nn.Sequential(
        *(nn.Conv2d(1, 6, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(6, 20, 2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(80, 16), nn.ReLU(), nn.Linear(16, 5)),
    )
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(0.3 * torch.randn(p.shape, generator=generator))
    return module


def small_task(**changes: object) -> LocalTask:
    module = small_net()
    x, y = records(module, (1, 12, 12), 40, 3)
    d = len(FlatModel(module).flatten())
    settings_ = {
        "clip": "coordinate",
        "rule": "given",
        "sampling": "poisson",
        "mask": None,
        "steps": 8,
        "clip_value": 0.02,
    }
    settings_ |= changes
    mask = settings_["mask"]
    k = d if mask is None else len(mask)  # type: ignore[arg-type]
    sampling = settings_["sampling"]
    relation = "add-remove" if sampling == "poisson" else "replace-one"
    plan = Plan(
        *(d, k, settings_["clip"], settings_["clip_value"], sampling, 6, len(y), settings_["steps"], 1),  # type: ignore[arg-type]
        *(0.5, relation, 1e-3, settings_["rule"]),  # type: ignore[arg-type]
    )
    return LocalTask(x, y, mask, 1.5, sampling, 6, settings_["steps"], 0.02, plan, KEY)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("clip", "rule", "sampling", "masked", "level"),
    list(
        itertools.product(
            ["coordinate", "l2"], ["given", "quantile"], ["poisson", "fixed"], [False, True], library.LEVELS
        )
    ),
)
def test_whole_training_agrees_with_the_reference(
    clip: str, rule: str, sampling: str, masked: bool, level: library.Level
) -> None:
    theta = FlatModel(small_net()).flatten()
    mask = torch.arange(0, len(theta), 7) if masked else None
    value = 0.02 if clip == "coordinate" else 0.5
    task = small_task(clip=clip, rule=rule, sampling=sampling, mask=mask, clip_value=value)
    ours = NativeEngine(small_net(), 1, level).train(theta, [task])[0]
    truth = ReferenceEngine(small_net()).train(theta, [task])[0]
    # Eight steps with noise: the same records and the same noise, or they would be apart by 1e-3 and more.
    assert float(truth.delta.abs().max()) > 5e-3
    assert float((ours.delta - truth.delta).abs().max()) < 2e-6
    assert ours.clip_value == pytest.approx(truth.clip_value, rel=1e-4 if rule == "quantile" else 0)


def test_fedavg_agrees_with_the_reference() -> None:
    theta = FlatModel(small_net()).flatten()
    private = small_task(steps=20)
    task = LocalTask(private.x, private.y, None, 1.0, "poisson", 6, 20, 0.1, None, KEY)
    ours = NativeEngine(small_net(), 1).train(theta, [task])[0]
    truth = ReferenceEngine(small_net()).train(theta, [task])[0]
    assert float((ours.delta - truth.delta).abs().max()) < 5e-6
    assert ours.clip_value == 0.0


def test_batches_larger_than_a_chunk_and_empty_ones() -> None:
    theta = FlatModel(small_net()).flatten()
    base = small_task()
    x, y = base.x.repeat(8, 1, 1, 1), base.y.repeat(8)
    for batch in (300, 1):  # nearly all of 320 records, or one: a third of those Poisson batches are empty
        plan = Plan(len(theta), len(theta), "l2", 0.5, "poisson", batch, len(y), 4, 1, 0.5, "add-remove", 1e-3)
        task = LocalTask(x, y, None, 1.0, "poisson", batch, 4, 0.05, plan, KEY)
        ours = NativeEngine(small_net(), 1).train(theta, [task])[0]
        truth = ReferenceEngine(small_net()).train(theta, [task])[0]
        assert float((ours.delta - truth.delta).abs().max()) < 2e-6


@pytest.mark.parametrize("level", library.LEVELS)
def test_the_thread_count_changes_no_bit(level: library.Level) -> None:
    theta = FlatModel(small_net()).flatten()
    base = small_task()
    tasks = [LocalTask(base.x[i:], base.y[i:], None, 1.0, "fixed", 6, 5, 0.05, None, bytes([i]) * 32) for i in range(7)]
    alone = [NativeEngine(small_net(), 1, level).train(theta, [task])[0] for task in tasks]
    for threads in (1, 2, 5):
        together = NativeEngine(small_net(), threads, level).train(theta, tasks)
        assert all(same(a, b) for a, b in zip(alone, together))


@pytest.mark.parametrize("level", library.LEVELS)
def test_memory_of_earlier_agents_changes_no_bit(level: library.Level) -> None:
    """An engine's agents work in the same memory one after the other, whatever the one before left there."""
    theta = FlatModel(small_net()).flatten()
    mask = torch.arange(1, len(theta), 9)
    one = small_task(clip="l2", rule="quantile", mask=mask, steps=2)
    tasks = [
        *(small_task(steps=3), one, replace(one, plan=None), small_task(clip="l2"), small_task(steps=3)),
        *(replace(one, x=one.x * math.nan), one, replace(one, coordinates=None, plan=None), small_task(mask=mask)),
    ]
    alone = [NativeEngine(small_net(), 1, level).train(theta, [task])[0] for task in tasks]
    assert all(same(a, b) for a, b in zip(alone, NativeEngine(small_net(), 1, level).train(theta, tasks)))


@pytest.mark.parametrize("clip", ["coordinate", "l2"])
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 3e38])
def test_a_record_that_is_not_finite_counts_as_zero(clip: str, poison: float) -> None:
    theta = FlatModel(small_net()).flatten()
    base = small_task(clip=clip, sampling="fixed", steps=1)
    x = base.x[:6].clone()
    assert base.plan is not None
    plan = replace(base.plan, records=6)
    task = LocalTask(x, base.y[:6], None, 1.0, "fixed", 6, 1, 1000.0, plan, KEY)
    whole = NativeEngine(small_net(), 1).train(theta, [task])[0].delta
    x[2, 0, 4, 4] = poison
    without = NativeEngine(small_net(), 1).train(theta, [task])[0].delta
    assert torch.isfinite(without).all()
    assert not torch.equal(whole, without)
    keep = torch.tensor([0, 1, 3, 4, 5])
    model = FlatModel(small_net())
    rows = model.per_example_gradients()(theta, base.x[:6], base.y[:6])
    from fedspa.mechanism.clipping import clip_rows

    # What left the sum is the poisoned record's clipped gradient, and nothing else.
    gone = clip_rows(rows, plan.clip, plan.clip_value).sum(0) - clip_rows(rows[keep], plan.clip, plan.clip_value).sum(0)
    assert float(((without - whole) * 6 / 1000 - gone).abs().max()) < 1e-5 * plan.clip_value + 1e-6


def test_fedavg_shows_a_broken_record() -> None:
    base = small_task()
    x = base.x.clone()
    x[:, 0, 4, 4] = math.nan
    task = LocalTask(x, base.y, None, 1.0, "fixed", 6, 1, 0.1, None, KEY)
    assert NativeEngine(small_net(), 1).train(FlatModel(small_net()).flatten(), [task])[0].delta.isnan().all()


def test_no_example_can_weigh_more_than_the_bound() -> None:
    """The privacy claim itself: one record more or less moves the sum by at most the plan's clip norm."""
    theta = 30 * FlatModel(small_net()).flatten()  # gradients far above any bound
    base = small_task()
    for clip, value in (("coordinate", 0.013), ("l2", 0.37)):
        d = len(theta)
        plan = Plan(d, d, clip, value, "fixed", 1, 5, 1, 1, 1e-9, "replace-one", 1e-3)  # type: ignore[arg-type]
        for seed in range(5):
            task = LocalTask(base.x[:5], base.y[:5], None, 1.0, "fixed", 1, 1, 2.0**20, plan, bytes([seed]) * 32)
            gradient = NativeEngine(small_net(), 1).train(theta, [task])[0].delta.double() / 2.0**20
            assert 0 < float(gradient.norm()) <= plan.clip_norm * (1 + 1e-6)
            if clip == "coordinate":
                assert float(gradient.abs().max()) <= value * (1 + 1e-6)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A shell starts what it puts in the background with Ctrl-C ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_stops_agents_at_their_next_step() -> None:
    base = small_task()
    task = LocalTask(base.x, base.y, None, 1.0, "poisson", 6, 10**9, 0.0, None, KEY)  # days of work
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(0.3, lambda: signal.pthread_kill(main, signal.SIGINT))
    timer.start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        NativeEngine(small_net(), 2).train(FlatModel(small_net()).flatten(), [task] * 3)
    assert time.monotonic() - start < 10


def test_functional_layers_and_nesting_are_traced() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features = nn.Sequential(nn.Sequential(nn.Conv2d(1, 3, 3)), nn.Identity())
            self.head = nn.Linear(3 * 5 * 5, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = functional.max_pool2d(torch.relu(self.features(x)), 2)
            return self.head(torch.flatten(h, 1))

    module = Net()
    base = small_task()
    theta = FlatModel(module).flatten()
    task = LocalTask(base.x, base.y % 4, None, 1.0, "poisson", 6, 3, 0.1, None, KEY)
    ours = NativeEngine(module, 1).train(theta, [task])[0].delta
    assert float((ours - ReferenceEngine(module).train(theta, [task])[0].delta).abs().max()) < 1e-6


@pytest.mark.parametrize(
    ("module", "word"),
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(144, 8), nn.Sigmoid(), nn.Linear(8, 2)), "Sigmoid"),
        (nn.Sequential(nn.Conv2d(1, 4, 3, dilation=2), nn.Flatten(), nn.Linear(256, 2)), "dilation"),
        (nn.Sequential(nn.MaxPool2d(2, ceil_mode=True), nn.Flatten(), nn.Linear(36, 2)), "ceil_mode"),
        (nn.Sequential(nn.MaxPool2d(2, 1, padding=2), nn.Flatten(), nn.Linear(225, 2)), "half of its kernel"),
        (nn.Sequential(nn.AvgPool2d((4, 2), 1, (1, 2)), nn.Flatten(), nn.Linear(165, 2)), "half of its kernel"),
        (nn.Sequential(nn.MaxPool2d(2, 1, padding=-1), nn.Flatten(), nn.Linear(81, 2)), "negative"),
        (nn.Sequential(nn.Conv2d(1, 2, 3, padding=(0, -1)), nn.Flatten(), nn.Linear(160, 2)), "negative padding"),
        (nn.Sequential(nn.Flatten(), nn.Linear(100, 2)), "does not fit"),
        (nn.Sequential(nn.Conv2d(1, 2, 3)), "score"),
        (nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(144, 2)), "buffers"),
    ],
)
def test_what_it_cannot_do_is_said(module: nn.Module, word: str) -> None:
    assert word in (supports(module, (1, 12, 12)) or "")


@pytest.mark.parametrize("kind", [library.CONV, library.MAXPOOL, library.AVGPOOL])
@pytest.mark.parametrize("change", [{}, {"pad_h": 2}, {"pad_w": -1}, {"stride_h": 0}, {"kernel_w": 0}])
def test_the_library_itself_refuses_windows_outside_the_image(kind: int, change: dict[str, int]) -> None:
    loaded = library.library()
    assert loaded is not None
    window = {"kernel_h": 2, "kernel_w": 2, "stride_h": 1, "stride_w": 1, "pad_h": 1, "pad_w": 1} | change
    first = library.Layer(kind=kind, outputs=1, weight_offset=0, bias_offset=-1, **window)
    last = library.Layer(kind=library.LINEAR, outputs=2, weight_offset=4, bias_offset=-1)
    net = loaded.fedspa_net_new((library.Layer * 2)(first, last), 2, (c_int64 * 3)(1, 6, 6), 1000, 0)
    fits = not change or (kind == library.CONV and "pad_h" in change)  # a convolution may look at padding only
    assert (net is not None) == fits
    loaded.fedspa_net_free(net)


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the instructions looked for are those of x86")
def test_products_and_sums_stay_apart_at_the_plain_level(tmp_path: Path) -> None:
    """As on a CPU whose compilers fuse them without being asked."""
    source, made = Path(library.__file__).with_name("csrc") / "level_plain.c", tmp_path / "plain.s"
    subprocess.run(["cc", "-std=gnu11", "-O2", "-Wno-psabi", "-mfma", "-S", "-o", made, source], check=True)
    text = made.read_text()
    assert "vmulps" in text
    assert "vfmadd" not in text


def test_shared_and_frozen_parameters_are_left_to_other_engines() -> None:
    layer = nn.Linear(6, 6)
    assert "twice" in (supports(nn.Sequential(layer, nn.ReLU(), layer), (6,)) or "")
    frozen = nn.Sequential(nn.Linear(6, 2))
    frozen[0].bias.requires_grad_(False)
    assert "frozen" in (supports(frozen, (6,)) or "")


def test_wrong_labels_masks_and_modes_are_refused() -> None:
    theta = FlatModel(small_net()).flatten()
    task = small_task()
    engine = NativeEngine(small_net(), 2)
    make = lambda **c: LocalTask(**{name: getattr(task, name) for name in LocalTask.__slots__} | c)  # noqa: E731
    with pytest.raises(DataError, match="label"):
        engine.train(theta, [make(y=task.y + 3)])
    with pytest.raises(PrivacyError, match="must agree"):
        engine.train(theta, [make(coordinates=torch.arange(5))])
    with pytest.raises(PrivacyError, match="without replacement"):
        engine.train(theta, [make(sampling="fixed", batch=99)])
    with pytest.raises(ConfigError, match="exact"):
        engine.train(theta, [make(exact=True)])
    with pytest.raises(ConfigError, match="coordinates outside"):
        engine.train(theta, [make(coordinates=torch.tensor([len(theta)]), plan=None)])
    for coordinates in ([3, 2], [1, 1]):
        with pytest.raises(ConfigError, match="do not increase"):
            engine.train(theta, [make(coordinates=torch.tensor(coordinates), plan=None)])
    with pytest.raises(DataError, match="one each"):
        engine.train(theta, [make(x=task.x[:-1])])
