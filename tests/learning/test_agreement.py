"""Gradients compared with plain autograd on the module: a parameter that engines cannot reach is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

import fedspa
from fedspa.engine import EngineName
from fedspa.engine.choose import EngineRequest, choose
from fedspa.engine.local import engine_rows
from fedspa.errors import ConfigError
from fedspa.examples import Examples, Tree
from fedspa.flower.trainer import trainer_for
from fedspa.learning import models
from fedspa.learning.agreement import Disagreement, require_agreement, synthetic_examples
from fedspa.learning.flat import FlatModel
from fedspa.learning.tasks import Classification, CustomLoss, PerPerson

LIKE = Examples(torch.zeros(1, 4), torch.zeros(1, dtype=torch.int64))
TASK = Classification(3)
ENGINES: tuple[EngineName, ...] = ("auto", "generic")


class Net(nn.Module):
    """Two layers; `second` is another way to the weight of the first."""

    def __init__(self, hold: Callable[[nn.Linear], Callable[[], Tensor]] | None = None, share: float = 1.0) -> None:
        super().__init__()
        self.first, self.last, self.share = nn.Linear(4, 8), nn.Linear(8, 3), share
        self.second: Any = None if hold is None else hold(self.first)

    def forward(self, x: Tensor) -> Tensor:
        made = self.first(x) if self.second is None or self.share < 1 else torch.zeros(())
        if self.second is not None:
            made = (1 - self.share) * made + self.share * functional.linear(x, self.second(), self.first.bias)
        return self.last(torch.tanh(made))  # type: ignore[no-any-return]


class Holder:
    """Another object that has the weight, and gives it when it is called."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self) -> Tensor:
        return self.weight


class InDict(nn.Module):
    """As ncps' LTC cell: parameters are registered, and read from a dict beside."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.last = nn.Parameter(torch.randn(8, 4)), nn.Linear(8, 3)
        self._params = {"w": self.w}

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(functional.linear(x, self._params["w"])))  # type: ignore[no-any-return]


class AllInDict(nn.Module):
    """As ncps' LTC without a head: no parameter is read by its registration."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 4))
        self._params = {"w": self.w}

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self._params["w"])


def closure(layer: nn.Linear) -> Callable[[], Tensor]:
    weight = layer.weight
    return lambda: weight


# How a second way leads to the weight, and what share of the layer goes that way.
UNREACHED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "dict": (InDict, "w"),
    "all of them": (AllInDict, "w"),
    "object": (lambda: Net(lambda layer: Holder(layer.weight)), "first.weight"),
    "closure": (lambda: Net(closure), "first.weight"),
    "a hundredth of it": (lambda: Net(closure, share=0.01), "first.weight"),
    "value without gradient": (lambda: Net(lambda layer: layer.weight.detach, share=0.5), "first.weight"),
    "in eval mode": (lambda: Net(closure).eval(), "first.weight"),
    "beside a buffer": (lambda: nn.Sequential(nn.BatchNorm1d(4).eval(), Net(closure)), "1.first.weight"),
}


def tied() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 3))
    net[2].weight = net[0].weight
    return net


def shared() -> nn.Module:
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), nn.Linear(4, 3))


class Unused(Net):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(2, 2)


REACHED: dict[str, Callable[[], nn.Module]] = {
    "tied": tied,
    "shared layer": shared,
    "weight_norm": lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 8)), nn.Linear(8, 3)),
    "dropout": lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)),
    "buffers": lambda: nn.Sequential(nn.BatchNorm1d(4).eval(), nn.Linear(4, 3)),
    "unused parameter": Unused,
    "all zero": lambda: zeroed(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))),
}


def zeroed(net: nn.Module) -> nn.Module:
    for parameter in net.parameters():
        nn.init.zeros_(parameter)
    return net


