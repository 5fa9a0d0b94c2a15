"""The server's steps against the paper's equations, written out in plain floats."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from fedspa.server.optimizers import Schedule, ScheduleName, ServerOptimizer


def optimizer(step: str, schedule: ScheduleName = "constant") -> ServerOptimizer:
    return ServerOptimizer(step, 0.5, 0.9, 0.99, 1e-3, schedule=Schedule(schedule))  # type: ignore[arg-type]


def test_adam_is_lines_13_to_15_as_printed() -> None:
    u, v, theta = 0.0, 1e-3**2, 2.0
    state = optimizer("adam", "sqrt").start(torch.tensor([2.0], dtype=torch.float64))
    for t, mean in enumerate([0.3, -0.1, 0.2]):
        u = 0.9 * u + 0.1 * mean
        v = 0.99 * v + 0.01 * u**2
        theta = theta + 0.5 / math.sqrt(t + 1) * u / (math.sqrt(v) + 1e-3)
        state = optimizer("adam", "sqrt").apply(state, torch.tensor([mean], dtype=torch.float64))
        assert float(state.theta) == pytest.approx(theta, rel=1e-12)
    assert state.round == 3


def test_average_moves_by_the_mean_update() -> None:
    state = optimizer("average").start(torch.tensor([1.0]))
    state = optimizer("average").apply(state, torch.tensor([0.4]))
    assert float(state.theta) == pytest.approx(1.2)
    assert state.moments == {}


def test_momentum_remembers() -> None:
    step = optimizer("momentum")
    state = step.start(torch.tensor([0.0]))
    for _ in range(2):
        state = step.apply(state, torch.tensor([1.0]))
    assert float(state.theta) == pytest.approx(0.5 + 0.5 * 1.9)


class TestSchedule:
    def test_the_papers_counts_rounds_from_one(self) -> None:
        assert [Schedule("sqrt").rate(1.0, t) for t in (0, 3)] == [1.0, 0.5]
        assert Schedule().rate(0.3, 99) == 0.3

    @pytest.mark.parametrize("warmup", [0, 3])
    @pytest.mark.parametrize("name", ["cosine", "linear"])
    def test_the_rates_are_those_of_torch(self, name: ScheduleName, warmup: int) -> None:
        rounds = 12
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
        schedulers = torch.optim.lr_scheduler
        falling = (
            schedulers.CosineAnnealingLR(optimizer, rounds - warmup)
            if name == "cosine"
            else schedulers.LinearLR(optimizer, 1.0, 0.0, rounds - warmup)
        )
        whole: torch.optim.lr_scheduler.LRScheduler = falling
        if warmup:
            rising = schedulers.LinearLR(optimizer, 1 / (warmup + 1), 1.0, warmup)
            whole = schedulers.SequentialLR(optimizer, [rising, falling], [warmup])
        expected = []
        for _ in range(rounds):
            expected.append(whole.get_last_lr()[0])
            optimizer.step()
            whole.step()
        found = [Schedule(name, warmup, rounds).rate(0.5, t) for t in range(rounds)]
        assert found == pytest.approx(expected)

    @pytest.mark.parametrize("name", ["constant", "sqrt", "linear", "cosine"])
    @pytest.mark.parametrize("warmup", [0, 2, 20])
    def test_every_round_has_a_rate(self, name: ScheduleName, warmup: int) -> None:
        rates = [Schedule(name, warmup, 10).rate(1.0, t) for t in range(10)]
        assert all(0 < rate <= 1 for rate in rates)
        assert warmup == 0 or rates[0] < rates[1]


def test_a_step_does_not_change_the_state_it_was_given() -> None:
    step = optimizer("adam")
    state = step.start(torch.tensor([1.0]))
    step.apply(state, torch.tensor([1.0]))
    assert float(state.theta) == 1.0
    assert float(state.moments["u"]) == 0.0


@pytest.mark.parametrize("step", ["adam", "average", "momentum"])
def test_the_average_of_the_iterates_follows_without_leading(step: str) -> None:
    plain = ServerOptimizer(step, 0.5, 0.9, 0.99, 1e-3)  # type: ignore[arg-type]
    averaged = replace(plain, ema=0.75)
    one, two = plain.start(torch.tensor([1.0])), averaged.start(torch.tensor([1.0]))
    expected = 1.0
    for mean in (0.4, -0.2, 0.1):
        one, two = plain.apply(one, torch.tensor([mean])), averaged.apply(two, torch.tensor([mean]))
        expected = 0.75 * expected + 0.25 * float(one.theta)
        assert torch.equal(one.theta, two.theta)  # agents train from the same θ
        assert float(two.model) == pytest.approx(expected)
    assert torch.equal(one.model, one.theta)
