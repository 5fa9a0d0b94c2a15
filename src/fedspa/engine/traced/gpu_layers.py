"""The layers of a stack: where the gradients that a program makes belong in θ, and which of them are active."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedspa.engine.stacked.buffers import Shape
from fedspa.engine.traced.program import Layer

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
