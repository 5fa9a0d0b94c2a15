"""The stacked back end on a CPU: rules against the float64 reference on random nets, batches, refusals, ChaCha20."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from plain import plain, unprotected
from torch import nn

from fedspa.engine.local import Gradients
from fedspa.engine.per_example import PerExampleEngine, float64_reference
from fedspa.engine.stacked import StackedEngine, device_obstacle, supports
from fedspa.engine.stacked.buffers import Draws, Shape, room
from fedspa.engine.stacked.chacha import GROUP, ChaChaNoise, block_words
from fedspa.engine.stacked.engine import LayerGradients
from fedspa.engine.stacked.layers import describe, fuse
from fedspa.engine.stacked.layers.base import Activation, Pool
from fedspa.engine.stacked.layers.weighted import Weighted
from fedspa.engine.task import LocalTask
from fedspa.errors import ConfigError, DataError, PrivacyError
from fedspa.learning.flat import FlatModel
from fedspa.mechanisms.clipping import clip_rows
from fedspa.mechanisms.gaussian.plan import GaussianPlan
from fedspa.randomness.mask import active_coordinates
from fedspa.randomness.sampling import draw_batch
from fedspa.randomness.streams import Stream, derive_key

CLASSES, WORDS = 3, 6


@st.composite
def norms(draw: st.DrawFn, shape: tuple[int, ...]) -> list[nn.Module]:
    """A norm layer for inputs of this shape, or none. Its weight and bias are not those it starts with: 1 and 0 hide
    mistakes. A wide epsilon keeps the gradients of groups of few values within what float32 can hold to 1e-5."""
    if math.prod(shape) < 2 or draw(st.booleans()):
        return []
    groups = draw(st.sampled_from([g for g in range(1, shape[0] + 1) if shape[0] % g == 0 and math.prod(shape) > g]))
    affine = draw(st.booleans())
    kinds: list[nn.Module] = [nn.LayerNorm(shape, eps=0.1, elementwise_affine=affine, bias=draw(st.booleans()))]
    if len(shape) == 1:
        kinds.append(nn.GroupNorm(groups, shape[0], eps=0.1, affine=affine))
    else:
        kinds.append(nn.LayerNorm(shape[-1:], eps=0.1, elementwise_affine=affine))
        kinds.append(nn.GroupNorm(groups, shape[0], eps=0.1, affine=affine))
    chosen = draw(st.sampled_from(kinds))
    for parameter in chosen.parameters():
        nn.init.normal_(parameter, mean=0.5)
    return [chosen]


@st.composite
def nets(draw: st.DrawFn, smooth: bool = True) -> tuple[nn.Sequential, tuple[int, ...]]:
    """A random net and the shape of its records; smooth nets have no kinks, so float32 and float64 branch alike."""
    torch.manual_seed(draw(st.integers(0, 10_000)))
    activations = [nn.Tanh] if smooth else [nn.Tanh, nn.ReLU]
    layers: list[nn.Module] = []
    kind = draw(st.sampled_from(["image", "image", "vector", "text"]))
    if kind == "image":
        shape: tuple[int, ...] = (draw(st.integers(1, 3)), draw(st.integers(5, 9)), draw(st.integers(5, 9)))
        start = shape
        for _ in range(draw(st.integers(1, 2))):
            channels, down, across = shape
            kernel = (draw(st.integers(1, min(3, down))), draw(st.integers(1, min(3, across))))
            stride, padding = (draw(st.integers(1, 2)), draw(st.integers(1, 2))), draw(st.integers(0, 1))
            layers.append(
                nn.Conv2d(channels, draw(st.integers(1, 4)), kernel, stride, padding, bias=draw(st.booleans()))
            )
            shape = tuple(nn.Sequential(*layers)(torch.zeros(1, *start)).shape[1:])
            layers += draw(norms(shape))
            layers.append(draw(st.sampled_from(activations))())
            if min(shape[1:]) >= 2 and draw(st.booleans()):
                pools = [nn.AvgPool2d(2), nn.AvgPool2d(2, 1, 1, count_include_pad=draw(st.booleans()))]
                layers.append(draw(st.sampled_from(pools if smooth else [*pools, nn.MaxPool2d(2), nn.MaxPool2d(2, 1)])))
                shape = tuple(nn.Sequential(*layers)(torch.zeros(1, *start)).shape[1:])
        layers.append(nn.Flatten())
        width = math.prod(shape)
    elif kind == "text":
        start = (draw(st.integers(1, 5)),)
        shape = (*start, draw(st.integers(2, 4)))
        layers += [nn.Embedding(WORDS, shape[1]), *draw(norms(shape)), nn.Flatten()]
        width = math.prod(shape)
    else:
        width = draw(st.integers(1, 8))
        start = (width,)
    if draw(st.booleans()):
        hidden = draw(st.integers(2, 6))
        layers += [nn.Linear(width, hidden, bias=draw(st.booleans())), *draw(norms((hidden,)))]
        layers.append(draw(st.sampled_from(activations))())
        width = hidden
    layers.append(nn.Linear(width, CLASSES))
    split = draw(st.integers(0, len(layers)))
    return nn.Sequential(nn.Sequential(*layers[:split]), nn.Identity(), *layers[split:]), start


def records(net: nn.Module, count: int, shape: tuple[int, ...], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, *shape, generator=generator)
    if any(isinstance(layer, nn.Embedding) for layer in net.modules()):
        x = torch.randint(WORDS, (count, *shape), generator=generator)
    return x, torch.randint(CLASSES, (count,), generator=generator)


def make_task(net: nn.Module, shape: tuple[int, ...], active: int | None, clip: Any, **changes: Any) -> LocalTask:
    d = FlatModel(net).dimension
    k = d if active is None else min(active, d)
    sampling = changes.pop("sampling", "poisson")
    rule, seed = changes.pop("clip_rule", "given"), changes.pop("seed", 0)
    relation: Any = "add-remove" if sampling == "poisson" else "replace-one"
    x, y = records(net, 20, shape, seed)
    plan = (
        GaussianPlan(d, k, clip, 0.3, sampling, 5, 20, 4, 1, 1.0, relation, 1e-3, rule)
        if clip
        else plain(sampling, 5, 4)
    )
    omega = None if active is None else torch.from_numpy(active_coordinates(seed.to_bytes(16, "little"), d, k))
    task = LocalTask(x, y, omega, d / k, 0.1, plan, derive_key(bytes(32), "task", seed))
    return replace(task, **changes)


@settings(max_examples=60, deadline=None)
@given(
    made=nets(),
    batch=st.integers(0, 7),
    active=st.none() | st.integers(1, 50),
    clip=st.sampled_from(["coordinate", "l2"]),
    value=st.sampled_from([0.05, 0.2, 1.0]),
    seed=st.integers(0, 1000),
)
def test_clipped_sums_are_within_1e_5_of_the_clip_of_the_reference(
    made: tuple[nn.Sequential, tuple[int, ...]], batch: int, active: int | None, clip: Any, value: float, seed: int
) -> None:
    net, shape = made
    theta = FlatModel(net).flatten()
    x, y = records(net, batch, shape, seed)
    k = len(theta) if active is None else min(active, len(theta))
    omega = None if active is None else torch.from_numpy(active_coordinates(bytes(16), len(theta), k))
    got, wanted = torch.zeros(k, dtype=torch.float64), torch.zeros(k, dtype=torch.float64)
    for rows in LayerGradients(net).rows(theta, x, y, omega) if batch else ():
        got += clip_rows(rows, clip, value).sum(dim=0, dtype=torch.float64)
    for rows in float64_reference(net).rows(theta.double(), x, y, omega):
        wanted += clip_rows(rows, clip, value).sum(dim=0)
    assert float((got - wanted).abs().max()) <= max(1, batch) * 1e-5 * value


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("padding", [0, 1, (0, 2), (2, 1)])
def test_a_convolution_of_one_pixel_may_be_padded(stride: int, padding: Any) -> None:
    """Then it is no plain product: it has more outputs than one, or sees nothing but padding."""
    net = nn.Sequential(nn.Conv2d(2, 3, 1), nn.Tanh(), nn.Conv2d(3, 2, 1, stride, padding), nn.Flatten())
    net.append(nn.Linear(net(torch.zeros(1, 2, 1, 1)).shape[1], CLASSES))
    theta, (x, y) = FlatModel(net).flatten(), records(net, 6, (2, 1, 1), 0)
    got = torch.cat(list(LayerGradients(net).rows(theta, x, y, None)))
    wanted = torch.cat(list(float64_reference(net).rows(theta.double(), x, y, None)))
    assert torch.allclose(got.double(), wanted, atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(made=nets(smooth=False), seed=st.integers(0, 1000))
def test_rules_match_autograd_in_float64_kinks_included(made: tuple[nn.Sequential, tuple[int, ...]], seed: int) -> None:
    """In one precision both sides of a kink are the same side."""
    net, shape = made
    x, y = records(net, 4, shape, seed)
    theta = FlatModel(net).flatten().double()
    got = torch.cat(list(LayerGradients(net.double()).rows(theta, x.double() if x.is_floating_point() else x, y, None)))
    wanted = torch.cat(list(float64_reference(net).rows(theta, x, y, None)))
    assert torch.allclose(got, wanted, rtol=1e-9, atol=1e-12)


@settings(max_examples=40, deadline=None)
@given(
    made=nets(),
    active=st.none() | st.integers(1, 50),
    clip=st.sampled_from(["coordinate", "l2", None]),
    sampling=st.sampled_from(["poisson", "fixed"]),
    rule=st.sampled_from(["given", "quantile"]),
    seed=st.integers(0, 1000),
)
def test_a_whole_training_matches_the_reference(
    made: tuple[nn.Sequential, tuple[int, ...]], active: int | None, clip: Any, sampling: Any, rule: Any, seed: int
) -> None:
    """Same key, same batches, same noise: only float32's rounding differs.

    The quantile of coordinates counts those that are not zero. Some gradients vanish in exact arithmetic (before a
    normalisation, say) and are zero or a last bit as rounding has it: no precision can know which, so that rule is
    tried under `l2` here, and under `coordinate` on a net without such gradients below.
    """
    net, shape = made
    assume(not (clip == "coordinate" and rule == "quantile"))
    task = make_task(net, shape, active, clip, sampling=sampling, clip_rule=rule, seed=seed)
    theta = FlatModel(net).flatten()
    got = StackedEngine(net, "cpu", tf32=True).train(theta, [task])[0]
    wanted = float64_reference(net).train(theta, [task])[0]
    assert torch.allclose(got.delta.double(), wanted.delta, rtol=1e-4, atol=1e-4 * float(wanted.delta.abs().max()))
    assert got.clip_value == pytest.approx(wanted.clip_value, rel=1e-5)


def small_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 3, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(12, 5), nn.Tanh()),
        nn.Linear(5, CLASSES),
    )


def test_records_among_those_of_others_are_the_same_records() -> None:
    """Kernels know of no record numbers: what is not the agent's must be gone before them."""
    net = small_net()
    task = make_task(net, (1, 7, 7), 20, "l2")
    numbers = torch.randperm(100, generator=torch.Generator().manual_seed(1))[: len(task.y)]
    x, y = torch.full((100, 1, 7, 7), math.nan), torch.full((100,), 99)
    x[numbers], y[numbers] = task.x.float(), task.y
    theta, engine = FlatModel(net).flatten(), StackedEngine(net, "cpu", tf32=False)
    scattered = replace(task, x=x, y=y, rows=numbers)
    assert torch.equal(engine.train(theta, [scattered])[0].delta, engine.train(theta, [task])[0].delta)


