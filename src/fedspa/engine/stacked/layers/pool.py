"""Max and mean over windows of an image."""

from __future__ import annotations

import torch
from torch import Tensor

from fedspa.engine import chain
from fedspa.engine.stacked.layers.base import Kept, Layer

aten = torch.ops.aten


class Pool(Layer):
    def __init__(self, layer: chain.Pool, inputs: int) -> None:
        super().__init__(inputs, layer.image[0] * layer.out[0] * layer.out[1])
        self._layer, self.halves = layer, layer.halves
        self._window = (layer.kernel, layer.stride, layer.padding)

    def forward(self, theta: Tensor, x: Tensor) -> tuple[Tensor, Kept]:
        image = x.view(-1, *self._layer.image)
        if self._layer.kind == "max":
            out, where = aten.max_pool2d_with_indices(image, *self._window)
            return out.flatten(1), (x, where)
        return aten.avg_pool2d(image, *self._window, False, self._layer.count_padding).flatten(1), (x,)

    def backward(self, theta: Tensor, kept: Kept, delta: Tensor) -> Tensor:
        image = kept[0].reshape(-1, *self._layer.image)
        delta = delta.view(-1, self._layer.image[0], *self._layer.out)
        if self._layer.kind == "max":
            back: Tensor = aten.max_pool2d_with_indices_backward(delta, image, *self._window, (1, 1), False, kept[1])
        else:
            back = aten.avg_pool2d_backward(delta, image, *self._window, False, self._layer.count_padding, None)
        return back.flatten(1)


def unpool(planes: int, sides: tuple[int, int], winner: Tensor, delta: Tensor) -> Tensor:
    """δ of 2 × 2 windows' maxima → δ of the windows, [b, planes · sides]; `winner` is each maximum's place (0 to 3)."""
    windows = (-1, planes, sides[0] // 2, 1, sides[1] // 2, 1)
    place = torch.arange(4, device=delta.device).view(1, 1, 1, 2, 1, 2)
    return torch.where(winner.view(windows) == place, delta.view(windows), 0.0).flatten(1)
