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
from torch.nn.utils import parametrizations

from fedspa.engine import EngineName, native, stacked
from fedspa.engine.choose import choose
from fedspa.engine.local import Gradients
from fedspa.engine.per_example import PerExampleEngine
from fedspa.errors import ConfigError
from fedspa.examples import Examples, blank
from fedspa.learning.flat import FlatModel
from fedspa.learning.tasks import Classification, CustomLoss, Regression
from fedspa.learning.validate import try_gradients


class RunningMax(nn.Module):
    """A record is divided by the largest value so far: records of the same values in any order show nothing."""

    def __init__(self, buffer: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        if buffer:
            self.register_buffer("top", torch.tensor(1e-3))
        else:
            self.top = torch.tensor(1e-3)

    def forward(self, x: Tensor) -> Tensor:
        self.top = torch.maximum(self.top, x.detach().abs().max())
        return self.layer(x / self.top)  # type: ignore[no-any-return]


class Counting(nn.Module):
    """Nothing shows yet: the count is only written."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        return self.layer(x)  # type: ignore[no-any-return]


class Drawing(nn.Module):
    """Draws a number that hardly ever matters."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x * (torch.rand(()) >= 0))  # type: ignore[no-any-return]


class FirstSeen(nn.Module):
    """Centres every record by the mean of the first one that it ever saw."""

    def __init__(self, buffer: bool) -> None:
        super().__init__()
        self.layer, self.buffer = nn.Linear(4, 2), buffer

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "centre"):
            if self.buffer:
                self.register_buffer("centre", None)
            self.centre = x.detach().mean()
        return self.layer(x - self.centre)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "make",
    [
        lambda: RunningMax(True),
        Counting,
        lambda: FirstSeen(True),
        lambda: FirstSeen(False),
    ],
    ids=["max-buffer", "count", "first-buffer", "first"],
)
def test_state_is_found_whatever_it_keeps(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(
        ConfigError,
        match=r"^the module itself \(\w+\) keeps something of one example for the next, in '(top|seen|centre)'",
    ):
        choose("auto", make(), blank((4,)), "cpu", 1, exact=False)


def test_a_trial_leaves_the_model_and_torchs_generator_alone() -> None:
    module = Counting()
    before = torch.get_rng_state()
    with pytest.raises(ConfigError):
        try_gradients(module, blank((4,)))
    assert module.seen == 0
    assert torch.equal(before, torch.get_rng_state())


def test_what_draws_from_torch_is_told() -> None:
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


def test_tokens_masks_and_targets_of_every_kind_are_tried() -> None:
    """Whole numbers stay whole numbers, dicts are keyword arguments, targets are what the task takes."""

    class Text(nn.Module):
        def __init__(self, keeps: bool) -> None:
            super().__init__()
            self.words, self.head, self.keeps = nn.Embedding(30, 5), nn.Linear(5, 2), keeps
            self.register_buffer("last", torch.zeros(1, dtype=torch.int64))

        def forward(self, tokens: Tensor, mask: Tensor) -> dict[str, Tensor]:
            assert tokens.dtype == torch.int64
            assert mask.dtype == torch.bool
            if self.keeps:
                self.last = torch.maximum(self.last, tokens.sum(1))
            return {"logits": self.head((self.words(tokens) * mask.unsqueeze(-1)).mean(1))}

    x = {"tokens": torch.zeros(1, 7, dtype=torch.int64), "mask": torch.ones(1, 7, dtype=torch.bool)}
    for y, task in (
        (torch.zeros(1, dtype=torch.int64), Classification(2)),
        (torch.zeros(1, 2), Regression(2)),
        (torch.zeros(1), CustomLoss(lambda module, example: module(**example[0])["logits"].square().mean())),  # type: ignore[index]
    ):
        assert not try_gradients(Text(False), Examples(x, y), task)
        with pytest.raises(ConfigError, match=r"^the module itself \(Text\) keeps something .* in 'last'"):
            try_gradients(Text(True), Examples(x, y), task)


def test_an_example_that_was_given_is_tried_where_one_made_up_will_not_do() -> None:
    class Ended(nn.Module):
        """Takes the features of the one token 7, as some models take those of the end of a text."""

        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(9, 5), nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.words(x)[x == 7].view(len(x), 5))  # type: ignore[no-any-return]

    like = Examples(torch.tensor([[3, 7, 1, 0]]), torch.tensor([0]))
    assert not try_gradients(Ended(), like)
    with pytest.raises(ConfigError, match=r"has no gradient for an example made like \(4,\)"):
        try_gradients(Ended(), Examples(like.x * 0, like.y))


