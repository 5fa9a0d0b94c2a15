"""Plain SGD of ten agents at once: their convolutions as one grouped convolution, their linear layers as one bmm."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

AGENTS = 10


def grouped_sgd(
    layers: list[nn.Module],
    parameters: list[Tensor],
    batch: Callable[[], tuple[Tensor, Tensor]],
    learning_rate: float,
) -> Callable[[], int]:
    """A step of all agents; `parameters` are theirs (`stacked`) and are moved in place."""

    def step() -> int:
        drawn = [batch() for _ in range(AGENTS)]
        x = torch.cat([x for x, _ in drawn], dim=1)  # (B, agents · channels, ...)
        y = torch.cat([y for _, y in drawn])
        loss = functional.cross_entropy(forward(layers, parameters, x).flatten(0, 1), y, reduction="sum")
        gradients = torch.autograd.grad(loss / len(x), parameters)
        with torch.no_grad():
            torch._foreach_add_(parameters, gradients, alpha=-learning_rate)
        return AGENTS

    return step


def stacked(layers: list[nn.Module]) -> list[Tensor]:
    """The same start for every agent, in the layout that a layer's grouped form wants: (agents · outputs, …) for a
    convolution, (agents, inputs, outputs) for a linear layer."""
    found = []
    for layer in layers:
        for p in layer.parameters():
            if isinstance(layer, nn.Conv2d):
                many = p.detach().repeat(AGENTS, *([1] * (p.ndim - 1)))
            else:
                many = (p.detach().T if p.ndim == 2 else p.detach()[None]).repeat(AGENTS, 1, 1)
            found.append(many.requires_grad_())
    return found


def forward(layers: list[nn.Module], parameters: list[Tensor], x: Tensor) -> Tensor:
    """(B, agents · channels, height, width) to logits (agents, B, classes)."""
    left = iter(parameters)
    for layer in layers:
        if isinstance(layer, nn.Conv2d):
            x = functional.conv2d(x, next(left), next(left), layer.stride, layer.padding, groups=AGENTS)
        elif isinstance(layer, nn.Linear):
            weight, bias = next(left), next(left)
            x = torch.baddbmm(bias, x, weight)
        elif isinstance(layer, nn.Flatten):
            x = x.reshape(len(x), AGENTS, -1).transpose(0, 1)
        else:
            x = layer(x)
    return x
