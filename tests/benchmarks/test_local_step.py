"""The rivals do the work that they are timed for, and the benchmark of local steps runs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import engine
from brought.rows import built_in
from fedspa.learning.models import build
from local_step import rivals
from local_step.cases import CASES, LEARNING_RATE, available
from local_step.grouped import AGENTS, grouped_sgd, stacked
from local_step.mechanism import Mechanism, opacus_rows
from local_step.turns import ratios

SMALL = built_in("mnist-cnn", 6_840, (1, 16, 16), "small")
TINY = replace(CASES["mnist-p05"], row=SMALL, batch=4, records=20, slow_steps=1, fast_steps=2)


@pytest.fixture
def rows(rng: torch.Generator) -> list[Tensor]:
    """Gradients of five examples for a net of two parameters."""
    return [torch.randn(5, 3, 4, generator=rng), torch.randn(5, 3, generator=rng)]


@pytest.mark.parametrize("clip", ["coordinate", "l2"])
@pytest.mark.parametrize("masked", [False, True])
def test_mechanism_is_the_one_of_the_paper(rows: list[Tensor], clip: str, masked: bool, rng: torch.Generator) -> None:
    net = nn.Linear(4, 3)
    mask = torch.tensor([0, 3, 7, 12, 14]) if masked else None
    parameters = [p.detach().clone() for p in net.parameters()]
    flat = torch.cat([row.flatten(1) for row in rows], dim=1)
    active = flat if mask is None else flat[:, mask]
    if clip == "coordinate":
        total = active.clamp(-0.5, 0.5).sum(0)
    else:
        total = sum((example * min(1.0, 0.5 / float(example.norm())) for example in active), torch.zeros(()))
    expected = torch.cat([p.reshape(-1) for p in parameters])
    expected[slice(None) if mask is None else mask] -= 0.1 * total

    Mechanism(net, mask, clip, 0.5, 0.0, 0.1, rng)([row.clone() for row in rows], parameters)
    torch.testing.assert_close(torch.cat([p.reshape(-1) for p in parameters]), expected)


@pytest.mark.parametrize("clip", ["coordinate", "l2"])
def test_mechanism_adds_the_plans_noise(clip: str, rng: torch.Generator) -> None:
    """A step of rate 1 on zero gradients is −noise of σ·c·√k or σ·C: within 3 % at k = 20,100, six standard errors."""
    net = nn.Linear(200, 100)
    parameters = [torch.zeros_like(p) for p in net.parameters()]
    rows = [torch.zeros(2, *p.shape) for p in parameters]
    Mechanism(net, None, clip, 0.5, 2.0, 1.0, rng)(rows, parameters)
    measured = torch.cat([p.reshape(-1) for p in parameters]).std().item()
    assert measured == pytest.approx(2.0 * 0.5 * (math.sqrt(20_100) if clip == "coordinate" else 1.0), rel=0.03)


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew"])
def test_opacus_gives_the_gradients_of_single_examples(mode: str, rng: torch.Generator) -> None:
    pytest.importorskip("opacus")
    net = build("mnist-cnn", (1, 16, 16), 10, 0)
    x, y = torch.randn(3, 1, 16, 16, generator=rng), torch.tensor([1, 2, 3])
    single = [
        torch.autograd.grad(functional.cross_entropy(net(x[i : i + 1]), y[i : i + 1]), list(net.parameters()))
        for i in range(3)
    ]
    found = opacus_rows(net, mode)(x, y)
    for row, *each in zip(found, *single):
        torch.testing.assert_close(row, torch.stack(each), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("model", ["mnist-cnn", "mlp", "logistic"])
def test_grouped_agents_take_the_steps_of_plain_ones(model: str, rng: torch.Generator) -> None:
    batches = [(torch.randn(4, 1, 16, 16, generator=rng), torch.randint(0, 10, (4,), generator=rng)) for _ in "ab"]
    net = build(model, (1, 16, 16), 10, 0)
    plain = rivals.plain_sgd(net, iter(batches).__next__, channels_last=False)
    repeated = (batch for batch in batches for _ in range(AGENTS))
    layers = list(build(model, (1, 16, 16), 10, 0).children())
    parameters = stacked(layers)
    grouped = grouped_sgd(layers, parameters, repeated.__next__, LEARNING_RATE)
    for _ in batches:
        assert (plain(), grouped()) == (1, AGENTS)
    for p, many in zip(net.parameters(), parameters):
        own = p.T if p.ndim == 2 else p
        torch.testing.assert_close(many.view(AGENTS, -1)[-1], own.reshape(-1), atol=1e-6, rtol=1e-4)


@pytest.mark.slow
def test_every_contender_runs() -> None:
    case = replace(TINY, compression=1.0)
    result = engine.measure(case, repeats=1, cores=1)
    expected = [name for name in engine.CONTENDERS if available(name, case)]
    assert list(result["contenders"]) == expected
    for row in result["contenders"].values():
        assert 0 < row["lowest_ms"] <= row["median_ms"] <= row["highest_ms"]
        assert row["cpu_ms"] > 0
    assert result["ratios"]["wall"].keys() == result["ratios"]["cpu"].keys()


def test_ratios_are_of_the_best_in_each_repeat() -> None:
    times = {"native": [1.0, 2.0, 1.0], "opacus-hooks": [9.0, 9.0, 9.0], "opacus-ew": [4.0, 4.0, 5.0]}
    found = ratios(times, engine.RIVALS)
    assert found == {"best Opacus / native": {"best": "opacus-ew", "median": 4.0, "lowest": 2.0, "highest": 5.0}}
