"""Random architectures for the comparison of engines with plain autograd: what rounding can do to a gradient."""

from __future__ import annotations

import random

import torch
from torch import Tensor, nn

CLASSES = 4


class Residual(nn.Module):
    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch = branch

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)  # type: ignore[no-any-return]


def random_net(seed: int) -> tuple[nn.Module, Tensor]:
    """Return a net, convolutional or dense, and records of its shape. Many of its derivatives jump where a value
    crosses zero or passes its neighbour, and its norms make little differences large."""
    draw = random.Random(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _image_net(draw) if draw.random() < 0.7 else _dense_net(draw)


def _activation(draw: random.Random) -> nn.Module:
    return draw.choice([nn.ReLU, nn.ReLU, nn.LeakyReLU, nn.Hardtanh, nn.GELU, nn.Tanh])()


def _dense_net(draw: random.Random) -> tuple[nn.Module, Tensor]:
    width, features = draw.choice([8, 24]), draw.choice([5, 16])
    layers: list[nn.Module] = [nn.Linear(features, width)]
    for _ in range(draw.randint(1, 8)):
        norm = draw.choice([nn.Identity(), nn.LayerNorm(width), nn.GroupNorm(4, width)])
        block = nn.Sequential(nn.Linear(width, width), norm, _activation(draw))
        layers.append(Residual(block) if draw.random() < 0.5 else block)
    x = torch.rand(4, features) if draw.random() < 0.5 else 20 * torch.randn(4, features)
    return nn.Sequential(*layers, nn.Linear(width, CLASSES)), x


def _image_net(draw: random.Random) -> tuple[nn.Module, Tensor]:
    width, channels, side = draw.choice([4, 8, 16]), draw.choice([1, 3]), draw.choice([8, 12])

    def norm() -> nn.Module:
        groups = draw.choice([1, 2, width // 4, width])
        return draw.choice([nn.GroupNorm(groups, width), nn.GroupNorm(width // 4, width), nn.Identity()])

    def convolution(inputs: int, kernel: int) -> nn.Module:
        return nn.Conv2d(inputs, width, kernel, padding=kernel // 2, bias=draw.random() < 0.5)

    layers: list[nn.Module] = [convolution(channels, 3), norm(), _activation(draw)]
    for _ in range(draw.randint(1, 6)):
        block = [convolution(width, draw.choice([1, 3, 5])), norm(), _activation(draw)]
        if draw.random() < 0.5:
            block += [convolution(width, 3), norm()]
        layers.append(Residual(nn.Sequential(*block)) if draw.random() < 0.6 else nn.Sequential(*block))
    pool = draw.choice([nn.MaxPool2d(2), nn.AvgPool2d(2), nn.MaxPool2d(3, 2, 1)])
    x = torch.rand(4, channels, side, side) if draw.random() < 0.7 else torch.randn(4, channels, side, side)
    return nn.Sequential(*layers, pool, nn.Flatten(), nn.LazyLinear(CLASSES)), x


def norm_resnet(seed: int) -> tuple[nn.Module, Tensor]:
    """Return a residual net with 4 channels per norm, and images in [0, 1]: among its 300,000 ReLUs some are so close
    to zero that rounding decides whether their derivative is 0 or 1."""

    def half() -> list[nn.Module]:
        return [nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.GroupNorm(4, 16)]

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        stem = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.GroupNorm(4, 16), nn.ReLU()]
        blocks = [nn.Sequential(Residual(nn.Sequential(*half(), nn.ReLU(), *half())), nn.ReLU()) for _ in range(9)]
        end = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, CLASSES)]
        return nn.Sequential(*stem, *blocks, *end), torch.rand(4, 3, 32, 32)
