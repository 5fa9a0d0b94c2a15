"""GroupNorm and LayerNorm."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedspa.engine import chain
from fedspa.engine.stacked.layers.base import Kept, Layer, Stage, Unit, bias_behind, power

# Values of a group that a program holds at a time.
_GROUP = 1024


class Norm(Layer):
    launched = True

    def __init__(self, layer: chain.Norm, inputs: int) -> None:
        super().__init__(inputs, inputs)
        bias_behind(layer.weight, layer.parameters, layer.bias)
        self.norm, self.size = layer, layer.size
        self.start = layer.bias if layer.weight is None else layer.weight

    def forward(self, theta: Tensor, x: Tensor) -> tuple[Tensor, Kept]:
        """Keeps the normalized values x̂ before weight and bias, and what each group was scaled by."""
        groups = x.view(len(x), self.norm.groups, -1)
        centred = groups - groups.mean(dim=2, keepdim=True)
        scales = (centred.square().mean(dim=2, keepdim=True) + self.norm.epsilon).rsqrt()
        normal = (centred * scales).flatten(1)
        out = normal if self.norm.weight is None else normal * self._spread(theta, self.norm.weight)
        return out if self.norm.bias is None else out + self._spread(theta, self.norm.bias), (normal, scales)

    def backward(self, theta: Tensor, kept: Kept, delta: Tensor) -> Tensor:
        normal, scales = kept
        if self.norm.weight is not None:
            delta = delta * self._spread(theta, self.norm.weight)
        shape = (len(delta), self.norm.groups, -1)
        delta, normal = delta.view(shape), normal.view(shape)
        along = normal * (delta * normal).mean(dim=2, keepdim=True)
        return (scales * (delta - delta.mean(dim=2, keepdim=True) - along)).flatten(1)

    def gradients(self, kept: Kept, delta: Tensor) -> Tensor:
        shape = (len(delta), self.norm.outer, self.norm.parameters, self.norm.inner)
        weights, biases = (delta * kept[0]).view(shape).sum(dim=(1, 3)), delta.view(shape).sum(dim=(1, 3))
        parts = [weights] if self.norm.weight is not None else []
        return torch.cat([*parts, biases] if self.norm.bias is not None else parts, dim=1)

    def _spread(self, theta: Tensor, offset: int) -> Tensor:
        """The weight or bias of every input."""
        parameters = theta[offset : offset + self.norm.parameters].view(1, -1, 1)
        return parameters.expand(self.norm.outer, -1, self.norm.inner).reshape(1, -1)

    def unit(self, stage: Stage) -> Unit:
        return NormUnit(self, stage)


class NormUnit(Unit):
    def __init__(self, layer: Norm, stage: Stage) -> None:
        super().__init__(layer, stage)
        self._norm = norm = layer.norm
        capacity = stage.shape.capacity
        self._out, self._normal, self._back = (stage.make(capacity, layer.inputs) for _ in range(3))
        self._scales = stage.make(capacity, norm.groups)
        if layer.size:
            programs = layer.size // norm.parameters * math.ceil(norm.parameters / 16)
            self.share_out((16, 0, power(norm.outer * norm.inner, 16, 64), 4, 3), programs, 16)
        size = norm.inputs // norm.groups
        self._geometry = {
            "GROUPS": norm.groups, "SIZE": size, "PARAMETERS": norm.parameters, "INNER": norm.inner,
            "WEIGHT": norm.weight is not None, "BLOCK": min(_GROUP, 1 << max(4, (size - 1).bit_length())),
        }  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        self.x = x
        held, s, norm = self.stage.held, self.stage.shape, self._norm
        self.kernels.normalize[(norm.groups, s.capacity, s.agents)](
            *(x, held.theta, self._out, self._normal, self._scales, held.counts, held.step),
            *(s.agents, s.capacity, s.dimension, norm.weight or 0, norm.bias or 0),
            **self._geometry, EPSILON=norm.epsilon, BIAS=norm.bias is not None,
        )  # fmt: skip
        return self._out

    def backward(self, delta: Tensor) -> Tensor:
        held, s, norm = self.stage.held, self.stage.shape, self._norm
        self.kernels.normalize_backward[(norm.groups, s.capacity, s.agents)](
            *(delta, held.theta, self._normal, self._scales, self._back, held.counts, held.step),
            *(s.agents, s.capacity, s.dimension, norm.weight or 0), **self._geometry,
        )  # fmt: skip
        return self.to_before(self.flat(self._back))

    def sum(self, mode: object, masked: bool) -> None:
        norm, (outputs, _, inner, *_) = self._norm, self.sum_blocks
        self.launch_sum(
            self.kernels.norm_sums, self._normal, mode, masked,
            OUTER=norm.outer, PARAMETERS=norm.parameters, INNER=norm.inner, WEIGHT=norm.weight is not None,
            KINDS=norm.size // norm.parameters, BO=outputs, BQ=inner,
        )  # fmt: skip


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