def test_devices_it_cannot_use_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_obstacle("cpu", exact=True) is None
    assert "exact" in str(device_obstacle("cuda", exact=True))
    assert "mps" in str(device_obstacle("mps", exact=False))
    monkeypatch.setattr("fedspa.engine.stacked.engine.find_spec", lambda name: None)
    assert "Triton" in str(device_obstacle("cuda", exact=False))
    with pytest.raises(ConfigError, match="Triton"):
        StackedEngine(small_net(), "cuda", tf32=True)


@settings(max_examples=30, deadline=None)
@given(
    sampling=st.sampled_from(["poisson", "fixed"]),
    count=st.integers(1, 40),
    share=st.floats(0.02, 1),
    steps=st.integers(1, 30),
    seed=st.integers(0, 1000),
)
def test_batches_in_advance_are_those_of_the_loop(
    sampling: Any, count: int, share: float, steps: int, seed: int
) -> None:
    batch = max(1, int(count * share))
    key = derive_key(bytes(32), seed)
    x, y = torch.zeros(count, 1), torch.zeros(count, dtype=torch.int64)
    made = Draws(LocalTask(x, y, None, 1.0, 0.1, plain(sampling, batch, steps), key)).whole()
    stream = Stream(derive_key(key, "sampling"))
    wanted = [draw_batch(sampling, batch, batch / count, count, stream) for _ in range(steps)]
    assert made.sizes.tolist() == [len(w) for w in wanted]
    assert made.records.tolist() == np.concatenate(wanted).tolist()
    table = made.table(made.largest + 2)
    for line, one in zip(table, wanted):
        assert line[: len(one)].tolist() == one.tolist()


