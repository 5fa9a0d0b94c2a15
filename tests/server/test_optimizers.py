"""The server's steps against the paper's equations, written out in plain floats."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from fedspa.server.optimizers import ServerOptimizer, decayed


def optimizer(step: str, decay: str = "none") -> ServerOptimizer:
    return ServerOptimizer(step, 0.5, 0.9, 0.99, 1e-3, decay)  # type: ignore[arg-type]


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


def test_decay_counts_rounds_from_one() -> None:
    assert [decayed(1.0, "sqrt", t) for t in (0, 3)] == [1.0, 0.5]
    assert decayed(1.0, "none", 99) == 1.0


def test_a_step_does_not_change_the_state_it_was_given() -> None:
    step = optimizer("adam")
    state = step.start(torch.tensor([1.0]))
    step.apply(state, torch.tensor([1.0]))
    assert float(state.theta) == 1.0
    assert float(state.moments["u"]) == 0.0


@pytest.mark.parametrize("step", ["adam", "average", "momentum"])
def test_the_average_of_the_iterates_follows_without_leading(step: str) -> None:
    plain = ServerOptimizer(step, 0.5, 0.9, 0.99, 1e-3, "none")  # type: ignore[arg-type]
    averaged = replace(plain, ema=0.75)
    one, two = plain.start(torch.tensor([1.0])), averaged.start(torch.tensor([1.0]))
    expected = 1.0
    for mean in (0.4, -0.2, 0.1):
        one, two = plain.apply(one, torch.tensor([mean])), averaged.apply(two, torch.tensor([mean]))
        expected = 0.75 * expected + 0.25 * float(one.theta)
        assert torch.equal(one.theta, two.theta)  # agents train from the same θ
        assert float(two.model) == pytest.approx(expected)
    assert torch.equal(one.model, one.theta)
