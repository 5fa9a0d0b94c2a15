"""An nn.Module of one's own, with a skip connection and normalisation, trained by a federation through the Python API.

python train.py
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import fedspa


class Residual(nn.Module):
    """8 × 8 images: two convolutions with a shortcut around them, pooled, and a linear layer.

    GroupNorm normalises each record by itself. BatchNorm would mix records, so that no record's gradient exists, and
    is refused.
    """

    def __init__(self, classes: int, channels: int = 6) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, channels, 3, padding=1)
        self.norm = nn.GroupNorm(1, channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        self.out = nn.Linear(channels * 16, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        x = x + self.second(self.norm(x)).relu()
        return self.out(nn.functional.max_pool2d(x, 2).flatten(1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    torch.manual_seed(0)
    result = fedspa.run(
        {
            "federation": {"agents": 10, "per_round": 10, "rounds": rounds},
            "algorithm": {"compression": 0.3, "local_steps": 5, "batch": 36, "local_lr": 0.5, "server": "average"},
            "privacy": {"epsilon": 4.0, "delta": 1e-3, "clip_value": 0.5},
        },
        module=Residual(classes=10),
        on_round=lambda metrics: print(f"round {metrics.round + 1}: accuracy {metrics.accuracy:.1%}"),
    )
    summary = result.summary
    print(f"{summary['dimension']} parameters on the {summary['engine']} engine ({summary['engine_reason']})")
    print(result)

    image = torch.zeros(1, 1, 8, 8)
    print("the trained module is yours:", tuple(result.module(image).shape), "saved in", result.folder)


if __name__ == "__main__":
    main()
