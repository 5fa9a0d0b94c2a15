"""A public first θ for convolutional networks: oriented edges, their competition, and random projections.

The server sends θ₀ before any record is seen, so any choice that no data went into is free. Under noise it matters
where training starts, most of all where the mask is `fixed`: coordinates outside it keep their first value for good.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fedspa.errors import ConfigError
from fedspa.learning.forward import torch_threads
from fedspa.learning.models import build


def mnist_cnn(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Build the paper's CNN for MNIST with oriented first values, drawn from run.seed; for `model.name` of a config."""
    return _built("mnist-cnn", input_shape, classes)


def cifar10_cnn(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Build the paper's CNN for CIFAR-10 likewise."""
    return _built("cifar10-cnn", input_shape, classes)


def _built(name: str, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    seed = torch.default_generator.initial_seed()
    model = build(name, input_shape, classes, seed)
    oriented(model, seed)
    return model


def oriented(model: nn.Module, seed: int) -> None:
    """Write the first values into a chain of convolutions and linear layers.

    First convolution: channel i is the derivative of a Gaussian in direction i of a full turn. Later convolutions: a
    Gaussian average of one input channel, in further rounds over the channels less those of the neighbouring
    directions. Linear layers: orthogonal rows (from `seed`), zeros in the last one. Biases are 0.
    """
    convolutions = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d)]
    linear = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    if not convolutions or not linear or any(layer.groups != 1 for layer in convolutions):
        raise ConfigError("oriented first values are for models of plain convolutions and linear layers")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad(), torch_threads(1):  # how a QR decomposition rounds depends on the number of threads
        for name, values in model.named_parameters():
            if name.endswith("bias"):
                values.zero_()
        convolutions[0].weight.copy_(_edges(convolutions[0].weight))
        for convolution in convolutions[1:]:
            convolution.weight.copy_(_competition(convolution.weight))
        for hidden in linear[:-1]:
            gain = math.sqrt(max(1.0, hidden.in_features / hidden.out_features))
            nn.init.orthogonal_(hidden.weight, gain=gain, generator=generator)
        linear[-1].weight.zero_()


def _edges(weight: Tensor) -> Tensor:
    count, inputs, height, width = weight.shape
    down, across, window = _window(height, width)
    edges = []
    for i in range(count):
        turn = 2 * math.pi * i / count
        edge = (across * math.cos(turn) + down * math.sin(turn)) * window
        edges.append(2 * edge / (edge.abs().sum() * inputs))
    return torch.stack(edges)[:, None].expand(count, inputs, height, width)


def _competition(weight: Tensor) -> Tensor:
    count, inputs, height, width = weight.shape
    window = _window(height, width)[2]
    window = window / window.sum()
    made = torch.zeros(count, inputs, height, width)
    for j in range(count):
        turn, own = divmod(j, inputs)
        if turn == 0:
            made[j, own] = window
        else:
            made[j, own] = 2 * window
            made[j, (own + turn + 1) % inputs] -= window
            made[j, (own - turn - 1) % inputs] -= window
    return made


def _window(height: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Offsets down and across from the middle, and a Gaussian of a fifth of the side."""
    down = (torch.arange(height) - (height - 1) / 2)[:, None].expand(height, width)
    across = (torch.arange(width) - (width - 1) / 2)[None, :].expand(height, width)
    window = torch.exp(-(down**2) / (2 * (height / 5) ** 2) - across**2 / (2 * (width / 5) ** 2))
    return down, across, window
