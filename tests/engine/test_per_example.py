"""The generic back end agrees with the float64 reference, step sums and whole trainings, on any net it takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain import plain
from torch import nn

from fedspa.engine import local
from fedspa.engine.local import LocalTask, example_rows
from fedspa.engine.per_example import PerExampleEngine, float64_reference
from fedspa.learning.flat import FlatModel
from fedspa.mechanisms.gaussian.plan import GaussianPlan
from fedspa.randomness.mask import active_coordinates
from fedspa.randomness.streams import derive_key


def smooth_net(seed: int = 0) -> nn.Sequential:
    """No kinks: float32 and float64 take the same branch everywhere."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 3, 3, stride=2),
            nn.Tanh(),
            nn.AvgPool2d(2),
            nn.Flatten(),
            nn.Linear(3, 5),
            nn.Tanh(),
            nn.Linear(5, 4),
        )


def records(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 1, 7, 7, generator=generator), torch.randint(4, (count,), generator=generator)


def task(active: int | None = None, *, private: bool = True, **changes: Any) -> LocalTask:
    x, y = records(20)
    d = FlatModel(smooth_net()).dimension
    k = active or d
    plan = GaussianPlan(d, k, "l2", 0.3, "poisson", 5, 20, 6, 1, 1.0, "add-remove", 1e-3)
    fields: dict[str, Any] = {
        "x": x,
        "y": y,
        "coordinates": torch.from_numpy(active_coordinates(bytes(16), d, k)) if active else None,
        "scale": d / k,
        "local_lr": 0.1,
        "steps": plan if private else plain("poisson", 5, 6),
        "key": derive_key(bytes(32), "task"),
    }
    return LocalTask(**{**fields, **changes})


@settings(max_examples=25)
@given(batch=st.integers(0, 9), active=st.integers(1, 60), seed=st.integers(0, 1000))
def test_per_example_gradients_match_autograds(batch: int, active: int, seed: int) -> None:
    """In float32 and in float64, where each is a plain gradient of one example's loss."""
    net = smooth_net(seed)
    theta = FlatModel(net).flatten()
    engine = PerExampleEngine(net)
    x, y = records(batch, seed)
    omega = torch.from_numpy(active_coordinates(seed.to_bytes(16, "little"), len(theta), min(active, len(theta))))
    got = list(engine.rows(theta, x, y, omega)) if batch else []
    wanted = list(float64_reference(net).rows(theta.double(), x, y, omega))
    assert sum(map(len, got)) == sum(map(len, wanted)) == batch
    if batch:
        assert torch.allclose(torch.cat(got).double(), torch.cat(wanted), rtol=0, atol=1e-5)
    model = FlatModel(net.double())
    for row, one, label in zip(torch.cat(wanted) if batch else (), x.double().split(1), y.split(1)):
        assert torch.allclose(row, model.gradient(theta.double(), one, label)[omega], rtol=0, atol=1e-12)


def test_gradients_that_exist_at_a_time_have_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    net = smooth_net(0)
    engine, theta = PerExampleEngine(net), FlatModel(net).flatten()
    monkeypatch.setattr(local, "ROWS_BUDGET", 4 * len(theta) * 3 + 5)
    assert [len(block) for block in engine.rows(theta, *records(8, 0), None)] == [3, 3, 2]
    monkeypatch.setattr(local, "ROWS_BUDGET", 1)
    assert [len(block) for block in engine.rows(theta, *records(2, 0), None)] == [1, 1]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("active", [None, 1, 17])
@pytest.mark.parametrize("sampling", ["poisson", "fixed"])
@pytest.mark.parametrize("clip", ["l2", "coordinate"])
def test_a_whole_training_matches_the_reference(clip: Any, sampling: Any, active: int | None, exact: bool) -> None:
    """Same key, same batches, same noise: only float32's rounding may differ."""
    work = task(active, exact=exact)
    rule = "add-remove" if sampling == "poisson" else "replace-one"
    plan = GaussianPlan(work.plan.dimension, work.plan.active, clip, 0.3, sampling, 5, 20, 6, 1, 1.0, rule, 1e-3)
    work = task(active, steps=plan, exact=exact)
    theta = FlatModel(smooth_net()).flatten()
    got = PerExampleEngine(smooth_net()).train(theta, [work])[0]
    wanted = float64_reference(smooth_net()).train(theta, [work])[0]
    assert got.delta.shape == (plan.active,)
    assert torch.allclose(got.delta.double(), wanted.delta, rtol=1e-4, atol=1e-4 * float(wanted.delta.abs().max()))


def test_plain_training_matches_torchs_sgd() -> None:
    """FedAvg's local work, with every record in every batch, is gradient descent."""
    x, y = records(20)
    net = smooth_net()
    theta = FlatModel(net).flatten()
    work = task(steps=plain("fixed", 20, 6), scale=1.0)
    got = PerExampleEngine(net).train(theta, [work])[0].delta
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(6):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    assert torch.allclose(theta + got, FlatModel(net).flatten(), atol=1e-6)


def test_a_shared_weight_sums_its_uses_before_it_is_clipped() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(self.layer(x).tanh())  # type: ignore[no-any-return]

    torch.manual_seed(0)
    net = Twice()
    assert FlatModel(net).dimension == 20
    theta = FlatModel(net).flatten()
    x, y = torch.randn(3, 4), torch.tensor([0, 1, 2])
    got = torch.cat(list(PerExampleEngine(net).rows(theta, x, y, None)))
    wanted = torch.cat(list(float64_reference(net).rows(theta.double(), x, y, None)))
    assert torch.allclose(got.double(), wanted, atol=1e-6)


@pytest.mark.parametrize("make", [PerExampleEngine, float64_reference])
def test_modes_that_are_changed_after_an_engine_was_made_change_nothing(make: Any) -> None:
    """Who evaluates between two rounds and then says `module.train()` must not thaw what was frozen: a batch norm would
    keep statistics of the records, without noise, and the model's file would hold them."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4).eval(), nn.Flatten(), nn.Linear(16, 2))
    engine, x, y = make(module), torch.randn(3, 1, 4, 4), torch.tensor([0, 1, 1])
    theta = FlatModel(module).flatten()
    before = torch.cat(list(engine.rows(theta, x, y, None)))
    module.train()
    assert torch.equal(torch.cat(list(engine.rows(theta, x, y, None))), before)
    engine.mean(theta, x, y)
    assert module[1].training
    assert not module[1].running_mean.any()


@pytest.mark.parametrize(
    "width", [30, 49, 333]
)  # records that are no multiple of 64 bytes: each lies otherwise in memory
def test_in_the_exact_mode_a_gradient_does_not_know_its_place(width: int) -> None:
    """A record that leaves moves all others up by one place in the batch."""
    x, y = torch.randn(40, width, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 2
    module = nn.Sequential(nn.Linear(width, 2))
    engine, theta = PerExampleEngine(module), FlatModel(module).flatten()
    whole, rest = (
        torch.cat(list(example_rows(engine, theta, x[first:].clone(), y[first:].clone(), None, one_by_one=True)))
        for first in (0, 1)
    )
    assert torch.equal(whole[1:], rest)
