"""A residual net with BatchNorm, as torchvision's are: refused, mended in one call, and trained by a federation.

python train.py
"""

from __future__ import annotations

import argparse
import logging
import sys

import torch
from torch import Tensor, nn

import fedspa


class Block(nn.Module):
    """Two convolutions, each followed by BatchNorm, and a shortcut around them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))).relu()


def residual_net(classes: int = 10, channels: int = 8) -> nn.Module:
    stem = [nn.Conv2d(1, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()]
    return nn.Sequential(*stem, Block(channels), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(channels * 16, classes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    rounds = parser.parse_args().rounds
    torch.manual_seed(0)
    net = residual_net()
    print("what keeps it from being trained privately:")
    for problem in fedspa.check(net, torch.rand(4, 1, 8, 8)):
        print(" ", problem)

    print("fedspa.fix:")
    logging.basicConfig(level=logging.INFO, format="  %(message)s", stream=sys.stdout)  # a line for each replaced layer
    net = fedspa.fix(net)
    assert not fedspa.check(net, torch.rand(4, 1, 8, 8))

    result = fedspa.run(
        {
            "federation": {"agents": 10, "per_round": 10, "rounds": rounds},
            "algorithm": {"compression": 0.3, "local_steps": 5, "batch": 36, "local_lr": 0.5, "server": "average"},
            "privacy": {"epsilon": 4.0, "delta": 1e-3, "clip_value": 0.5},
        },
        module=net,
        on_round=lambda metrics: print(f"round {metrics.round + 1}: accuracy {metrics.accuracy:.1%}"),
    )
    print(result)
    print("report:", result.folder / "report.html")


if __name__ == "__main__":
    main()
