"""Evaluation: what one pass over the records gives, to the bit, whatever the number of threads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from fedspa.examples import Examples, tensors
from fedspa.runs import config
from fedspa.runs.setup import prepare
from fedspa.server.coordinator import ServerJob
from fedspa.server.evaluation import Evaluation


def job(engine: str, threads: int) -> ServerJob:
    overrides = [
        "privacy.epsilon=none",
        "privacy.noise_multiplier=1.0",
        f"run.engine={engine}",
        f"run.threads={threads}",
    ]
    made = prepare(config.load(None, [*overrides, "model.name=mlp"])).server
    # Ten parts with an incomplete last one, and losses whose sum depends on their order.
    x, y = tensors(*made.test)
    test_x = torch.cat([x * 10.0**scale for scale in range(-2, 6)])[:2500]
    return replace(made, test=Examples(test_x, y.repeat(8)[:2500]))


@pytest.mark.parametrize("engine", ["native", "generic"])
def test_agrees_with_one_pass(engine: str) -> None:
    made = job(engine, 3)
    theta = made.model.flatten()
    (x, y), (scores, loss) = tensors(*made.test), Evaluation(made, theta.device)(theta)
    with torch.no_grad():
        logits = made.model.outputs(theta, x)
    assert scores["accuracy"] == (logits.argmax(1) == y).double().mean().item()
    assert loss == pytest.approx(functional.cross_entropy(logits, y).item(), rel=1e-5)


def test_by_class() -> None:
    made = job("native", 3)
    assert made.model.task.width == 10
    x, y = tensors(*made.test)
    without = y.clone()
    without[without == 4] = 5
    made = replace(made, test=Examples(x, without))
    theta = made.model.flatten()
    found = Evaluation(made, theta.device).closing(theta).by_class
    with torch.no_grad():
        right = made.model.outputs(theta, x).argmax(1) == without
    assert found[4] is None
    for label in {*range(10)} - {4}:
        assert found[label] == right[without == label].double().mean().item()


def test_threads_change_no_bit_and_leave_torch_as_it_was() -> None:
    theta = job("native", 1).model.flatten()
    before = torch.get_num_threads()
    found = [Evaluation(job("native", threads), theta.device)(theta) for threads in (1, 2, 3, 16)]
    assert all(each == found[0] for each in found)
    assert torch.get_num_threads() == before


def test_a_model_that_diverged_has_no_finite_loss() -> None:
    made = job("native", 2)
    theta = torch.full_like(made.model.flatten(), float("nan"))
    _, loss = Evaluation(made, theta.device)(theta)
    assert loss != loss
