"""What a step does with per-example gradients, on a GPU by kernels and on a CPU by their twins."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedspa.engine.stacked.buffers import RoundBuffers, Shape
from fedspa.engine.stacked.chacha import GROUP, LANES, ChaChaNoise
from fedspa.engine.traced.program import Layer
from fedspa.mechanisms.base import LARGEST_CLIP, SMALLEST_CLIP
from fedspa.mechanisms.clipping import CLIP_MARGIN
from fedspa.mechanisms.gaussian.plan import CLIP_QUANTILE, CLIP_RATE

TILE = 2048
# Layers up to this size are taken as one: a kernel's start costs more than to copy them together.
_SMALL = 8192


class Made:
    """A layer's gradients in a block: values [agents, examples, size], or of tokens [agents, examples, n, features]."""

    def __init__(self, layer: Dense | OfTokens, values: Tensor, tokens: Tensor | None = None) -> None:
        self.layer, self.values, self.tokens = layer, values, tokens

    @property
    def size(self) -> int:
        """Values of an example."""
        return math.prod(self.values.shape[2:])

    @property
    def tiles(self) -> int:
        return math.ceil(self.size / TILE)

    @property
    def mask(self) -> Tensor | None:
        """What is not yet cut."""
        return None if self.tokens is not None else self.layer.mask


class _Masked:
    """`coordinates` says for each place of what the program makes which coordinate of θ it is."""

    def __init__(self, coordinates: Tensor, shape: Shape, device: torch.device) -> None:
        self.coordinates, self.size = coordinates.to(device), len(coordinates)
        self.mask = torch.zeros(shape.agents, self.size, dtype=torch.uint8, device=device) if shape.masked else None

    def load(self, masks: Tensor) -> None:
        assert self.mask is not None
        self.mask.copy_(masks.index_select(1, self.coordinates))


class Dense(_Masked):
    """One layer, or several small ones side by side."""

    def __init__(self, numbers: Sequence[int], coordinates: Tensor, shape: Shape, device: torch.device) -> None:
        super().__init__(coordinates, shape, device)
        self._numbers = numbers

    def part(self, made: Sequence[Any], agents: int, examples: int) -> Made:
        """Lines [agents, examples, …] of what the program made."""
        lines = [made[number].reshape(agents, examples, -1) for number in self._numbers]
        return Made(self, lines[0].contiguous() if len(lines) == 1 else torch.cat(lines, 2))