def test_what_a_model_makes_once_and_not_of_a_record_is_no_state() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            if not hasattr(self, "positions"):
                self.register_buffer("positions", torch.arange(x.shape[1]) / 10)
            return self.layer(x + self.positions)  # type: ignore[no-any-return]

    assert choose("generic", Positions(), blank((4,)), "cpu", 1, exact=False).name == "generic"


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
    "GRU": lambda: Last(nn.GRU),
    "LSTM": lambda: Last(nn.LSTM),
    "RNN": lambda: Last(nn.RNN),
    "old weight_norm": old_weight_norm,
    "weight_norm": lambda: nn.Sequential(nn.Flatten(), parametrizations.weight_norm(nn.Linear(20, 3))),
    "residual GroupNorm": residual,
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", TAKEN)
def test_what_a_cpu_takes_a_gpu_takes(name: str) -> None:
    """Sums in another order each time, and TF32, are no state."""
    module = TAKEN[name]().cuda()
    engine = choose("generic", module, blank((5, 4)), "cuda", 1, exact=False)
    assert isinstance(engine, PerExampleEngine)
    theta = FlatModel(module).flatten()
    y = torch.arange(9, device="cuda") % 3
    y[2] = 7
    rows = torch.cat(list(engine.rows(theta, torch.randn(9, 5, 4, device="cuda"), y, None)))
    assert rows.isfinite().all(dim=1).tolist() == [i != 2 for i in range(9)]


@pytest.mark.parametrize("engine", ["auto", "native", "stacked", "traced", "generic", "reference"])
def test_a_layer_without_a_size_is_refused_by_name(engine: EngineName) -> None:
    with pytest.raises(
        ConfigError, match=r"the module's layer '1' \(LazyLinear\) has no sizes yet; `module\(example\)`"
    ):
        choose(engine, nn.Sequential(nn.Flatten(), nn.LazyLinear(3)), blank((4,)), "cpu", 1, exact=False)


def doubled(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return 2 * output


def halved(module: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    return inputs[0] / 2


@pytest.mark.parametrize("where", ["root", "inner", "layer"])
@pytest.mark.parametrize("kind", ["hook", "pre-hook", "backward", "forward"])
def test_a_model_with_hooks_is_run_as_it_is(where: str, kind: str) -> None:
    """The engines that read a model by its layers would leave them out."""
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
    assert "has hooks or a forward of its own" in str(stacked.supports(module, (4,)))
    if native.engine.library.library() is not None:
        assert "has hooks or a forward of its own" in str(native.supports(module, (4,)))
    if kind != "forward":  # such a forward is bound to this very module: no copy of it can be tried
        # A trace has what forward hooks do in it, and torch.func no backward hooks.
        engine = choose("auto", module, blank((4,)), "cpu", 1, exact=False)
        assert engine.name == ("generic" if kind == "backward" else "traced")
        assert isinstance(engine, Gradients)
        x, y = torch.rand(2, 4), torch.zeros(2, dtype=torch.int64)
        theta, given = FlatModel(module).flatten(), (x, torch.zeros(2, dtype=torch.int64)) if engine.draws else x
        rows = torch.cat(list(engine.rows(theta, given, y, None)))
        assert torch.allclose(rows, FlatModel(module).gradients_alone(theta, x, y), atol=1e-6)
    if kind != "backward":
        theta = FlatModel(module).flatten()
        assert not torch.allclose(FlatModel(module).outputs(theta, torch.ones(1, 4)), plain)
