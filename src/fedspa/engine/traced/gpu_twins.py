"""The kernels of `gpu_kernels.py` and of a step's end in plain torch, for machines without a GPU, and for tests."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedspa.engine.stacked.buffers import RoundBuffers
from fedspa.engine.stacked.chacha import ChaChaNoise
from fedspa.mechanisms.base import LARGEST_CLIP, SMALLEST_CLIP
from fedspa.mechanisms.gaussian.plan import CLIP_QUANTILE, CLIP_RATE


def measure(made: Tensor, mask: Tensor | None, clips: Tensor, count: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Of lines [agents, examples, size]: Σ g², how many are not zero, how many are above the clip."""
    g = made.double() if mask is None else torch.where(mask.unsqueeze(1) != 0, made.double(), 0.0)
    length = g.abs()
    alive, above = (length > 0), (length > clips.view(-1, 1, 1))
    return g.square().sum(2), alive.sum(2).double(), above.sum(2).double()


def add(made: Tensor, factors: Tensor, bounds: Tensor, clamp: bool) -> Tensor:
    """[agents, size] of lines [agents, examples, size]."""
    g, bound = made.double(), bounds.view(-1, 1, 1)
    g = torch.maximum(torch.minimum(g, bound), -bound) if clamp else g * factors.unsqueeze(2)
    return torch.where(factors.unsqueeze(2) != 0, g, 0.0).sum(1)


def scatter(
    values: Tensor, tokens: Tensor, factors: Tensor, bounds: Tensor, units: Tensor, words: int, clamp: bool
) -> Tensor:
    """[agents, words, features] whole numbers, of values [agents, examples, tokens, features]."""
    agents, examples, _, features = values.shape
    g, bound = values.double(), bounds.view(-1, 1, 1, 1)
    g = torch.maximum(torch.minimum(g, bound), -bound) if clamp else g * factors.view(agents, examples, 1, 1)
    whole = (g * units.view(-1, 1, 1, 1)).long()
    whole = torch.where(factors.view(agents, examples, 1, 1) != 0, whole, 0).flatten(1, 2)
    index = tokens.flatten(1).unsqueeze(2).expand(agents, whole.shape[1], features)
    return torch.zeros(agents, words, features, dtype=torch.int64).scatter_add_(1, index, whole)


def noise(keys: Tensor, step: int, active: int) -> Tensor:
    """Standard normals [agents, active + 1], the last one for the private quantile."""
    drawn = []
    for key in keys:
        stream = ChaChaNoise(key.numpy().tobytes())
        stream.start_step(step)
        drawn.append(np.concatenate([stream.gaussian(active), stream.gaussian(1)]))
    return torch.from_numpy(np.stack(drawn))


def take_step(held: RoundBuffers, sums: Tensor, *, masked: bool) -> None:
    """θ[ω] −= step size · (Σ clipped + noise)/B."""
    total = sums.gather(1, held.coordinates) if masked else sums
    mean = (total + (held.sigmas * held.clips).unsqueeze(1) * held.noise[:, :-1]) / held.batches.unsqueeze(1)
    move = (held.sizes.unsqueeze(1) * mean).float()
    held.theta.copy_(held.theta.scatter_add(1, held.coordinates, -move) if masked else held.theta - move)


def move_clip(held: RoundBuffers, shares: Tensor) -> None:
    counts = held.counts[int(held.step)]
    for agent, count in enumerate(counts.tolist()):
        noisy = (shares[agent, :count] - 0.5).sum() + held.count_sigmas[agent] * held.noise[agent, -1]
        share = 0.5 + noisy / held.batches[agent]
        moved = held.clips[agent] * torch.exp(-CLIP_RATE * (share - CLIP_QUANTILE))
        held.clips[agent] = moved.clamp(SMALLEST_CLIP, LARGEST_CLIP)
