"""Filters that treat every place of a chunk of images alike: what features are made of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

DIRECTIONS = 8


def directions(image: Tensor) -> Tensor:
    """The gradient's length, shared out between the two nearest of 8 directions, in 8 channels (Sobel's filter)."""
    padded = functional.pad(image, (1, 1, 1, 1), mode="replicate")
    across, along = padded[..., 2:] - padded[..., :-2], padded[..., 2:, :] - padded[..., :-2, :]
    right = (across[..., :-2, :] + 2 * across[..., 1:-1, :] + across[..., 2:, :]) / 8
    down = (along[..., :-2] + 2 * along[..., 1:-1] + along[..., 2:]) / 8
    length = torch.sqrt(right**2 + down**2 + 1e-12)
    turn = torch.atan2(down, right) * (DIRECTIONS / (2 * math.pi))
    numbers = torch.arange(DIRECTIONS, device=image.device, dtype=image.dtype).view(1, -1, 1, 1)
    apart = (turn - torch.where(numbers > DIRECTIONS // 2, numbers - DIRECTIONS, numbers)).abs()
    return length * (1 - torch.minimum(apart, DIRECTIONS - apart)).clamp_min(0)


def blurred(image: Tensor, deviation: float) -> Tensor:
    kernel = gaussian(deviation)
    return filtered(filtered(image, kernel, 2), kernel, 3)


def filtered(maps: Tensor, kernel: Sequence[float], axis: Literal[2, 3], first: int = 0, step: int = 1) -> Tensor:
    """The kernel's weighted sums along an axis, zeros beyond its ends, at every `step`-th place from `first` on.

    Product by product: torch's convolutions of one channel take six times as long, and may round a place otherwise than
    its neighbour, which a product and a sum do not.
    """
    reach, side = len(kernel) // 2, maps.shape[axis]
    padded = functional.pad(maps, (0, 0, reach, reach) if axis == 2 else (reach, reach))
    parts = (padded.narrow(axis, first + tap, side - first) for tap in range(len(kernel)))
    total: Tensor | None = None
    for part, weight in zip(parts, kernel):
        weighted = (part[:, :, ::step] if axis == 2 else part[..., ::step]) * weight
        total = weighted if total is None else total.add_(weighted)
    assert total is not None
    return total


def gaussian(deviation: float) -> list[float]:
    reach = math.ceil(3 * deviation)
    weights = [math.exp(-(at**2) / (2 * deviation**2)) for at in range(-reach, reach + 1)]
    return [weight / sum(weights) for weight in weights]


def unit(flat: Tensor) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(flat, dim=1, keepdim=True)
    return flat / length.clamp_min(1e-6)
