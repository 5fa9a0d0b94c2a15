"""Stock layers and architectures train privately, and an example's gradient is what plain autograd says in float64."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from stock import ARCHITECTURES, COUNT, LAYERS, Stock, tokens
from torch import Tensor, nn

import fedspa
from fedspa.engine import Unsupported
from fedspa.engine.choose import EngineRequest, choose
from fedspa.engine.local import LocalTask
from fedspa.engine.per_example import PerExampleEngine, float64_reference
from fedspa.engine.traced import trace_engine
from fedspa.examples import Examples, Tree, in_float64, single_examples, zero_examples
from fedspa.learning.flat import FlatModel
from fedspa.learning.forward import outputs
from fedspa.learning.tasks import CustomLoss, Task
from fedspa.learning.tasks.named import resolve
from fedspa.mechanisms.gaussian.plan import GaussianPlan
from fedspa.randomness.streams import derive_key


def waves(module: nn.Module, example: Tree) -> Tensor:
    """A loss of any outputs in which each counts, and none as much as another."""
    assert isinstance(example, tuple)
    found = outputs(module, example[0]).flatten(1)
    return (found.sin() * torch.arange(1, 1 + found.shape[1]).to(found).sqrt()).sum(dim=1).mean()


def alone_in_float64(module: nn.Module, task: Task, x: Tree, y: Tree) -> Tensor:
    """Per-example gradients by nothing but torch: a backward pass for each example."""
    exact, rows = copy.deepcopy(module).double(), []
    for one, target in zip(single_examples(in_float64(x)), single_examples(in_float64(y))):
        exact.zero_grad()
        task.loss(exact, one, target).backward()
        trained = [parameter for parameter in exact.parameters() if parameter.requires_grad]
        rows.append(
            torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad.to_dense()).flatten() for p in trained])
        )
    return torch.stack(rows)


# What torch cannot map over examples, or what may fail for one of them.
UNTRACED = {"Bilinear", "EmbeddingBag, max", "weight_norm"}


def same_gradients(name: str, module: nn.Module, task: Task, x: Tree, y: Tree) -> None:
    """The engines', the reference's and torch's own, up to float32's rounding."""
    theta = FlatModel(module, task).flatten()
    wanted = alone_in_float64(module, task, x, y)
    reference = torch.cat(list(float64_reference(module, task).rows(theta.double(), x, y, None)))
    found = torch.cat(list(PerExampleEngine(module, task).rows(theta, x, y, None)))
    assert wanted.shape == (COUNT, len(theta))
    assert bool((wanted.abs().amax(dim=1) > 0).all())
    size = wanted.abs().amax(dim=1, keepdim=True)
    assert float(((reference - wanted).abs() / size).max()) < 1e-9
    assert float(((found.double() - wanted).abs() / size).max()) < 2e-5
    traced = trace_engine(module, Examples(zero_examples(x), zero_examples(y)), task, 1)
    assert isinstance(traced, Unsupported) == (name in UNTRACED), traced
    if not isinstance(traced, Unsupported):
        together = torch.cat(list(traced.rows(theta, x, y, None)))
        assert float(((together.double() - wanted).abs() / size).max()) < 2e-5


def one_private_round(module: nn.Module, task: Task, x: Tree, y: Tree) -> None:
    """By the engine that a run would take, with noise far below what is learned."""
    model = FlatModel(module, task)
    theta, d = model.flatten(), model.dimension
    like = Examples(zero_examples(x), zero_examples(y))
    engine = choose(EngineRequest("auto", module, like, "cpu", 1, exact=False, task=task))
    plan = GaussianPlan(d, d, "l2", 1.0, "fixed", COUNT, COUNT, 2, 1, 1e-3, "replace-one", 1e-3)
    (result,) = engine.train(theta, [LocalTask(x, y, None, 1.0, 0.05, plan, derive_key(bytes(32), "stock"))])
    assert result.zeroed == 0
    before, after = (float(model.mean_loss(at, x, y)) for at in (theta, theta + result.delta))
    assert after < before


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str) -> None:
    torch.manual_seed(0)
    stock = LAYERS[name]
    module, x, y, task = stock.make(), stock.x(), stock.y(), CustomLoss(waves)
    same_gradients(name, module, task, x, y)
    one_private_round(module, task, x, y)


def data_of(stock: Stock) -> fedspa.Dataset:
    return fedspa.from_arrays(*(2 * (stock.x(), stock.y())), name="stock")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures(name: str, tmp_path: Path) -> None:
    """Fixed where they have BatchNorm; gradients are compared in eval mode, where dropout draws nothing."""
    torch.manual_seed(0)
    stock = ARCHITECTURES[name]
    module = fedspa.fix(stock.make())
    data = data_of(stock)
    task = resolve(stock.task, data.train_y, data.classes, data.key)
    same_gradients(name, copy.deepcopy(module).eval(), task, data.train_x, data.train_y)
    if name != "BERT":  # of which there is a whole run
        one_private_round(module.eval(), task, data.train_x, data.train_y)
        return
    config: dict[str, Any] = {
        "federation": {"agents": 2, "rounds": 1, "per_round": 2},
        "algorithm": {"compression": 0.5, "local_steps": 2, "batch": 2, "local_lr": 0.1},
        "privacy": {"epsilon": 8.0, "delta": 1e-3},
        "run": {"out": str(tmp_path)},
    }
    result = fedspa.run(config, data=data, module=module, task=stock.task)
    assert result.summary["dimension"] == sum(p.numel() for p in module.parameters())
    assert 0 < result.summary["epsilon"] <= 8.0
    assert result.metrics[0].loss > 0
    assert (result.folder / "report.html").exists()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_layer_in_eval_mode_has_gradients_on_a_gpu(kind: type[nn.RNNBase]) -> None:
    """cuDNN has none for it."""
    torch.manual_seed(0)
    net, task, x, y = (
        kind(4, 5, batch_first=True).eval(),
        CustomLoss(waves),
        torch.randn(COUNT, 6, 4),
        torch.zeros(COUNT),
    )
    wanted = alone_in_float64(net, task, x, y)
    theta = FlatModel(net.cuda(), task).flatten()
    found = torch.cat(list(PerExampleEngine(net, task).rows(theta, x.cuda(), y.cuda(), None)))
    assert float((found.cpu().double() - wanted).abs().max() / wanted.abs().max()) < 1e-3


class TwiceUsed(nn.Module):
    """One layer at two places, and one matrix under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.mix, self.out = nn.Embedding(20, 4), nn.Linear(4, 4), nn.Linear(4, 20, bias=False)
        self.again = self.mix
        self.out.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.again(self.mix(self.words(x)).tanh()))


def test_tied_weights_count_once_and_have_the_gradient_of_all_their_places() -> None:
    torch.manual_seed(0)
    net, task = TwiceUsed(), CustomLoss(waves)
    model = FlatModel(net, task)
    assert model.dimension == 20 * 4 + 4 * 4 + 4
    x = tokens()
    same_gradients("tied", net, task, x, torch.zeros(COUNT))
    apart = copy.deepcopy(net)
    apart.out.weight = nn.Parameter(apart.words.weight.detach().clone())
    sums = alone_in_float64(apart, task, x, torch.zeros(COUNT))
    both = sums[:, : 20 * 4] + sums[:, -20 * 4 :]
    assert torch.allclose(alone_in_float64(net, task, x, torch.zeros(COUNT))[:, : 20 * 4], both)
