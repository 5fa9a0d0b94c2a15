"""Embedding: whole numbers to their lines of a weight."""

from __future__ import annotations

import math

from torch import Tensor

from fedspa.engine import chain
from fedspa.engine.stacked.layers.base import Kept, Layer, Stage, Unit, power


class Embedding(Layer):
    launched = only_first = True

    def __init__(self, layer: chain.Embedding, inputs: int) -> None:
        super().__init__(inputs, layer.tokens * layer.width)
        self.start = self._first = layer.weight
        self.size = layer.size
        self.words, self.width, self.tokens = layer.words, layer.width, layer.tokens

    def forward(self, theta: Tensor, x: Tensor) -> tuple[Tensor, Kept]:
        weight = theta[self._first : self._first + self.size].view(self.words, self.width)
        return weight[x.long()].flatten(1), (x,)

    def backward(self, theta: Tensor, kept: Kept, delta: Tensor) -> Tensor:
        return delta.new_zeros(len(delta), self.inputs)  # whole numbers do not move

    def gradients(self, kept: Kept, delta: Tensor) -> Tensor:
        """A word's uses are summed before anything is clipped."""
        (x,) = kept
        found = delta.new_zeros(len(x), self.words, self.width)
        places = x.long().unsqueeze(2).expand(-1, -1, self.width)
        return found.scatter_add_(1, places, delta.view(len(x), -1, self.width)).flatten(1)

    def readable(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        word = (x >= 0) & (x < self.words)  # NaN is none
        return x.where(word, 0), ~word.flatten(1).all(dim=1)

    def as_module_takes(self, x: Tensor) -> Tensor:
        return x.long()

    def unit(self, stage: Stage) -> Unit:
        return EmbeddingUnit(self, stage)


class EmbeddingUnit(Unit):
    def __init__(self, layer: Embedding, stage: Stage) -> None:
        super().__init__(layer, stage)
        self._embedding = layer
        self._out = stage.make(stage.shape.capacity, layer.outputs)
        across = power(layer.width, 16, 64)
        self.share_out((32, across, 0, 4, 3), math.ceil(layer.words / 32) * math.ceil(layer.width / across), 4)

    def forward(self, x: Tensor) -> Tensor:
        self.x = x
        held, s, layer = self.stage.held, self.stage.shape, self._embedding
        self.kernels.embed[(math.ceil(layer.outputs / 256), s.capacity, s.agents)](
            *(x, held.theta, self._out, held.counts, held.step, s.agents, s.capacity, s.dimension, layer.start),
            TOKENS=layer.tokens, WIDTH=layer.width, BLOCK=256,
        )  # fmt: skip
        return self._out

    def sum(self, mode: object, masked: bool) -> None:
        layer, (words, across, *_) = self._embedding, self.sum_blocks
        self.launch_sum(
            self.kernels.embedding_sums, self.x, mode, masked,
            WORDS=layer.words, WIDTH=layer.width, TOKENS=layer.tokens, BO=words, BJ=across,
        )  # fmt: skip
