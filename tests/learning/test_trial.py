"""Models tried before they see a record: what keeps state is refused, and what does not is taken."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedspa.engine import native
from fedspa.engine.choose import EngineRequest, choose
from fedspa.engine.per_example import PerExampleEngine
from fedspa.errors import ConfigError
from fedspa.examples import Examples, blank
from fedspa.learning.flat import FlatModel
from fedspa.learning.validate import try_gradients


class Drawing(nn.Module):
    """Draws a number that hardly ever matters."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x * (torch.rand(()) >= 0))  # type: ignore[no-any-return]


def test_randomness_from_torch_is_reported() -> None:
    dropout = nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.5))
    assert try_gradients(Drawing(), blank((4,)))
    assert try_gradients(dropout, blank((4,)))
    assert not try_gradients(dropout.eval(), blank((4,)))
    assert not try_gradients(nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.0)), blank((4,)))

    class Seldom(nn.Module):
        """Its Dropout is for examples of which none is made up."""

        def __init__(self) -> None:
            super().__init__()
            self.layer, self.drop = nn.Linear(4, 2), nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.drop(x) if float(x.sum()) == 17 else x)  # type: ignore[no-any-return]

    assert try_gradients(Seldom(), blank((4,)))
    assert not try_gradients(Seldom().eval(), blank((4,)))


@pytest.mark.parametrize(
    "generator", [torch.Generator(), random.Random(3), np.random.default_rng(3), np.random.RandomState(3)]
)
def test_a_generator_of_the_modules_own_is_named(generator: Any) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.generator = nn.Linear(4, 2), generator

        def forward(self, x: Tensor) -> Tensor:
            own = self.generator
            drawn = torch.rand(1, generator=own) if isinstance(own, torch.Generator) else own.random()
            return self.layer(x) * drawn  # type: ignore[no-any-return]

    with pytest.raises(ConfigError, match=r"^the module's layer '0' \(Own\) draws from a .* own, 'generator'"):
        try_gradients(nn.Sequential(Own()), blank((4,)))


def test_what_a_model_makes_once_and_not_of_a_record_is_no_state() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            if not hasattr(self, "positions"):
                self.register_buffer("positions", torch.arange(x.shape[1]) / 10)
            return self.layer(x + self.positions)  # type: ignore[no-any-return]

    assert choose(EngineRequest("generic", Positions(), blank((4,)), "cpu", 1, exact=False)).name == "generic"


class Last(nn.Module):
    """The last output of a recurrent layer: vmap has no rule for these."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer, self.head = kind(4, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0][:, -1])  # type: ignore[no-any-return]


def old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Flatten(), nn.Linear(25, 3))


def residual() -> nn.Module:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.head = nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.Linear(160, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.conv(x.unsqueeze(1))
            return self.head((x + torch.relu(self.norm(x))).flatten(1))  # type: ignore[no-any-return]

    return Block()


TAKEN: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: Last(nn.LSTM),
    "old weight_norm": old_weight_norm,
    "residual GroupNorm": residual,
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", TAKEN)
def test_what_a_cpu_takes_a_gpu_takes(name: str) -> None:
    """Sums in another order each time, and TF32, are no state."""
    module = TAKEN[name]().cuda()
    engine = choose(EngineRequest("generic", module, blank((5, 4)), "cuda", 1, exact=False))
    assert isinstance(engine, PerExampleEngine)
    theta = FlatModel(module).flatten()
    y = torch.arange(9, device="cuda") % 3
    y[2] = 7
    rows = torch.cat(list(engine.rows(theta, torch.randn(9, 5, 4, device="cuda"), y, None)))
    assert rows.isfinite().all(dim=1).tolist() == [i != 2 for i in range(9)]


def doubled(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return 2 * output


def halved(module: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    return inputs[0] / 2


@pytest.mark.parametrize("where", ["root", "layer"])
@pytest.mark.parametrize("kind", ["hook", "pre-hook", "backward", "forward"])
def test_a_model_with_hooks_is_run_as_it_is(where: str, kind: str) -> None:
    """An engine that reads a model by its layers would leave them out."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Sequential(nn.Linear(4, 5), nn.ReLU()), nn.Linear(5, 3))
    layer = {"root": module, "inner": module[1], "layer": module[1][0]}[where]
    plain = module(torch.ones(1, 4))
    if kind == "hook":
        layer.register_forward_hook(doubled)
    elif kind == "pre-hook":
        layer.register_forward_pre_hook(halved)
    elif kind == "backward":
        layer.register_full_backward_hook(lambda module, back, ahead: None)
    else:
        inside = layer.forward
        layer.forward = lambda x: 3 * inside(x)  # type: ignore[method-assign]
    if native.engine.library.library() is not None:
        assert "has hooks or a forward of its own" in str(native.supports(module, (4,)))
    if kind != "forward":  # such a forward is bound to this very module: no copy of it can be tried
        # A trace has what forward hooks do in it, and torch.func no backward hooks.
        engine = choose(EngineRequest("auto", module, blank((4,)), "cpu", 1, exact=False))
        assert engine.name == ("generic" if kind == "backward" else "traced")
        assert engine.gives_rows
        x, y = torch.rand(2, 4), torch.zeros(2, dtype=torch.int64)
        theta, given = FlatModel(module).flatten(), (x, torch.zeros(2, dtype=torch.int64)) if engine.draws else x
        rows = torch.cat(list(engine.rows(theta, given, y, None)))
        assert torch.allclose(rows, FlatModel(module).per_example_gradients(theta, x, y), atol=1e-6)
    if kind != "backward":
        theta = FlatModel(module).flatten()
        assert not torch.allclose(FlatModel(module).outputs(theta, torch.ones(1, 4)), plain)


def test_a_given_example_is_tried_where_no_synthetic_one_has_a_gradient() -> None:
    class Ended(nn.Module):
        """Takes the features of the one token 7, as some models take those of the end of a text."""

        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(9, 5), nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.words(x)[x == 7].view(len(x), 5))  # type: ignore[no-any-return]

    example_spec = Examples(torch.tensor([[3, 7, 1, 0]]), torch.tensor([0]))
    assert not try_gradients(Ended(), example_spec)
    with pytest.raises(ConfigError, match=r"has no gradient for an example made like \(4,\)"):
        try_gradients(Ended(), Examples(example_spec.x * 0, example_spec.y))
