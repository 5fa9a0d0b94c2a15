"""Each example's gradient by the layers' rules, in torch: all there is on a CPU, and the twin of the kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from fedspa.engine.stacked.layers.base import Layer


def loss_gradient(logits: Tensor, y: Tensor) -> Tensor:
    """δ of the cross-entropy of each example by itself."""
    return logits.softmax(dim=1) - functional.one_hot(y, logits.shape[1])


def example_gradients(layers: Sequence[Layer], theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Gradients of the examples, [b, d]."""
    x, tape = x.flatten(1), []
    for layer in layers:
        x, kept = layer.forward(theta, x)
        tape.append(kept)
    delta = loss_gradient(x, y)
    gradients = torch.empty(len(y), len(theta), dtype=theta.dtype, device=theta.device)
    lowest = next(i for i, layer in enumerate(layers) if layer.start is not None)
    for i in range(len(layers) - 1, lowest - 1, -1):
        layer = layers[i]
        if layer.start is not None:
            gradients[:, layer.start : layer.start + layer.size] = layer.gradients(tape[i], delta)
        if i > lowest:
            delta = layer.backward(theta, tape[i], delta)
    return gradients
