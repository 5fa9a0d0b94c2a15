"""The traced engine's stacks: by the kernels' twins on a CPU, always; by the kernels, where there is a GPU.

Noise is so small here that a stack's, which is ChaCha20's, and `local_steps`' do not tell the two apart.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import gpu_twins
import pytest
import torch
from chacha import ChaChaNoise
from torch import Tensor, nn
from torch.nn import functional

from fedspa.engine.local import LocalTask
from fedspa.engine.traced import gpu_rounds, gpu_stack, ops
from fedspa.engine.traced.engine import TracedEngine
from fedspa.engine.traced.gpu_rounds import Rounds
from fedspa.engine.traced.gpu_stack import Shape
from fedspa.engine.traced.program import Layer, Program, trace
from fedspa.errors import ConfigError, PrivacyError
from fedspa.examples import Examples
from fedspa.learning.flat import FlatModel
from fedspa.mechanisms.clipping import CLIP_MARGIN
from fedspa.mechanisms.gaussian.plan import GaussianPlan

# Without a GPU a stack's work is done by the kernels' twins.
_KERNELS = gpu_stack.work_on


def work_on(held: gpu_stack.RoundBuffers, shape: Shape) -> Any:
    return (gpu_twins.Twins if held.theta.device.type == "cpu" else _KERNELS)(held, shape)


@pytest.fixture(autouse=True)
def twins_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_stack, "work_on", work_on)


DEVICES = [
    torch.device("cpu"),
    pytest.param(torch.device("cuda"), marks=pytest.mark.gpu),
]
RECORDS, BATCH, CLIP = 24, 6, 0.5


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.second = nn.Conv2d(4, 4, 3, padding=1, stride=1, bias=False)
        self.head = nn.Linear(4 * 36, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x + torch.relu(self.norm(self.second(x)))
        return self.head(x.flatten(1))  # type: ignore[no-any-return]


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.words(x)).mean(1))  # type: ignore[no-any-return]


NETS: dict[str, tuple[Any, Any]] = {
    "residual": (Residual, lambda n, g: torch.randn(n, 1, 6, 6, generator=g)),
    "words": (Words, lambda n, g: torch.randint(0, 11, (n, 5), generator=g)),
}


def task(net: str, seed: int, d: int, *, clip: Any, share: float, steps: int, noise: float) -> LocalTask:
    generator = torch.Generator().manual_seed(seed)
    x, y = NETS[net][1](RECORDS, generator), torch.randint(0, 3, (RECORDS,), generator=generator)
    k = round(share * d)
    mask = torch.randperm(d, generator=generator)[:k].sort().values if k < d else None
    value = CLIP if clip == "l2" else CLIP / 10
    plan = GaussianPlan(d, k, clip, value, "poisson", BATCH, RECORDS, steps, 1, noise, "add-remove", 1e-4)
    return LocalTask(x, y, mask, 2.0, 0.3, plan, bytes([seed]) * 32)


def model_of(net: str, device: torch.device) -> tuple[nn.Module, Tensor, Examples]:
    torch.manual_seed(0)
    module = NETS[net][0]().to(device)
    generator = torch.Generator().manual_seed(9)
    like = Examples(NETS[net][1](1, generator), torch.zeros(1, dtype=torch.int64))
    return module, FlatModel(module).flatten(), like


def rounds_of(engine: TracedEngine, like: Examples, d: int, device: torch.device) -> Rounds:
    return Rounds(engine._trace_agents, like, d, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize(("clip", "share"), [("l2", 0.3), ("l2", 1.0), ("coordinate", 0.3)])
def test_a_stack_does_what_local_steps_do(
    device: torch.device, net: str, clip: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, theta, like = model_of(net, device)
    engine = TracedEngine(module, like, device=device)
    alone = TracedEngine(module.to("cpu"), like)
    module.to(device)
    made = [task(net, seed, len(theta), clip=clip, share=share, steps=3, noise=1e-9) for seed in range(1, 4)]
    expected = alone.train(theta.cpu(), made)
    # A byte leaves room for the smallest block only; the last is a step of more places than are added plainly.
    for budget, plain in ((gpu_rounds.AGENT_BUDGET, gpu_stack.PLAIN), (1, gpu_stack.PLAIN), (2**30, 3)):
        monkeypatch.setattr(gpu_rounds, "AGENT_BUDGET", budget)
        monkeypatch.setattr(gpu_stack, "PLAIN", plain)
        monkeypatch.setattr(gpu_stack, "SPAN", 2)
        found = rounds_of(engine, like, len(theta), device).train(theta, [engine._moved(each) for each in made])
        for one, other in zip(found, expected):
            near = 1e-5 if device.type == "cpu" else 1e-4
            torch.testing.assert_close(one.delta.cpu(), other.delta, rtol=1e-3, atol=near)
            assert one.zeroed == other.zeroed == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("net", NETS)
def test_what_cannot_be_read_adds_nothing_and_costs_nobody_else(device: torch.device, net: str) -> None:
    module, theta, like = model_of(net, device)
    engine = TracedEngine(module, like, device=device)
    good = task(net, 1, len(theta), clip="l2", share=0.5, steps=2, noise=1e-9)
    bad_x, bad_y = good.x.clone(), good.y.clone()  # type: ignore[union-attr]
    bad_x[3], bad_y[5] = (torch.nan if bad_x.is_floating_point() else 10**6), 77
    bad = dataclasses.replace(good, x=bad_x, y=bad_y)
    rounds = rounds_of(engine, like, len(theta), device)
    found, again = (rounds.train(theta, [engine._moved(each)])[0] for each in (bad, bad))
    assert torch.equal(found.delta, again.delta)
    assert torch.isfinite(found.delta).all()
    drawn = gpu_rounds.Draws(bad).whole().records
    assert found.zeroed == sum(int((drawn == number).sum()) for number in (3, 5))
    assert found.zeroed > 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("net", NETS)
def test_an_empty_place_moves_the_sum_by_that_record_and_no_other(device: torch.device, net: str) -> None:
    """To the bit: what an empty place leaves of the sum is the sum of the others, in their places."""
    module, theta, like = model_of(net, device)
    engine = TracedEngine(module, like, device=device)
    made = task(net, 2, len(theta), clip="l2", share=1.0, steps=1, noise=1e-9)
    made = dataclasses.replace(made, max_records=RECORDS)
    rounds = rounds_of(engine, like, len(theta), device)
    batch = gpu_rounds.Draws(made).whole()
    whole = rounds.train(theta, [engine._moved(made)])[0].delta.double()
    assert batch.sizes[0] > 2
    scale = 2.0 * 0.3 / BATCH
    for number in batch.records[:3].tolist():
        x = made.x.clone()  # type: ignore[union-attr]
        x[number] = torch.nan if x.is_floating_point() else -1
        rest = rounds.train(theta, [engine._moved(dataclasses.replace(made, x=x))])[0].delta.double()
        moved = (whole - rest).norm().item() / scale
        assert moved <= CLIP * (1 + 1e-5) + 1e-5


def test_a_round_with_smaller_batches_takes_the_stack_that_is_kept() -> None:
    module, theta, like = model_of("words", torch.device("cpu"))
    engine = TracedEngine(module, like)
    rounds = rounds_of(engine, like, len(theta), torch.device("cpu"))
    made = [task("words", seed, len(theta), clip="l2", share=1.0, steps=1, noise=1.0) for seed in range(1, 9)]
    made.sort(key=lambda each: -gpu_rounds.Draws(each).whole().largest)
    assert len({-(-gpu_rounds.Draws(each).whole().largest // 4) for each in made}) > 1
    for each in made:
        rounds.train(theta, [each])
    assert len(rounds._stacks) == 1


@pytest.mark.parametrize("dimension", [10, 5_000, 50_000, 3_000_000, 10_000_000])
@pytest.mark.parametrize("places", [0, 4, 700, 70_000])
def test_no_block_of_a_stack_has_more_lines_than_a_grid_takes(dimension: int, places: int) -> None:
    rounds = Rounds(pytest.fail, Examples(torch.zeros(1), torch.zeros(1)), dimension, torch.device("cpu"))
    block = min(rounds._block(), max(places, 4))
    assert 1 <= rounds._at_once(places) * block <= 65_535
    assert rounds._block() % 4 == 0


def test_a_batch_whose_whole_numbers_could_overflow_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module, theta, like = model_of("words", torch.device("cpu"))
    engine = TracedEngine(module, like)
    made = task("words", 1, len(theta), clip="l2", share=1.0, steps=1, noise=1.0)
    assert gpu_rounds.MOST_PLACES * gpu_stack.UNITS < 2**63
    assert 2 * 2.0**-53 * gpu_rounds.MOST_PLACES * gpu_stack.SPAN + 2 * 2.0**-24 < CLIP_MARGIN
    monkeypatch.setattr(gpu_rounds, "MOST_PLACES", gpu_rounds.Draws(made).whole().largest - 1)
    with pytest.raises(PrivacyError, match="places"):
        rounds_of(engine, like, len(theta), torch.device("cpu")).train(theta, [made])


@pytest.mark.parametrize(
    ("spoiled", "why"),
    [
        (lambda mask: torch.cat([mask[:1], mask[:-1]]), "do not increase"),
        (lambda mask: mask.flip(0), "do not increase"),
        (lambda mask: mask + 10**6, "outside"),
        (lambda mask: mask - 10**6, "outside"),
    ],
)
def test_a_mask_that_would_release_a_coordinate_twice_or_none_is_refused(spoiled: Any, why: str) -> None:
    module, theta, like = model_of("words", torch.device("cpu"))
    made = task("words", 1, len(theta), clip="l2", share=0.3, steps=1, noise=1.0)
    assert made.coordinates is not None
    bad = dataclasses.replace(made, coordinates=spoiled(made.coordinates))
    with pytest.raises(ConfigError, match=why):
        TracedEngine(module, like).train(theta, [bad])


def test_noise_of_a_stack_is_the_stream_s() -> None:
    key = bytes(range(32))
    keys = torch.frombuffer(bytearray(key), dtype=torch.int32).view(1, 8)
    stream = ChaChaNoise(key)
    stream.start_step(3)
    found = gpu_twins.noise(keys, 3, 700)[0]
    assert torch.equal(found, torch.from_numpy(stream.gaussian(700)))


class Layers(nn.Module):
    """What a trace for a GPU keeps whole: convolutions of all kinds, pooling, attention, linear layers, a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 16, 3, padding=1)
        self.second = nn.Conv2d(16, 32, 3, stride=2, padding="valid")
        self.grouped = nn.Conv2d(32, 8, (3, 1), padding=(1, 0), dilation=(1, 1), groups=4, bias=False)
        self.mixed = nn.Linear(8, 24, bias=False)
        self.head = nn.Linear(8 * 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(torch.relu(self.first(x)), 3, 2, 1)
        x = self.grouped(torch.relu(self.second(x))).flatten(2).transpose(1, 2)
        q, k, v = (each.unflatten(2, (2, 4)).transpose(1, 2) for each in self.mixed(x).chunk(3, 2))
        x = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.head(x.flatten(1))  # type: ignore[no-any-return]


NETS["layers"] = Layers, lambda n, g: torch.randn(n, 1, 10, 10, generator=g)


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("agents", [1, 3])
@pytest.mark.parametrize("share", [0.3, 1.0])
def test_layers_that_are_kept_whole_have_the_gradients_of_torch_s_own(net: str, agents: int, share: float) -> None:
    """By their twins, from a trace as a GPU has it; the kernels are held to `local_steps` above."""
    module, theta, like = model_of(net, torch.device("cpu"))
    engine = TracedEngine(module, like)

    def traced_for_a_gpu(agents: int | None) -> Program:
        return trace(engine._model, engine._modes, like, gpu_stack.keep, agents, factors=True, layers=True)

    made = [task(net, seed, len(theta), clip="l2", share=share, steps=2, noise=1e-9) for seed in range(3)]
    rounds = Rounds(traced_for_a_gpu, like, len(theta), torch.device("cpu"))
    for one, other in zip(rounds.train(theta, made[:agents]), engine.train(theta, made)):
        torch.testing.assert_close(one.delta, other.delta, rtol=1e-4, atol=1e-6)
        assert one.zeroed == other.zeroed == 0


@pytest.mark.parametrize("agents", [1, 2])
def test_operators_on_lines_have_the_derivatives_of_torch_s_own(agents: int) -> None:
    g = torch.Generator().manual_seed(0)
    x, weight = torch.randn(4, 4, 9, 8, generator=g), torch.randn(agents, 6, 2, 3, 2, generator=g)
    window = (2, 1, 1, 0, 1, 2, 2)
    rest = {"stride": (2, 1), "padding": (1, 0), "dilation": (1, 2), "groups": 2}
    leaves = [each.double().requires_grad_() for each in (x, weight.repeat_interleave(4 // agents, 0))]
    out = torch.cat([functional.conv2d(one[None], own, None, **rest) for one, own in zip(*leaves)])  # type: ignore[arg-type]
    delta = torch.randn(out.shape, generator=g)
    (out * delta).sum().backward()
    wide = x.double(), weight.double(), delta.double()
    torch.testing.assert_close(ops.convolved(*wide[:2], None, window), out)
    torch.testing.assert_close(ops.convolved_back(wide[2], wide[1], (9, 8), window), leaves[0].grad)
    torch.testing.assert_close(ops.convolved_weights(wide[2], wide[0], (3, 2), window), leaves[1].grad)


@pytest.mark.gpu
@pytest.mark.parametrize("clip", ["l2", "coordinate"])
def test_kernels_and_twins_agree_on_rows(clip: Any) -> None:
    """Rows with NaN, infinities, values whose squares vanish or overflow, and empty places."""
    generator = torch.Generator().manual_seed(0)
    agents, examples, k = 3, 24, 1300
    shape = Shape(agents, examples, 40, 1, 4000, k, True, clip, 1312)
    layers = [Layer(torch.randperm(4000, generator=generator), (4000,))]
    masks = [torch.randperm(4000, generator=generator)[:k].sort().values for _ in range(agents)]
    rows = torch.randn(agents, examples, 1312, generator=generator)
    rows[:, 1] *= 1e-30
    rows[:, 2] *= 1e30
    rows[1, 4, 7], rows[2, 5, 9] = torch.nan, torch.inf
    index = torch.randint(-1, 40, (1, agents, examples), generator=generator)
    readable = torch.rand(agents, examples, generator=generator) < 0.9
    found = []
    for device in (torch.device("cpu"), torch.device("cuda")):
        held = gpu_stack.RoundBuffers(shape, device)
        held.clips.fill_(0.7)
        held.index.copy_(index)
        held.counts.fill_(examples - 2)
        columns = gpu_stack.Columns(layers, shape, device)
        columns.load([mask.to(device) for mask in masks])
        work = work_on(held, shape)
        factors = work.weigh(columns, rows.to(device), [], readable.to(device), 0)
        work.add(columns, rows.to(device), factors, more=False)
        found.append([each.cpu() for each in (factors, held.zeroed, held.sums)])
    for one, other in zip(*found):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
