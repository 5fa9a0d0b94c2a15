"""Residual nets for images of 32 × 32, with GroupNorm: a private step has no BatchNorm, which mixes examples."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    """Two convolutions beside a way past them, which is a 1 × 1 convolution where shapes differ."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm_past: bool) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.first_norm = norm(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.second_norm = norm(outputs)
        self.past = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.past.append(nn.Conv2d(inputs, outputs, 1, stride, bias=False))
            if norm_past:
                self.past.append(norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = functional.relu(self.first_norm(self.first(x)))
        return functional.relu(self.second_norm(self.second(out)) + self.past(x))


class ResNet(nn.Module):
    def __init__(self, widths: tuple[int, ...], blocks: int, classes: int, norm_past: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, widths[0], 3, padding=1, bias=False)
        self.stem_norm = norm(widths[0])
        self.blocks = nn.Sequential(*stages(widths, blocks, norm_past))
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        out = self.blocks(functional.relu(self.stem_norm(self.stem(x))))
        return self.head(functional.adaptive_avg_pool2d(out, 1).flatten(1))  # type: ignore[no-any-return]


def stages(widths: tuple[int, ...], blocks: int, norm_past: bool) -> Iterator[Block]:
    """Every stage but the first halves the image in its first block."""
    inputs = widths[0]
    for stage, outputs in enumerate(widths):
        for block in range(blocks):
            yield Block(inputs, outputs, 2 if stage and not block else 1, norm_past)
            inputs = outputs


def norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(min(32, channels // 4), channels)


def resnet20() -> ResNet:
    return ResNet((16, 32, 64), blocks=3, classes=10, norm_past=False)


def resnet18() -> ResNet:
    return ResNet((64, 128, 256, 512), blocks=2, classes=10, norm_past=True)


def resnet18_head() -> ResNet:
    """A linear head on a frozen body."""
    net = resnet18().requires_grad_(False)
    net.head.requires_grad_()
    return net