@settings(max_examples=30, deadline=None)
@given(
    sampling=st.sampled_from(["poisson", "fixed"]),
    steps=st.integers(1, 20),
    lengths=st.lists(st.integers(1, 9), max_size=5),
    seed=st.integers(0, 1000),
)
def test_batches_by_stretches_are_those_drawn_at_once(sampling: Any, steps: int, lengths: list[int], seed: int) -> None:
    task = LocalTask(
        *(torch.zeros(40, 1), torch.zeros(40, dtype=torch.int64), None, 1.0, 0.1, plain(sampling, 6, steps)),
        derive_key(bytes(32), seed),
    )
    wanted, draws, first = Draws(task).whole(), Draws(task), 0
    for length in lengths:
        part = draws.stretch(length)
        assert part.sizes.tolist() == wanted.sizes[first : first + length].tolist()
        first = min(first + length, steps)
    whole = draws.whole()
    assert whole.sizes.tolist() == wanted.sizes.tolist()
    assert whole.records.tolist() == wanted.records.tolist()


@pytest.mark.parametrize(
    ("net", "shape", "word"),
    [
        (nn.Sequential(nn.Linear(4, 3), nn.Sigmoid()), (4,), "Sigmoid"),
        (nn.Sequential(nn.Conv2d(2, 2, 1, groups=2), nn.Flatten()), (2, 1, 3), "groups"),
        (nn.Sequential(nn.Conv2d(1, 1, 3, padding=1, padding_mode="reflect"), nn.Flatten()), (1, 3, 3), "zeros"),
        (nn.Sequential(nn.Linear(4, 3), nn.Flatten(0)), (4,), "Flatten"),
        (nn.Sequential(nn.Linear(5, 3)), (4,), "5 features"),
        (nn.Sequential(nn.Conv2d(1, 2, 3)), (1, 5, 5), "one score a class"),
        (nn.Sequential(nn.MaxPool2d(2, ceil_mode=True), nn.Flatten(), nn.Linear(4, 3)), (1, 3, 3), "ceil_mode"),
        (nn.TransformerEncoderLayer(4, 1), (4,), "trace"),
        (nn.Sequential(nn.Conv2d(1, 2, 5)), (1, 3, 3), "does not fit"),
        (nn.Sequential(nn.GroupNorm(1, 3), nn.Linear(4, 3)), (4,), "3 channels"),
        (nn.Sequential(nn.LayerNorm(3), nn.Linear(4, 3)), (4,), "(3,)"),
        (nn.Sequential(nn.Embedding(4, 2, padding_idx=0), nn.Flatten(), nn.Linear(4, 3)), (2,), "padding_idx"),
        (nn.Sequential(nn.Tanh(), nn.Embedding(4, 2), nn.Flatten(), nn.Linear(4, 3)), (2,), "first layer"),
    ],
)
def test_what_has_no_rule_is_refused_by_name(net: nn.Module, shape: tuple[int, ...], word: str) -> None:
    why = supports(net, shape)
    assert why is not None
    assert word in why.reason


