"""Forward passes as tutorials write them: `x.view(-1, N)` and the like are a Flatten, which the native engine runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedspa.engine.choose import EngineRequest, decide
from fedspa.engine.local import engine_rows
from fedspa.engine.native import library
from fedspa.engine.per_example import float64_reference
from fedspa.examples import Examples
from fedspa.learning.flat import FlatModel

pytestmark = pytest.mark.skipif(library.library() is None, reason="the native engine was not built")

X, Y = torch.rand(5, 1, 6, 6), torch.arange(5) % 3
FLATTENED: dict[str, Callable[[Tensor], Tensor]] = {
    "view(-1, N)": lambda x: x.view(-1, 18),
    "view((-1, N))": lambda x: x.view((-1, 18)),
    "reshape(-1, N)": lambda x: x.reshape(-1, 18),
    "torch.reshape": lambda x: torch.reshape(x, (-1, 18)),
    "view(x.size(0), -1)": lambda x: x.view(x.size(0), -1),
    "view(x.shape[0], -1)": lambda x: x.view(x.shape[0], -1),
    "view(x.size()[0], N)": lambda x: x.view(x.size()[0], 18),
    "reshape(x.shape[0], N)": lambda x: x.reshape(x.shape[0], 18),
}
# What mixes examples, or keeps them apart only in batches of some size.
OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "view(-1, half)": lambda x: x.view(-1, 9).repeat(1, 2)[: x.shape[0]],
    "view(-1, 2, 9)": lambda x: x.view(-1, 2, 9).sum(2).repeat(1, 9),
    "view(1, -1)": lambda x: x.view(1, -1).view(-1, 18),
    "view(x.shape[1], -1)": lambda x: x.view(x.shape[1], -1).view(-1, 18),
    "x.shape used": lambda x: x.flatten(1) * x.shape[0],
}


class Net(nn.Module):
    def __init__(self, flat: Callable[[Tensor], Tensor], early: bool = False) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 2, 3, padding=1), nn.Linear(18, 3)
        self.flat, self.early = flat, early

    def forward(self, x: Tensor) -> Tensor:
        batch = x.size(0)
        x = functional.max_pool2d(self.conv(x), 2)
        return self.head(x.view(batch, -1) if self.early else self.flat(x))


def engine_of(module: nn.Module) -> str:
    return decide(EngineRequest("auto", module, Examples(X[:1], Y[:1]), "cpu", 1, exact=False)).engine


@pytest.mark.parametrize("how", FLATTENED)
def test_a_view_that_keeps_examples_apart_is_a_flatten(how: str) -> None:
    module = Net(FLATTENED[how])
    choice = decide(EngineRequest("native", module, Examples(X[:1], Y[:1]), "cpu", 1, exact=False))
    theta = FlatModel(module).flatten()
    everywhere = torch.arange(len(theta))
    rows = engine_rows(choice.make(), theta, X, Y, everywhere)
    expected = engine_rows(float64_reference(module), theta, X, Y, everywhere)
    torch.testing.assert_close(rows.double(), expected, rtol=1e-4, atol=1e-5)


def test_the_batch_size_may_be_read_first() -> None:
    assert engine_of(Net(torch.clone, early=True)) == "native"


@pytest.mark.parametrize("how", OTHERS)
def test_any_other_view_is_no_layer_of_a_chain(how: str) -> None:
    with pytest.raises(Exception, match="native"):
        decide(EngineRequest("native", Net(OTHERS[how]), Examples(X[:1], Y[:1]), "cpu", 1, exact=False))


def test_a_view_that_does_not_fit_says_what_would() -> None:
    with pytest.raises(Exception, match="a view of 9 values does not fit examples of 18"):
        decide(EngineRequest("native", Net(lambda x: x.view(-1, 9)), Examples(X[:1], Y[:1]), "cpu", 1, exact=False))