def made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("way", UNREACHED)
def test_a_parameter_that_is_reached_a_second_way_is_refused_by_name(way: str, engine: EngineName) -> None:
    make, name = UNREACHED[way]
    module = made(make)
    before = [parameter.detach().clone() for parameter in module.parameters()]
    with pytest.raises(ConfigError, match=f"'{name}'.*otherwise than by their registration"):
        choose(EngineRequest(engine, module, LIKE, "cpu", 1, exact=False, task=TASK))
    found = fedspa.check(module, torch.rand(2, 4))
    assert [f"'{name}'" in str(problem) for problem in found][:1] == [True]
    # The module is tried itself, and left as it was.
    assert all(map(torch.equal, before, module.parameters()))
    assert all(isinstance(parameter, nn.Parameter) for parameter in module.parameters())


def test_a_copy_whose_closure_leads_to_the_original_is_refused() -> None:
    """Plain autograd agrees there: the copy's own weight has no part in its outputs."""
    fixed = fedspa.fix(nn.Sequential(nn.BatchNorm1d(4), Net(closure)))
    with pytest.raises(ConfigError, match=r"'1\.first\.weight'.*otherwise than by their registration"):
        choose(EngineRequest("auto", fixed, LIKE, "cpu", 1, exact=False, task=TASK))
    assert fedspa.check(fixed, torch.rand(2, 4))


@pytest.mark.parametrize("way", REACHED)
def test_what_engines_reach_is_taken(way: str) -> None:
    module = made(REACHED[way])
    choose(EngineRequest("auto", module, LIKE, "cpu", 1, exact=False, task=TASK))
    assert fedspa.check(module, torch.rand(2, 4)) == []


@pytest.mark.parametrize("engine", ["native", "traced"])
@pytest.mark.parametrize(
    "name",
    [
        "mlp",
        "mnist-cnn",
    ],
)
def test_fast_engines_are_compared(name: str, engine: EngineName) -> None:
    """The built-in models agree; and a weight that such an engine had wrong by a hundredth is found."""
    shape = (3, 24, 24)
    module = models.build(name, shape, 10, seed=0)
    example_spec = Examples(torch.zeros(1, *shape), torch.zeros(1, dtype=torch.int64))
    made = choose(EngineRequest(engine, module, example_spec, "cpu", 1, exact=False, task=Classification(10)))
    model, examples = (
        FlatModel(module, Classification(10)),
        synthetic_examples(example_spec, module, Classification(10)),
    )

    def wrong(theta: Tensor, x: Any, y: Any, coordinates: Tensor) -> Tensor:
        rows, ends = engine_rows(made, theta, x, y, coordinates), torch.tensor(model.sizes).cumsum(0)
        return torch.where(torch.bucketize(coordinates, ends, right=True) == 1, 1.01 * rows, rows)

    with pytest.raises(Disagreement) as refused:
        require_agreement(model, examples, wrong)
    assert refused.value.parameters == model.names[1:2]


def test_a_loss_of_its_own_is_not_blamed_for_parameters_that_no_engine_reaches() -> None:
    def squares(module: nn.Module, example: Tree) -> Tensor:
        assert isinstance(example, tuple)
        found: Tensor = module(example[0])
        return found.square().mean()

    with pytest.raises(ConfigError, match=r"'w'.*otherwise than by their registration"):
        choose(EngineRequest("auto", made(AllInDict), LIKE, "cpu", 1, exact=False, task=CustomLoss(squares)))


def site_model() -> nn.Module:
    return Net(closure)


def test_at_a_site_and_for_persons() -> None:
    with pytest.raises(ConfigError, match=r"'first\.weight'"):
        trainer_for(f"{__name__}:site_model", LIKE, TASK, None, "auto", 1, exact=False)
    person = Examples({"records": LIKE.x.unsqueeze(1), "count": torch.ones(1, dtype=torch.int64)}, LIKE.y[None])
    with pytest.raises(ConfigError, match=r"'first\.weight'"):
        choose(EngineRequest("auto", Net(closure), person, "cpu", 1, exact=False, task=PerPerson(TASK)))