class OfTokens(_Masked):
    """An Embedding. `whole` are its sums, in whole numbers."""

    def __init__(self, number: int, words: int, coordinates: Tensor, shape: Shape, device: torch.device) -> None:
        super().__init__(coordinates, shape, device)
        self._number, self.words = number, words
        self.start = int(coordinates[0])
        self.whole = torch.zeros(shape.agents, words, self.size // words, dtype=torch.int64, device=device)

    def part(self, made: Sequence[Any], agents: int, examples: int) -> Made:
        """Of each word that an example has, the sum of its deltas, at its first token."""
        deltas, tokens = made[self._number]
        tokens = (tokens.reshape(agents, examples, -1) % self.words).contiguous()
        lines = tokens.flatten(0, 1)
        same = lines.unsqueeze(2) == lines.unsqueeze(1)
        values = torch.bmm(same.to(deltas.dtype), deltas.reshape(len(lines), lines.shape[1], -1))
        kept = ~torch.tril(same, -1).any(2).unsqueeze(2)
        if self.mask is not None:
            agent = torch.arange(agents, device=lines.device).view(-1, 1, 1)
            kept = kept & (self.mask.view(agents, self.words, -1)[agent, tokens].flatten(0, 1) != 0)
        values = torch.where(kept, values, 0.0).contiguous()
        return Made(self, values.view(agents, examples, *values.shape[1:]), tokens)


def placed_layers(layers: Sequence[Layer], shape: Shape, device: torch.device) -> list[Dense | OfTokens]:
    """All layers of a program, in no particular order."""
    found: list[Dense | OfTokens] = []
    small: list[tuple[int, Tensor]] = []
    start = 0
    for number, layer in enumerate(layers):
        coordinates = torch.empty_like(layer.order)
        coordinates[layer.order] = torch.arange(start, start + len(layer.order))
        start += len(layer.order)
        if layer.words is not None:
            found.append(OfTokens(number, layer.words, coordinates, shape, device))
        elif len(coordinates) > _SMALL:
            found.append(Dense([number], coordinates, shape, device))
        else:
            small.append((number, coordinates))
    if small:
        numbers, parts = zip(*small)
        found.append(Dense(numbers, torch.cat(parts), shape, device))
    return found


_BLOCK, _ROWS, _COLUMNS = 512, 8, 256
_UNITS = 2.0**40  # whole numbers of an Embedding's sums, to the clip value


class Steps:
    def __init__(self, held: RoundBuffers, shape: Shape, sums: Tensor, shares: Tensor) -> None:
        self._held, self._shape, self._sums, self._shares = held, shape, sums, shares
        self._table = torch.tensor([[0, shape.dimension, 0, 1]], dtype=torch.int64, device=sums.device)
        self._on_gpu = sums.is_cuda

    def draw_noise(self) -> None:
        held, s = self._held, self._shape
        if not self._on_gpu:
            held.noise.copy_(noise(held.keys, int(held.step), s.active))
            return
        from fedspa.engine.stacked import kernels

        grid = (math.ceil(s.active / GROUP) + 1, s.agents)
        kernels.noise[grid](held.keys, held.step, held.noise, s.active, LANES=LANES, num_warps=2)

    def measured(self, parts: Sequence[Made], examples: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of each example [agents, examples]: Σ g² of its active gradients, how many are not zero, or above a clip."""
        s, clips = self._shape, self._held.clips
        if not self._on_gpu:
            found = [measure(part.values.flatten(2), part.mask, clips, s.quantile) for part in parts]
            squares, alive, above = (torch.stack(each).sum(0) for each in zip(*found))
            return squares, alive, above
        from fedspa.engine.traced import gpu_kernels

        tiles = sum(part.tiles for part in parts)
        squares, alive, above = (
            torch.zeros(s.agents, examples, tiles if wanted else 1, dtype=torch.float64, device=clips.device)
            for wanted in (True, s.quantile, s.quantile)
        )
        first = 0
        for part in parts:
            mask = part.mask
            gpu_kernels.measure[(part.tiles, s.agents * examples)](
                *(part.values, part.values if mask is None else mask, clips, squares, alive, above),
                *(part.size, examples, tiles, first),
                MASKED=mask is not None, COUNT=s.quantile, BLOCK=TILE,
            )  # fmt: skip
            first += part.tiles
        return squares.sum(2), alive.sum(2), above.sum(2)

    def add(self, parts: Sequence[Made], factors: Tensor, *, more: bool) -> None:
        """Clipped gradients into the sums; `more` where these hold a block already."""
        s = self._shape
        bounds, clamp = self._held.clips * (1 - CLIP_MARGIN), s.clip == "coordinate"
        units = _UNITS / self._held.clips
        for part in parts:
            layer = part.layer
            if part.tokens is None:
                self._add_dense(part, factors, bounds, clamp, more)
                continue
            assert isinstance(layer, OfTokens)
            if not more:
                layer.whole.zero_()
            if self._on_gpu:
                from fedspa.engine.traced import gpu_kernels

                gpu_kernels.scatter[(math.ceil(part.size / _BLOCK), factors.numel())](
                    *(part.values, part.tokens, factors, bounds, units, layer.whole),
                    *(factors.shape[1], layer.words, part.values.shape[3], part.size),
                    CLAMP=clamp, BLOCK=_BLOCK,
                )  # fmt: skip
            else:
                layer.whole += scatter(part.values, part.tokens, factors, bounds, units, layer.words, clamp)
            place = self._sums[:, layer.start : layer.start + layer.size]
            place.copy_(layer.whole.flatten(1).double() / units.unsqueeze(1))

    def _add_dense(self, part: Made, factors: Tensor, bounds: Tensor, clamp: bool, more: bool) -> None:
        layer, s = part.layer, self._shape
        if not self._on_gpu:
            found = add(part.values, factors, bounds, clamp)
            found = found + self._sums[:, layer.coordinates] if more else found
            self._sums.index_copy_(1, layer.coordinates, found)
            return
        from fedspa.engine.traced import gpu_kernels

        gpu_kernels.add[(math.ceil(part.size / _COLUMNS), s.agents)](
            *(part.values, factors, bounds, layer.coordinates, self._sums),
            *(part.size, factors.shape[1], s.dimension),
            CLAMP=clamp, MORE=more, ROWS=_ROWS, BLOCK=_COLUMNS,
        )  # fmt: skip

    def step(self) -> None:
        """θ moves by the noisy sums, and the clip by the private quantile."""
        held, s = self._held, self._shape
        if not self._on_gpu:
            take_step(held, self._sums, masked=s.masked)
            if s.quantile:
                move_clip(held, self._shares)
            held.step.add_(1)
            return
        from fedspa.engine.stacked.stack import end_step

        end_step(held, s, self._sums, self._table, 1, self._shares)


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
