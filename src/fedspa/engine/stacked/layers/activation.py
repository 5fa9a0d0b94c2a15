"""ReLU and tanh."""

from __future__ import annotations

import torch
from torch import Tensor

from fedspa.engine import chain
from fedspa.engine.stacked.layers.base import Kept, Layer


class Activation(Layer):
    def __init__(self, layer: chain.Activation, inputs: int) -> None:
        super().__init__(inputs, inputs)
        self.kind = layer.kind

    def forward(self, theta: Tensor, x: Tensor) -> tuple[Tensor, Kept]:
        out = x.relu() if self.kind == "relu" else x.tanh()
        return out, (out,)

    def backward(self, theta: Tensor, kept: Kept, delta: Tensor) -> Tensor:
        return self.derivative(kept[0], delta)

    def derivative(self, out: Tensor, delta: Tensor) -> Tensor:
        if self.kind == "relu":
            back: Tensor = torch.ops.aten.threshold_backward(delta, out, 0)
            return back
        return delta * (1 - out * out)
