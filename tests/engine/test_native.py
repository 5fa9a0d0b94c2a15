"""The native engine against the float64 reference: random nets, batches, clippings, masks and samplers."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from native_nets import KEY, gradient_scale, nets, records, small_net, small_task
from plain import plain
from torch import nn

from fedspa.engine.local import LocalTask
from fedspa.engine.native import NativeEngine, library
from fedspa.engine.per_example import float64_reference
from fedspa.learning.flat import FlatModel
from fedspa.mechanisms.base import CLIP_UNITS, Clipping
from fedspa.mechanisms.clipping import clip_rows
from fedspa.mechanisms.gaussian.plan import GaussianPlan

pytestmark = pytest.mark.skipif(library.library() is None, reason="the native engine was not built")


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
    plan: Any = plain(sampling, batch, 1)  # type: ignore[arg-type]
    if clip is not None:
        relation = "add-remove" if sampling == "poisson" else "replace-one"
        plan = GaussianPlan(d, k, clip, bound, sampling, batch, len(y), 1, 1, 0.01, relation, 1e-3)  # type: ignore[arg-type]
    # A step so large that θ's own float32 rounding is small beside it: Δ over the step is then −(sum + noise).
    size = 2.0**12
    task = LocalTask(x, y, mask, 1.0, size * batch, plan, seed.to_bytes(32, "big"))  # type: ignore[arg-type]
    ours = NativeEngine(module, 1, level).train(theta, [task])[0].delta.double() / size
    truth = float64_reference(module).train(theta, [task])[0].delta.double() / size
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
    plan = GaussianPlan(21, 21, clip, 1e-3, "fixed", 20, 20, 1, 1, 1e-3, "replace-one", 1e-3)
    task = LocalTask(x, y, None, 1.0, 20 * 2.0**12, plan, KEY)
    theta = torch.zeros(21)
    ours = NativeEngine(module, 1, level).train(theta, [task])[0].delta.double()
    truth = float64_reference(module).train(theta, [task])[0].delta
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
    rows = [clip_rows(row, clip, bound) for row in float64_reference(module).rows(theta.double(), x, y, None)]
    truth = torch.stack(rows).sum((0, 1)) if rows else torch.zeros(len(theta))
    assert zeroed == 0
    assert float((units * (bound / CLIP_UNITS) - truth).abs().max()) <= 1e-5 * bound + 1e-6 * float(truth.abs().max())


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
    plan = (
        GaussianPlan(d, k, clip, bound, "fixed", 9, 9, 1, 1, 1e-3, "replace-one", 1e-3)
        if clip
        else plain("fixed", 9, 1)
    )
    task = LocalTask(x, y, mask, 1.0, 9 * 2.0**12, plan, KEY)
    ours = NativeEngine(module, 1, level).train(theta, [task])[0].delta.double()
    truth = float64_reference(module).train(theta, [task])[0].delta
    assert float((ours - truth).abs().max()) / 2.0**12 < 1e-5 * bound + 1e-6 * float(truth.abs().max()) / 2.0**12


@pytest.mark.parametrize(
    ("clip", "sampling", "masked", "level"),
    list(itertools.product(["coordinate", "l2"], ["poisson", "fixed"], [False, True], library.LEVELS)),
)
def test_whole_training_agrees_with_the_reference(clip: str, sampling: str, masked: bool, level: library.Level) -> None:
    theta = FlatModel(small_net()).flatten()
    mask = torch.arange(0, len(theta), 7) if masked else None
    value = 0.02 if clip == "coordinate" else 0.5
    task = small_task(clip=clip, sampling=sampling, mask=mask, clip_value=value)
    ours = NativeEngine(small_net(), 1, level).train(theta, [task])[0]
    truth = float64_reference(small_net()).train(theta, [task])[0]
    # Eight steps with noise: the same records and the same noise, or they would be apart by 1e-3 and more.
    assert float(truth.delta.abs().max()) > 5e-3
    assert float((ours.delta - truth.delta).abs().max()) < 2e-6


def test_batches_larger_than_a_chunk_and_empty_ones() -> None:
    theta = FlatModel(small_net()).flatten()
    base = small_task()
    x, y = base.x.repeat(8, 1, 1, 1), base.y.repeat(8)
    for batch in (300, 1):  # nearly all of 320 records, or one: a third of those Poisson batches are empty
        plan = GaussianPlan(len(theta), len(theta), "l2", 0.5, "poisson", batch, len(y), 4, 1, 0.5, "add-remove", 1e-3)
        task = LocalTask(x, y, None, 1.0, 0.05, plan, KEY)
        ours = NativeEngine(small_net(), 1).train(theta, [task])[0]
        truth = float64_reference(small_net()).train(theta, [task])[0]
        assert float((ours.delta - truth.delta).abs().max()) < 2e-6
