""""""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from frozen_nets import TwoInputs, chain, drawn, frozen, seeded
from torch import nn

from fedspa.errors import ConfigError
from fedspa.examples import blank
from fedspa.learning.flat import NUMBERS, FlatModel, alike, sketch
from fedspa.learning.models import NAMES, build, require_fit
from fedspa.learning.tasks import Classification

MNIST, CIFAR, DIGITS = (1, 28, 28), (3, 32, 32), (1, 8, 8)


def fitting(name: str) -> nn.Module:
    model = build(name, DIGITS, 10, 0)
    require_fit(FlatModel(model, Classification(10)), blank(DIGITS), f"model.name = {name!r}")
    return model


def size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", [name for name in NAMES if name != "totals"])  # which draws nothing
def test_the_seed_decides_the_initialisation_and_the_global_state_stays(name: str) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one, two, other = (build(name, CIFAR, 10, seed).state_dict() for seed in (5, 5, 6))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(one[key], two[key]) for key in one)
    assert not any(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize(("name", "side"), [("mnist-cnn", 16), ("small-cnn", 16), ("cifar10-cnn", 22)])
def test_the_smallest_image_that_fits(name: str, side: int) -> None:
    assert build(name, (2, side, side + 3), 4, 0)(torch.zeros(2, 2, side, side + 3)).shape == (2, 4)
    with pytest.raises(ConfigError, match=rf"model\.name = '{name}'.*data\.name.*at least {side}.*logistic"):
        build(name, (2, side, side - 1), 4, 0)


USERS = """
import torch
from torch import nn
def two(input_shape, classes): return nn.Sequential(nn.Flatten(), nn.Linear(input_shape[0] * 64, classes))
def none(): return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
def three(a, b, c): return none()
def empty(): return nn.Flatten()
def frozen(): return none().requires_grad_(False)
def narrow(): return nn.Sequential(nn.Flatten(), nn.Linear(64, 9))
def misfit(): return nn.Sequential(nn.Flatten(), nn.Linear(63, 10))
def double(): return none().double()
def fails(): raise RuntimeError("no\\nway")
def text(): return "model"
class Normed(nn.Module):
    def __init__(self, input_shape, classes):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Dropout(), nn.Linear(64, classes))
    def forward(self, x): return self.layers(x)
class named(nn.Sequential):
    def __init__(self): super().__init__(nn.Flatten(), nn.Linear(64, 10))
    def forward(self, x): return "scores"
class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)
    def forward(self, x): return self.layer(x.flatten(1)), None
"""


@pytest.fixture
def users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "fedspa_users_model", raising=False)
    (tmp_path / "fedspa_users_model.py").write_text(USERS)
    return "fedspa_users_model"


@pytest.mark.parametrize("function", ["two", "none"])
def test_the_users_own_is_seeded_too(users: str, function: str) -> None:
    one, two, other = (build(f"{users}:{function}", DIGITS, 10, seed) for seed in (5, 5, 6))
    assert size(one) == 650
    assert torch.equal(one[1].weight, two[1].weight)
    assert not torch.equal(one[1].weight, other[1].weight)


# A sketch tells another frozen body from the same one on another processor.


def test_a_module_that_learns_all_has_none() -> None:
    assert sketch(nn.Sequential(nn.Linear(4, 3), nn.ReLU())) == ()
    assert alike((), ())
    assert not alike(sketch(chain()), ())
    assert not alike((), sketch(chain()))


@pytest.mark.parametrize("make", [chain, TwoInputs])
def test_the_same_values_give_the_same_numbers_whatever_is_learned(make: type[nn.Module]) -> None:
    module, again = make(), make()
    with torch.no_grad():
        for p in again.parameters():
            if p.requires_grad:
                p.add_(1.0)
    assert len(sketch(module)) == NUMBERS
    assert sketch(module) == sketch(again)


@pytest.mark.parametrize(
    "change",
    [
        lambda v: v * 1.05,
        lambda v: v.flip(0),
    ],
)
def test_changed_values_are_noticed(change) -> None:
    module = frozen(nn.Linear(64, 64))
    before = sketch(module)
    with torch.no_grad():
        module.weight.copy_(change(module.weight))
    assert not alike(before, sketch(module))


def test_rounding_is_not() -> None:
    module = frozen(nn.Linear(64, 64)).double()
    assert alike(sketch(module), sketch(module.float()))


@pytest.mark.parametrize("value", [-torch.finfo(torch.float32).max, float("-inf"), float("nan")])
def test_a_mask_hides_no_weights(value: float) -> None:
    made = []
    for seed in (0, 1):
        seeded(seed)
        module = frozen(nn.Linear(64, 64))
        module.register_buffer("mask", torch.full((512, 512), value).triu(1))
        made.append(sketch(module))
    assert all(torch.tensor(each).isfinite().all() for each in made)
    assert not alike(*made)


def test_the_signs_are_those_of_every_machine() -> None:
    """More values than fit in one piece, and a last piece that does not fill its last word."""
    module = nn.Module()
    module.register_buffer("ones", torch.ones(2**18 + 7))
    module.trained = nn.Linear(1, 1)
    norm, *sums = sketch(module)
    unit = float(torch.tensor(1e4, dtype=torch.float64).asinh())
    assert norm == pytest.approx(unit * (2**18 + 7) ** 0.5)
    assert [round(each / unit) for each in sums] == [-329, 137, -447, -375]


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(ConfigError, match=r"model\.name = 'resnet'.*mnist-cnn.*mlp.*package\.module:function"):
        build("resnet", MNIST, 10, 0)


def test_the_probe_leaves_no_trace(users: str) -> None:
    model = build(f"{users}:Normed", DIGITS, 10, 0)
    assert model.training
    assert int(model.layers[1].num_batches_tracked) == 0


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("three", r"must take \(input_shape, classes\) or no arguments"),
        ("frozen", "no trainable parameters"),
        ("narrow", r"\(batch, 10\).*gave \(3, 9\)"),
        ("misfit", r"cannot take the data's records, of shape \(1, 8, 8\)"),
        ("fails", r"failed in its own code \(RuntimeError: no, at fedspa_users_model\.py:\d+\)"),
        ("text", "returned a str"),
        ("named", "returns a str"),
    ],
)
def test_what_a_user_may_get_wrong(users: str, function: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        fitting(f"{users}:{function}")
    assert str(caught.value).startswith(f"model.name = '{users}:{function}'")
    assert "\n" not in str(caught.value)


def test_another_draw_is_another_body() -> None:
    made = []
    for seed in range(4):
        seeded(seed)
        made.append(sketch(drawn()))
    assert not any(alike(a, b) for i, a in enumerate(made) for b in made[:i])
