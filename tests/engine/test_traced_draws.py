"""What models draw and look up in their own way: DropPath, a diffusion's noise, the logits of the last token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from traced_nets import Net

from fedspa.engine.per_example import PerExampleEngine
from fedspa.engine.traced import TracedEngine
from fedspa.examples import Examples, blank
from fedspa.learning.agreement import same_bits
from fedspa.learning.flat import FlatModel
from fedspa.learning.tasks import Classification, CustomLoss

COUNT = 6


def drop_path(draw: Any, keep: float = 0.5) -> nn.Module:
    """As timm and transformers have it."""

    def forward(net: Any, x: Tensor) -> Tensor:
        y = torch.tanh(net.body(x))
        kept = (keep + draw(x)).floor()
        return net.head(x + y.div(keep) * kept)  # type: ignore[no-any-return]

    return Net(forward, body=nn.Linear(4, 4), head=nn.Linear(4, 3))


WAYS = {
    "rand": lambda x: torch.rand((len(x), 1), dtype=x.dtype, device=x.device),
    "rand_like": lambda x: torch.rand_like(x[:, :1]),
    "randint": lambda x: torch.randint(0, 2, (len(x), 1)),
}


def gradients(made: TracedEngine, x: Tensor, seed: int) -> Tensor:
    theta, y = FlatModel(made._model.module).flatten(), torch.zeros(len(x), dtype=torch.int64)
    return torch.cat(list(made.rows(theta, (x, torch.full((len(x),), seed)), y, None)))


@pytest.mark.parametrize("way", WAYS)
def test_a_path_is_dropped_place_by_place_and_by_the_seed(way: str) -> None:
    torch.manual_seed(0)
    made = TracedEngine(drop_path(WAYS[way]).train(), blank((4,)))
    assert made.draws
    x = torch.ones(400, 4)
    rows = gradients(made, x, 1)
    body = rows[:, :16].abs().sum(1) > 0  # the gradient of the body's weights: only where the path is kept
    assert 130 < int(body.sum()) < 270  # 200 ± 7 deviations
    assert same_bits(rows, gradients(made, x, 1))
    assert not torch.equal(body, gradients(made, x, 2)[:, :16].abs().sum(1) > 0)
    spoilt = x.clone()
    spoilt[7] = torch.nan
    others = torch.arange(len(x)) != 7
    assert same_bits(gradients(made, spoilt, 1)[others], rows[others])


def denoised(module: nn.Module, example: tuple[Tensor, Tensor]) -> Tensor:
    x, _ = example
    steps, noise = torch.randint(2, 9, (len(x),)), torch.randn_like(x)
    shares = torch.linspace(0.9, 0.1, 10)[steps].unsqueeze(1)
    found = module(shares.sqrt() * x + (1 - shares).sqrt() * (noise + torch.randn(x.shape)))
    loss: Tensor = (found - noise).square().mean()
    return loss


def test_a_diffusions_loss_has_the_mean_of_the_engine_for_any_module() -> None:
    """Both draw, one by place and one by record; over many draws of the same record the means are the same."""
    torch.manual_seed(0)
    module, task = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)), CustomLoss(denoised)  # type: ignore[arg-type]
    theta, x = FlatModel(module).flatten(), torch.ones(4000, 4)
    y, seeds = torch.zeros(len(x), dtype=torch.int64), torch.arange(len(x))
    made = TracedEngine(module, blank((4,)), task), PerExampleEngine(module, task, draws=True)
    found, wanted = (torch.cat(list(engine.rows(theta, (x, seeds), y, None))) for engine in made)
    error = ((found.var(0) + wanted.var(0)) / len(x)).sqrt()
    assert float(found.std(0).max()) > 0
    assert bool(((found.mean(0) - wanted.mean(0)).abs() < 5 * error + 1e-7).all())  # 76 of them: one in 20,000 runs


def last_token(x: Tensor, logits: Tensor) -> Tensor:
    """As the decoders of transformers have it: the last token that is no padding."""
    last = ((x != 0).int() * torch.arange(x.shape[-1], dtype=torch.int32)).argmax(-1)
    return logits[torch.arange(len(x)), last]


def named_place(x: Tensor, logits: Tensor) -> Tensor:
    """The record says the place itself, which may be any."""
    return logits[torch.arange(len(x)), x[:, 0] - 3]


def by_a_table(x: Tensor, logits: Tensor) -> Tensor:
    """What a table holds for the record is itself a place."""
    places = torch.arange(100, 111).index_select(0, x[:, 0].clamp(0, 10)) - 102
    return logits[torch.arange(len(x)), places]


@pytest.mark.parametrize("pick", [last_token, named_place, by_a_table])
@pytest.mark.parametrize("value", [0, 1, 9, -1, 2**40])
def test_logits_of_a_place_are_those_of_the_engine_for_any_module(pick: Any, value: int) -> None:
    """A place outside costs the record its own gradient, and no other a bit."""
    torch.manual_seed(0)
    net = Net(
        lambda net, x: pick(x, net.head(torch.tanh(net.words(x.clamp(0, 10))))),
        words=nn.Embedding(11, 5),
        head=nn.Linear(5, 3),
    )
    theta, task = FlatModel(net).flatten(), Classification(3)
    x, y = torch.randint(1, 6, (COUNT, 6)), torch.arange(COUNT) % 3
    x[2, 4:], x[4, 1:] = 0, 0
    made = TracedEngine(net, Examples(x[:1], y[:1]), task)
    clean = torch.cat(list(made.rows(theta, x, y, None)))
    x[3, 0] = value
    found = torch.cat(list(made.rows(theta, x, y, None)))
    wanted = torch.cat(list(PerExampleEngine(net, task).rows(theta, x, y, None)))
    others = torch.arange(COUNT) != 3
    assert same_bits(found[others], clean[others])
    assert torch.allclose(found[others], wanted[others], atol=1e-6)
    assert bool(found[3].isfinite().all()) == bool(wanted[3].isfinite().all())
