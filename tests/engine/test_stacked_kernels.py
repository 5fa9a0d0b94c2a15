"""The GPU half of the stacked back end: kernels against their torch twins, whole rounds against the reference.

Needs Triton and a CUDA device; skipped without.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu

from plain import plain  # noqa: E402
from test_stacked import WORDS, nets  # noqa: E402
from test_stacked import records as make_records  # noqa: E402

from fedspa.engine.stacked import kernels  # noqa: E402
from fedspa.engine.stacked import rounds as rounds_module  # noqa: E402
from fedspa.engine.stacked.buffers import Draws  # noqa: E402
from fedspa.engine.stacked.chacha import GROUP, LANES, ChaChaNoise  # noqa: E402
from fedspa.engine.stacked.engine import LayerGradients  # noqa: E402
from fedspa.engine.stacked.rounds import Rounds, careful_steps  # noqa: E402
from fedspa.engine.task import LocalResult, LocalTask  # noqa: E402
from fedspa.learning.flat import FlatModel  # noqa: E402
from fedspa.mechanisms.base import LARGEST_CLIP, SMALLEST_CLIP  # noqa: E402
from fedspa.mechanisms.gaussian.plan import (  # noqa: E402
    CLIP_QUANTILE,
    CLIP_RATE,
    GaussianPlan,
)
from fedspa.randomness.mask import active_coordinates  # noqa: E402
from fedspa.randomness.streams import derive_key  # noqa: E402

DEVICE = torch.device("cuda")
NETS: dict[str, tuple[tuple[int, ...], Any]] = {
    "mlp": ((6,), lambda: [nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4)]),
    "no bias": ((6,), lambda: [nn.Linear(6, 70, bias=False), nn.Tanh(), nn.Linear(70, 3, bias=False)]),
    "fused": (
        (2, 11, 9),
        lambda: [
            *(nn.Conv2d(2, 5, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(5, 7, 2), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 3)),
        ],
    ),
    "pooled twice": (
        (2, 10, 10),
        lambda: [
            *(
                nn.Conv2d(2, 3, 3, padding=1),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Tanh(),
                nn.Conv2d(3, 4, 2),
                nn.MaxPool2d(2),
            ),
            *(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(4, 3), nn.Tanh()),
        ],
    ),
    "by taps": (
        (16, 6, 7),
        lambda: [
            *(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, (2, 1)), nn.Tanh()),
            *(nn.Flatten(), nn.Linear(32 * 2 * 3, 3)),
        ],
    ),
    "norms": (
        (2, 9, 8),
        lambda: [
            *(nn.Conv2d(2, 6, 3), nn.GroupNorm(3, 6), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 4, 2), nn.Tanh()),
            *(nn.LayerNorm((4, 2, 2), bias=False), nn.Flatten(), nn.Linear(16, 18), nn.GroupNorm(2, 18, affine=False)),
            *(nn.Tanh(), nn.LayerNorm(18), nn.Linear(18, 3)),
        ],
    ),
    "text": (
        (5,),
        lambda: [nn.Embedding(WORDS, 17), nn.LayerNorm(17), nn.Flatten(), nn.Linear(85, 3)],
    ),
    "one pixel, padded": (
        (1, 5, 5),
        lambda: [
            *(nn.Conv2d(1, 2, 1, stride=2), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(2, 2, 1, padding=1), nn.Tanh()),
            *(nn.Flatten(), nn.Linear(18, 3)),
        ],
    ),
    "one pixel, padded and strided": (
        (2, 1, 1),
        lambda: [nn.Conv2d(2, 4, 1), nn.Tanh(), nn.Conv2d(4, 3, 1, stride=2, padding=(1, 2)), nn.Flatten()],
    ),
    "strided, padded": (
        (3, 9, 8),
        lambda: [
            *(nn.Conv2d(3, 4, (3, 2), stride=(2, 1), padding=(1, 0)), nn.Tanh(), nn.AvgPool2d(2, stride=1)),
            *(nn.Conv2d(4, 18, 3, stride=2, padding=1), nn.Tanh(), nn.MaxPool2d(2, 1), nn.Flatten()),
            *(nn.Linear(18 * 1 * 2, 5), nn.Tanh(), nn.Linear(5, 4)),
        ],
    ),
}


def make_net(name: str) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(*NETS[name][1]())


def make_tasks(name: str, net: nn.Module, count: int, clip: Any, active: int | None, rule: Any) -> list[LocalTask]:
    d = FlatModel(net).dimension
    k = d if active is None else min(active, d)
    tasks = []
    for w in range(count):
        records = 12 + w
        x, y = (part.to(DEVICE) for part in make_records(net, records, NETS[name][0], w))
        omega = None if active is None else torch.from_numpy(active_coordinates(bytes([w] * 16), d, k)).to(DEVICE)
        plan: Any = plain("poisson", 4, 3)
        if clip is not None:
            value = 0.02 if clip == "coordinate" else 0.5 + 0.1 * w
            plan = GaussianPlan(d, k, clip, value, "poisson", 4, records, 3, 1, 0.7, "add-remove", 1e-3, rule)
        key = derive_key(bytes(32), "task", w)
        tasks.append(LocalTask(x, y, omega, d / k, 0.05 + 0.01 * w, plan, key))
    return tasks


def both(tasks: list[LocalTask], net: nn.Module) -> tuple[list[LocalResult], list[LocalResult]]:
    """By the kernels, and by the torch twins in float64 with the same batches and noise."""
    theta = FlatModel(net).flatten().to(DEVICE)
    rounds = Rounds(LayerGradients(net), DEVICE, tf32=False)
    got = rounds.train(theta, tasks)
    assert all(not stack.round.flags.any() for _, stack in rounds._stacks.values())
    careful = LayerGradients(net.to(DEVICE, torch.float64))
    wanted = []
    for task in tasks:
        exact = replace(task, x=task.x.double() if task.x.is_floating_point() else task.x)
        wanted.append(careful_steps(theta.double(), exact, Draws(task).whole(), careful))
    return got, wanted


@pytest.mark.parametrize("rule", ["given", "quantile"])
@pytest.mark.parametrize("active", [None, 1, 40])
@pytest.mark.parametrize("clip", [None, "coordinate", "l2"])
@pytest.mark.parametrize("name", list(NETS))
def test_a_round_matches_the_twins_in_float64(name: str, clip: Any, active: int | None, rule: Any) -> None:
    if clip is None and rule == "quantile":
        pytest.skip("nothing to clip")
    net = make_net(name)
    tasks = make_tasks(name, net, 3, clip, active, rule)
    for got, wanted in zip(*both(tasks, net)):
        size = float(wanted.delta.abs().max())
        assert got.delta.shape == wanted.delta.shape
        assert torch.allclose(got.delta.double(), wanted.delta, rtol=1e-5, atol=2e-5 * size)
        assert got.clip_value == pytest.approx(wanted.clip_value, rel=1e-6)


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(
    made=nets(),
    clip=st.sampled_from(["coordinate", "l2"]),
    active=st.none() | st.integers(1, 50),
    value=st.sampled_from([0.05, 0.3]),
    seed=st.integers(0, 1000),
)
def test_a_steps_sum_is_within_1e_5_of_the_clip_of_the_twins(
    made: tuple[nn.Sequential, tuple[int, ...]], clip: Any, active: int | None, value: float, seed: int
) -> None:
    """Random nets; one step from batches of 0 to some 8, with the same small noise on both sides."""
    net, shape = made
    d = FlatModel(net).dimension
    k = d if active is None else min(active, d)
    tasks = []
    for w in range(3):
        x, y = (part.to(DEVICE) for part in make_records(net, 10, shape, seed + w))
        omega = None if active is None else torch.from_numpy(active_coordinates(bytes([w] * 16), d, k)).to(DEVICE)
        plan = GaussianPlan(d, k, clip, value, "poisson", 1 + 3 * w, 10, 1, 1, 0.01, "add-remove", 1e-3)
        key = derive_key(bytes(32), seed, w)
        tasks.append(LocalTask(x, y, omega, 1.0, 1.0, plan, key))
    for task, got, wanted in zip(tasks, *both(tasks, net.to(DEVICE))):
        off = float((got.delta.double() - wanted.delta).abs().max()) * task.batch
        assert off <= 1e-5 * value * max(1, Draws(task).whole().largest)


@pytest.mark.parametrize("clip", ["coordinate", "l2"])
def test_tf32_changes_the_updates_a_little(clip: Any) -> None:
    net = make_net("fused")
    tasks = make_tasks("fused", net, 2, clip, None, "given")
    theta = FlatModel(net).flatten().to(DEVICE)
    full, rounded = (Rounds(LayerGradients(net), DEVICE, tf32=tf32).train(theta, tasks) for tf32 in (False, True))
    for one, two in zip(full, rounded):
        change = float((one.delta - two.delta).norm() / one.delta.norm())
        assert 0 < change < 5e-2  # 1.3e-2 on an H200: what rounds across a kink changes its branch


@pytest.mark.parametrize("clip", ["coordinate", "l2"])
def test_an_agents_bits_do_not_depend_on_its_company(clip: Any) -> None:
    net = make_net("fused")
    theta = FlatModel(net).flatten().to(DEVICE)
    tasks = make_tasks("fused", net, 4, clip, 40, "quantile")
    rounds = Rounds(LayerGradients(net), DEVICE, tf32=True)
    together = rounds.train(theta, tasks)
    again = rounds.train(theta, tasks)
    backwards = rounds.train(theta, tasks[::-1])[::-1]
    alone = [rounds.train(theta, [task])[0] for task in tasks]
    for one, two, three, four in zip(together, again, backwards, alone):
        assert torch.equal(one.delta, two.delta)
        assert torch.equal(one.delta, three.delta)
        assert torch.equal(one.delta, four.delta)
        assert one.clip_value == two.clip_value == three.clip_value == four.clip_value


def test_a_later_round_draws_while_it_runs_and_begins_again_where_a_batch_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Buffers have room for 16 examples after a round of small batches. A first batch fits in them, a later one not."""
    monkeypatch.setattr(rounds_module, "STRETCH", 1)
    net = make_net("mlp")
    gradients, theta = LayerGradients(net), FlatModel(net).flatten().to(DEVICE)
    x, y = (part.to(DEVICE) for part in make_records(net, 40, NETS["mlp"][0], 9))

    def agents(batch: int) -> list[LocalTask]:
        tasks = make_tasks("mlp", net, 2, "coordinate", 40, "given")
        plan = GaussianPlan(103, 40, "coordinate", 0.02, "poisson", batch, 40, 3, 1, 0.7, "add-remove", 1e-3)
        return [replace(task, x=x, y=y, steps=plan) for task in tasks]

    small, large = agents(4), agents(13)
    keys = (derive_key(bytes(32), "large", number) for number in range(1000))
    large[1] = next(
        task for key in keys
        if max((sizes := Draws(task := replace(large[1], key=key)).whole().sizes)[1:]) > 16 >= sizes[0]
    )  # fmt: skip
    fitting = [replace(task, key=derive_key(bytes(32), "again", w)) for w, task in enumerate(small)]
    rounds = Rounds(gradients, DEVICE, tf32=False)
    rounds.train(theta, small)
    ((shape, kept),) = rounds._stacks.values()
    assert shape.capacity == 16
    for tasks, same in ((fitting, True), (large, False), (small, False)):
        got = rounds.train(theta, tasks)
        ((_, now),) = rounds._stacks.values()
        assert (now is kept) == same
        for one, two in zip(got, Rounds(gradients, DEVICE, tf32=False).train(theta, tasks)):
            assert torch.equal(one.delta, two.delta)


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("clip", ["coordinate", "l2"])
def test_a_record_that_is_not_finite_counts_as_zero(clip: Any, broken: float) -> None:
    """1e30 is finite and its gradients overflow."""
    net = make_net("fused")
    theta = FlatModel(net).flatten().to(DEVICE)
    tasks = make_tasks("fused", net, 2, clip, 40, "given")
    tasks[1].x[:6, 0, 4, 4] = broken
    gradients = LayerGradients(net)
    got = Rounds(gradients, DEVICE, tf32=False).train(theta, tasks)
    wanted = careful_steps(theta, tasks[1], Draws(tasks[1]).whole(), gradients)
    assert torch.isfinite(got[1].delta).all()
    assert torch.allclose(got[1].delta, wanted.delta, rtol=1e-4, atol=1e-5)
    met = int((Draws(tasks[1]).whole().records < 6).sum())
    assert met > 0
    # Only the squares of gradients of 1e30 overflow, and the careful steps take norms in float64.
    assert [result.zeroed for result in got] == [0, 0 if broken == 1e30 else met]
    tasks[1].x[:6, 0, 4, 4] = 0
    undisturbed = Rounds(gradients, DEVICE, tf32=False).train(theta, tasks)
    assert torch.equal(got[0].delta, undisturbed[0].delta)


