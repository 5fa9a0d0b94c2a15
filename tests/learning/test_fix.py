"""A module with its unsound layers replaced: what is kept, what is said, and that it then trains."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import fedspa
from fedspa.errors import ConfigError
from fedspa.learning.layers import check_layers


def logged(caplog: pytest.LogCaptureFixture, module: nn.Module) -> tuple[nn.Module, list[str]]:
    """The fixed module, and what was logged of it."""
    caplog.clear()
    with caplog.at_level("INFO", "fedspa"):
        fixed = fedspa.fix(module)
    return fixed, [record.getMessage() for record in caplog.records]


class Basic(nn.Module):
    """A block of a ResNet."""

    def __init__(self, before: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2, self.bn2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = nn.Sequential(nn.Conv2d(before, channels, 1, stride, bias=False), nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(out + self.downsample(x))  # type: ignore[no-any-return]


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.layer1, self.layer2 = nn.Sequential(Basic(16, 16, 1), Basic(16, 16, 1)), nn.Sequential(Basic(16, 40, 2))
        self.fc = nn.Linear(40, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer2(self.layer1(torch.relu(self.bn1(self.conv1(x)))))
        return self.fc(x.mean((2, 3)))  # type: ignore[no-any-return]


def test_a_residual_net_is_fixed_in_one_call(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    module, x = ResNet(), torch.rand(3, 3, 8, 8)
    nn.init.normal_(module.layer1[0].bn1.weight)
    module.layer1[0].bn2.bias.requires_grad_(False)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    assert len(fedspa.check(module, x)) == 10
    fixed, changes = logged(caplog, module)
    assert fedspa.check(fixed, x) == []
    check_layers(fixed)
    assert len(changes) == 10
    said = "layer1.0.bn1: BatchNorm2d(16) became GroupNorm(4, 16); weight and bias kept, running statistics dropped"
    assert said in changes
    assert any("BatchNorm2d(40) became GroupNorm(10, 40)" in line for line in changes)
    # Weights, frozen parts and names stay; the module that was given is untouched.
    kept = dict(fixed.named_parameters())
    assert list(kept) == [name for name, _ in module.named_parameters()]
    for name, parameter in module.named_parameters():
        assert torch.equal(kept[name], parameter)
        assert kept[name] is not parameter
        assert kept[name].requires_grad == parameter.requires_grad
    assert isinstance(module.layer1[0].bn1, nn.BatchNorm2d)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    fixed(x).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in fixed.parameters() if p.requires_grad)


@pytest.mark.parametrize("shape", [(5, 6), (5, 6, 7)])
def test_a_batch_norm_of_plain_features_keeps_what_they_say(shape: tuple[int, ...]) -> None:
    """In groups of one feature each, every output would be the bias."""
    torch.manual_seed(0)
    fixed = fedspa.fix(nn.BatchNorm1d(6))
    x = torch.rand(shape)
    out = fixed(x)
    assert len(out[:, 0].flatten().unique()) == out[:, 0].numel()
    order = x.flatten(1).argsort(1)
    assert torch.equal(out.flatten(1).argsort(1), order)


def test_a_layer_in_two_places_stays_one(caplog: pytest.LogCaptureFixture) -> None:
    norm = nn.BatchNorm1d(4)
    fixed, changes = logged(caplog, nn.Sequential(nn.Linear(4, 4), norm, nn.Sequential(nn.Linear(4, 4), norm)))
    assert isinstance(fixed[1], nn.GroupNorm)
    assert fixed[1] is fixed[2][1]
    assert len(changes) == 1


@pytest.mark.filterwarnings("ignore:.*spectral_norm")
def test_other_layers_that_keep_something_are_switched_off(caplog: pytest.LogCaptureFixture) -> None:
    module = nn.Sequential(
        nn.Embedding(9, 4, max_norm=0.5),
        nn.InstanceNorm1d(6, track_running_stats=True),
        parametrizations.spectral_norm(nn.Linear(4, 4)),
        nn.utils.spectral_norm(nn.Linear(4, 3)),
    )
    x = torch.randint(9, (5, 6))
    assert [problem.layer for problem in fedspa.check(module, x)] == ["0", "1", "2", "3"]
    fixed, changes = logged(caplog, module)
    assert fedspa.check(fixed, x) == []
    assert changes[0] == "0: Embedding has max_norm = None instead of 0.5"
    assert changes[1] == "1: InstanceNorm1d(6) keeps no running statistics any more"
    assert all("spectral norm's estimate stays as it is" in line for line in changes[2:])
    assert len(changes) == 4
    before = {name: value.clone() for name, value in fixed.state_dict().items()}
    fixed(x)
    assert all(torch.equal(value, before[name]) for name, value in fixed.state_dict().items())


class Activated(nn.BatchNorm2d):
    """With a forward pass that no replacement knows."""

    def forward(self, input: Tensor) -> Tensor:
        return torch.relu(super().forward(input))


def test_what_cannot_be_fixed_is_left_for_the_check(caplog: pytest.LogCaptureFixture) -> None:
    hooked = nn.BatchNorm2d(4)
    hooked.register_forward_hook(lambda module, inputs, output: 2 * output)
    module = nn.Sequential(nn.Conv2d(1, 4, 1), Activated(4), hooked, nn.LazyLinear(3))
    fixed, changes = logged(caplog, module)
    assert changes == []
    assert [problem.layer for problem in fedspa.check(fixed)] == ["1", "2", "3"]
    assert all("use GroupNorm or LayerNorm instead" in problem.fix for problem in fedspa.check(fixed)[:2])


class NormAct(nn.BatchNorm2d):
    """As timm's BatchNormAct2d: norm, dropout and activation in one layer."""

    def __init__(self, channels: int, drop: nn.Module, act: nn.Module) -> None:
        super().__init__(channels)
        self.drop, self.act = drop, act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.drop(super().forward(x)))  # type: ignore[no-any-return]


def test_a_norm_with_its_activation_keeps_it(caplog: pytest.LogCaptureFixture) -> None:
    module = nn.Sequential(nn.Conv2d(1, 8, 3), NormAct(8, nn.Dropout(0.1), nn.SiLU()), nn.Flatten(), nn.Linear(32, 3))
    x = torch.randn(2, 1, 4, 4)
    assert [(problem.layer, "fedspa.fix" in problem.fix) for problem in fedspa.check(module, x)] == [("1", True)]
    fixed, changes = logged(caplog, module)
    assert [type(layer) for layer in fixed[1].children()] == [nn.Dropout, nn.SiLU]
    assert fixed[1].act is not module[1].act
    assert fedspa.check(fixed, x) == []
    assert len(changes) == 1
    norm = nn.GroupNorm(2, 8)
    assert torch.equal(fixed.eval()[:2](x), nn.functional.silu(norm(fixed[0](x))))


def test_what_is_named_is_frozen_and_a_name_that_nothing_has_is_an_error() -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    assert fedspa.freeze(module, "0.weight", "bias") is module
    assert [name for name, each in module.named_parameters() if each.requires_grad] == ["1.weight"]
    with pytest.raises(ConfigError, match="'lora_A'"):
        fedspa.freeze(module, "lora_A")