def test_bad_tasks_are_refused() -> None:
    net = small_net()
    theta = FlatModel(net).flatten()
    engine = StackedEngine(net, "cpu", tf32=False)
    task = make_task(net, (1, 7, 7), 20, "l2")
    assert task.coordinates is not None
    with pytest.raises(DataError, match="label"):
        engine.train(theta, [unprotected(replace(task, y=task.y + 1))])
    with pytest.raises(PrivacyError, match="k = 20"):
        engine.train(theta, [replace(task, coordinates=task.coordinates[:-1])])
    with pytest.raises(ConfigError, match="outside"):
        engine.train(theta, [replace(task, coordinates=task.coordinates + len(theta))])
    for wrong in (task.coordinates.flip(0), task.coordinates[[0, *range(19)]]):
        with pytest.raises(ConfigError, match="do not increase"):
            engine.train(theta, [task, replace(task, coordinates=wrong)])
    with pytest.raises(ConfigError, match="theta has"):
        engine.train(theta[1:], [task])


def test_tokens_that_are_no_words_are_refused() -> None:
    net = nn.Sequential(nn.Embedding(4, 2), nn.Flatten(), nn.Linear(4, CLASSES))
    theta, y = FlatModel(net).flatten(), torch.zeros(2, dtype=torch.int64)
    for bad in (-1, 4):
        x = torch.tensor([[0, 3], [1, bad]])
        task = LocalTask(x, y, None, 1.0, 0.1, plain("poisson", 1, 1), bytes(32))
        with pytest.raises(DataError, match="token"):
            StackedEngine(net, "cpu", tf32=False).train(theta, [task])