@pytest.mark.parametrize("active", [1, 63, GROUP, GROUP + 1, 3 * GROUP + 100])
def test_the_noise_kernel_makes_the_twins_numbers(active: int) -> None:
    keys = [derive_key(bytes(32), "noise", w) for w in range(3)]
    words = np.frombuffer(b"".join(keys), dtype="<i4").reshape(3, 8).copy()
    out = torch.full((3, active + 1), torch.nan, dtype=torch.float64, device=DEVICE)
    step = torch.tensor([5], dtype=torch.int32, device=DEVICE)
    grid = (-(-active // GROUP) + 1, 3)
    kernels.noise[grid](torch.from_numpy(words).to(DEVICE), step, out, active, LANES=LANES, num_warps=2)
    for w, key in enumerate(keys):
        twin = ChaChaNoise(key)
        twin.start_step(5)
        wanted = np.concatenate([twin.gaussian(active), twin.gaussian(1)])
        assert np.allclose(out[w].cpu().numpy(), wanted, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("clip_value", "share"), [(LARGEST_CLIP, 0.0), (SMALLEST_CLIP, 1.0)])
def test_a_private_clip_stays_within_what_a_plan_allows(clip_value: float, share: float) -> None:
    """Every example clipped at the largest clip, or none at the smallest."""

    def column(value: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return torch.full((1,), value, dtype=dtype, device=DEVICE)

    clips, shares, noise = column(clip_value), column(share).repeat(8), column(0.0).repeat(2)
    kernels.move_clip[(1,)](
        *(shares, noise, clips, column(1.0), column(8.0), column(8, torch.int32), column(0, torch.int32), 1, 8, 1),
        RATE=CLIP_RATE, QUANTILE=CLIP_QUANTILE, LEAST=SMALLEST_CLIP, MOST=LARGEST_CLIP, BLOCK=64, num_warps=1,
    )  # fmt: skip
    assert SMALLEST_CLIP <= float(clips) <= LARGEST_CLIP
    assert float(clips) == pytest.approx(clip_value, rel=1e-7)  # Triton takes these constants through float32


def test_records_without_a_gradient_are_done_over_by_the_rules() -> None:
    """A label outside the classes, or a token outside the words, comes to the kernels as the label -1."""
    net = make_net("mlp")
    tasks = make_tasks("mlp", net, 2, "l2", None, "given")
    tasks[0] = replace(tasks[0], y=tasks[0].y.masked_fill(torch.arange(len(tasks[0].y), device=DEVICE) % 2 == 0, -1))
    results = Rounds(LayerGradients(net), DEVICE, False).train(FlatModel(net).flatten().to(DEVICE), tasks)
    sampled = Draws(tasks[0]).whole().records
    assert [result.zeroed for result in results] == [int((sampled % 2 == 0).sum()), 0]
    assert all(result.delta.isfinite().all() for result in results)
