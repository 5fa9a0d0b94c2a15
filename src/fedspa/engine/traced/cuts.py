"""What becomes of a layer's per-example gradients: cut to the mask, as parts that `mechanisms.parts` clips and adds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedspa.engine.traced.program import Layer
from fedspa.mechanisms.parts import Part


class Cuts:
    """One agent's mask, layer by layer. Columns of a row are the active coordinates in their order."""

    def __init__(self, layers: Sequence[Layer], coordinates: Tensor | None, device: torch.device) -> None:
        self._layers, self._device = layers, device
        sizes = [len(layer.order) for layer in layers]
        ends = torch.tensor(sizes, device=device).cumsum(0)
        self.width = int(ends[-1]) if coordinates is None else len(coordinates)
        firsts = [0, *ends.tolist()]
        bounds = firsts if coordinates is None else [0, *torch.searchsorted(coordinates, ends).tolist()]
        self._first = bounds[:-1]
        self._wanted = [
            None if coordinates is None else coordinates[low:high] - first
            for low, high, first in zip(bounds, bounds[1:], firsts)
        ]
        # Where in what a program makes for an example the active coordinates lie; None where they are all, in order.
        self._where = [_where(layer.order.to(device), wanted) for layer, wanted in zip(layers, self._wanted)]
        self._columns: dict[int, Tensor] = {}

    def take(self, number: int, size: int, made: Any) -> Part:
        """Of layer `number`, for `size` examples."""
        first = self._first[number]
        if self._layers[number].words is not None:
            return self._of_tokens(number, size, *made)
        where = self._where[number]
        rows = made.reshape(size, -1)
        return Part(rows.clone() if where is None else rows.index_select(1, where), first)

    def _of_tokens(self, number: int, size: int, deltas: Tensor, tokens: Tensor) -> Part:
        """An example's gradient of an Embedding has a row for each word that it has: the sum of that word's deltas."""
        layer = self._layers[number]
        assert layer.words is not None
        tokens = tokens.reshape(size, -1) % layer.words  # each example's were moved beyond those of the one before
        deltas = deltas.reshape(size, tokens.shape[1], -1)
        same = tokens.unsqueeze(2) == tokens.unsqueeze(1)
        first = ~torch.tril(same, -1).any(2)  # of its kind, in its example
        values = torch.bmm(same.to(deltas.dtype), deltas)
        columns = self._columns_of(number, layer.words)[tokens]
        dropped = ~first.unsqueeze(2) | (columns == self.width)
        return Part(values.masked_fill_(dropped, 0).flatten(1), columns.masked_fill(dropped, self.width).flatten(1))

    def _columns_of(self, number: int, words: int) -> Tensor:
        """[words, features]: the column of each of an Embedding's coordinates; `width` where it is not active."""
        if number not in self._columns:
            wanted, first = self._wanted[number], self._first[number]
            size = len(self._layers[number].order)
            columns = torch.full((size,), self.width, device=self._device)
            columns[slice(None) if wanted is None else wanted] = torch.arange(
                first, first + (size if wanted is None else len(wanted)), device=self._device
            )
            self._columns[number] = columns.view(words, -1)
        return self._columns[number]


def take(size: int, cuts: Cuts, number: int, made: Any) -> Part:
    """What a program calls for each layer."""
    return cuts.take(number, size, made)


def as_made(size: int, cuts: None, number: int, made: Any) -> Any:
    """In place of `take`, where all agents are cut together."""
    return made


def _where(order: Tensor, wanted: Tensor | None) -> Tensor | None:
    if wanted is not None:
        return order[wanted]
    return None if torch.equal(order, torch.arange(len(order), device=order.device)) else order