class Tokens(nn.Module):
    """As a run needs it: records are float32, so the model makes them whole numbers itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(WORDS, 3), nn.Linear(6, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.out(self.embedding(x.long()).flatten(1))
        return logits


def test_it_hands_out_each_examples_gradient() -> None:
    """For algorithms that clip and code gradients themselves."""
    net = small_net()
    engine, theta = StackedEngine(net, "cpu", tf32=False), FlatModel(net).flatten()
    assert isinstance(engine, Gradients)
    x, y = records(net, 5, (1, 7, 7), 0)
    wanted = PerExampleEngine(net)
    assert torch.allclose(
        torch.cat(list(engine.rows(theta, x, y, None))), torch.cat(list(wanted.rows(theta, x, y, None))), atol=1e-6
    )
    assert torch.equal(engine.mean(theta, x, y), wanted.mean(theta, x, y))


def test_a_stack_has_room_for_larger_batches() -> None:
    """A rebuilt stack costs seconds of compiling: what fits must be seen to fit."""
    shape = Shape(10, 22, 600, 300, 100, 5, masked=True, clip="l2", quantile=False)
    built = shape.with_room()
    assert (built.capacity, built.records) == (32, 608)
    for capacity in (0, 22, 23, 32):
        assert built.covers(replace(shape, capacity=capacity))
    assert not built.covers(replace(shape, capacity=33))
    assert not built.covers(replace(shape, active=6))
    assert built.covers(replace(shape, records=608, steps=299))
    assert not built.covers(replace(shape, steps=301))
    assert all(room(batch) >= batch and room(batch) % 16 == 0 for batch in range(300))


def test_layers_are_fused_where_one_kernel_can_run_them() -> None:
    net = nn.Sequential(
        *(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 2), nn.Tanh(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(16, 3), nn.ReLU()),
    )
    units = fuse(describe(net, (1, 12, 12)))
    assert [type(unit) for unit in units] == [Weighted, Weighted, Pool, Weighted, Activation]
    first, second, third = (unit for unit in units if isinstance(unit, Weighted))
    assert [unit.pooled for unit in (first, second, third)] == [True, False, False]
    kinds = [unit.activation and unit.activation.kind for unit in (first, second, third)]
    assert kinds == ["relu", "tanh", None]
    assert (first.outputs, first.positions) == (4 * 5 * 5, 100)


def test_chacha_gives_rfc_8439s_block() -> None:
    """RFC 8439, section 2.3.2."""
    nonce = (0x09000000, 0x4A000000, 0x00000000)
    words = block_words(bytes(range(32)), np.array([1, 7], dtype=np.uint32), nonce)
    wanted = (
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"
    )
    assert words[:, 0].astype("<u4").tobytes().hex() == wanted
    assert not np.array_equal(words[:, 0], words[:, 1])


def test_chacha_noise_is_standard_normal_and_never_repeats() -> None:
    """A fixed key: the bounds are 4.5 standard errors, a false alarm would have had a chance of 3e-5."""
    noise = ChaChaNoise(derive_key(bytes(32), "chacha"))
    n = 200_000
    first, count = noise.gaussian(n), noise.gaussian(1)
    noise.start_step(1)
    second = noise.gaussian(n)
    both = np.concatenate([first, second])
    assert abs(both.mean()) < 4.5 / math.sqrt(2 * n)
    assert abs((both**2).mean() - 1) < 4.5 * math.sqrt(2 / (2 * n))
    assert abs((both**4).mean() - 3) < 4.5 * math.sqrt(96 / (2 * n))
    assert abs(np.mean(first * second)) < 4.5 / math.sqrt(n)
    assert abs(np.mean(first[1:] * first[:-1])) < 4.5 / math.sqrt(n)
    assert len(np.unique(both)) == 2 * n
    assert count[0] not in first
    noise.start_step(0)
    assert np.array_equal(noise.gaussian(GROUP + 3), first[: GROUP + 3])
