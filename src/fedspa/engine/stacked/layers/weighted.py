"""Conv2d, and Linear as a convolution of one pixel: products over patches.

With δ [b, outputs, L] and patches [b, K, L], an example's weight gradient is δ·patchesᵀ. On a GPU a 2 × 2 max-pool and
an activation behind it are part of its kernels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fedspa.engine import chain
from fedspa.engine.stacked.layers.base import (
    Activation,
    Blocks,
    Kept,
    Layer,
    Pool,
    Stage,
    Unit,
    bias_behind,
    power,
    unpool,
)


class Weighted(Layer):
    """`pooled`: a 2 × 2 max-pool is fused to it. `activation`: the last thing it does."""

    launched = True

    def __init__(
        self, layer: chain.Weighted, inputs: int, pooled: bool = False, activation: Activation | None = None
    ) -> None:
        self.weighted, self.pooled, self.activation = layer, pooled, activation
        down, across = layer.out
        # Lines and columns of output that count: a pooling of an odd side leaves the last one out.
        self.out = (down // 2 * 2, across // 2 * 2) if pooled else (down, across)
        self.positions = self.out[0] * self.out[1]
        super().__init__(inputs, layer.outputs * self.positions // (4 if pooled else 1))
        self._weights = layer.outputs * layer.columns
        bias_behind(layer.weight, self._weights, layer.bias)
        self.start, self.size = layer.weight, layer.size

    def forward(self, theta: Tensor, x: Tensor) -> tuple[Tensor, Kept]:
        layer, weight = self.weighted, self._weight(theta)
        end = layer.weight + self._weights
        bias = None if layer.bias is None else theta[end : end + layer.outputs]
        if layer.one_pixel:
            return functional.linear(x, weight, bias), (x,)
        kernels = weight.view(layer.outputs, layer.channels, *layer.kernel)
        return functional.conv2d(self._image(x), kernels, bias, layer.stride, layer.padding).flatten(1), (x,)

    def backward(self, theta: Tensor, kept: Kept, delta: Tensor) -> Tensor:
        layer, weight = self.weighted, self._weight(theta)
        if layer.one_pixel:
            return delta @ weight
        shape = (len(delta), layer.channels, layer.height, layer.width)
        kernels = weight.view(layer.outputs, layer.channels, *layer.kernel)
        image = delta.view(-1, layer.outputs, *layer.out)
        window = (layer.stride, layer.padding, (1, 1), False, (0, 0), 1)
        back: Tensor = torch.ops.aten.convolution_backward(
            image, image.new_empty(shape), kernels, None, *window, (True, False, False)
        )[0]
        return back.flatten(1)

    def gradients(self, kept: Kept, delta: Tensor) -> Tensor:
        (x,), layer = kept, self.weighted
        if layer.one_pixel:
            weights, biases = delta.unsqueeze(2) * x.unsqueeze(1), delta
        else:
            patches = functional.unfold(self._image(x), layer.kernel, padding=layer.padding, stride=layer.stride)
            delta = delta.view(-1, layer.outputs, layer.positions)
            weights, biases = torch.bmm(delta, patches.transpose(1, 2)), delta.sum(dim=2)
        flat = weights.flatten(1)
        return flat if layer.bias is None else torch.cat([flat, biases], dim=1)

    def _weight(self, theta: Tensor) -> Tensor:
        first = self.weighted.weight
        return theta[first : first + self._weights].view(self.weighted.outputs, self.weighted.columns)

    def _image(self, x: Tensor) -> Tensor:
        return x.view(-1, self.weighted.channels, self.weighted.height, self.weighted.width)

    def fuse(self, following: Sequence[Layer]) -> tuple[Layer, int]:
        """A ReLU commutes with a max-pool. The net's last layer is never fused: its δ is the loss's."""
        pooled, activation, taken = False, None, 0
        for layer in following[:-1]:
            commutes = activation is None or activation.kind == "relu"
            if isinstance(layer, Pool) and layer.halves and not pooled and commutes:
                pooled = True
            elif isinstance(layer, Activation) and activation is None:
                activation = layer
            else:
                break
            taken += 1
        return Weighted(self.weighted, self.inputs, pooled, activation), taken

    def unit(self, stage: Stage) -> Unit:
        return WeightedUnit(self, stage)

    @property
    def by_taps(self) -> bool:
        """Whether its kernels read channels last, as whole vectors: there must be vectors of them, in and out."""
        layer = self.weighted
        return not layer.one_pixel and layer.stride == (1, 1) and layer.channels % 16 == layer.outputs % 16 == 0

    def blocks(self) -> tuple[Blocks, Blocks, Blocks]:
        """Of forward, backward and sums."""
        layer = self.weighted
        if layer.one_pixel:
            if layer.columns >= 512:
                forward = (64, 16, 128, 4, 3)
            else:
                forward = (32, 32, 128, 4, 3) if layer.columns >= 128 <= layer.outputs else (16, 16, 64, 4, 3)
            return forward, (16, 32, 128, 4, 3), (8, power(layer.columns + 1, 32, 128), 0, 2, 3)
        if self.by_taps:
            forward = (128, power(layer.outputs, 16, 128), 32 if layer.channels % 32 == 0 else 16, 8, 4)
            backward = (64, power(layer.channels, 16, 64), 32 if layer.outputs % 32 == 0 else 16, 4, 4)
        else:
            forward = (128, power(layer.outputs, 16, 128), 32 if layer.columns <= 32 else 16, 4, 3)
            backward = (64, power(layer.channels, 16, 64), 32 if layer.channels <= 16 else 16, 4, 3)
        inner = 64 if layer.outputs < 64 else 32 if layer.outputs < 128 else 16  # what leaves registers enough
        sums = (power(layer.outputs, 16, 128), power(layer.columns, 32, 64), power(self.positions, 16, inner), 4, 3)
        return forward, backward, sums


class WeightedUnit(Unit):
    layer: Weighted

    def __init__(self, layer: Weighted, stage: Stage) -> None:
        super().__init__(layer, stage)
        weighted, capacity = layer.weighted, stage.shape.capacity
        self._forward_blocks, self._backward_blocks, sums = layer.blocks()
        bias = int(weighted.bias is not None)
        # A product's bias is one more column; a convolution's biases have programs of their own.
        columns = (
            math.ceil((weighted.columns + bias) / sums[1])
            if weighted.one_pixel
            else math.ceil(weighted.columns / sums[1]) + bias
        )
        self.share_out(sums, math.ceil(weighted.outputs / sums[0]) * columns, 4 if weighted.one_pixel else 32)
        (kh, kw), (sh, sw), (ph, pw), (oh, ow) = weighted.kernel, weighted.stride, weighted.padding, layer.out
        self._geometry = {
            "C": weighted.channels, "H": weighted.height, "W": weighted.width, "N": weighted.outputs,
            "KH": kh, "KW": kw, "SH": sh, "SW": sw, "PH": ph, "PW": pw, "OH": oh, "OW": ow,
        }  # fmt: skip
        self._bias = bias
        self._out = stage.make(capacity, layer.outputs)
        # δ before the pooling, zeros included: both kernels that read it want every position.
        self.back = stage.make(capacity, weighted.outputs * layer.positions)
        # Without pooling nothing reads it; a pointer must still be given.
        self.winner = stage.make(*((capacity, layer.outputs) if layer.pooled else (1, 1)), dtype=torch.int8)
        if layer.by_taps:  # weights by tap, for both ways, and channels-last copies
            self._ahead_taps, self._back_taps = (stage.make(weighted.outputs * weighted.columns) for _ in range(2))
            self._last, self._delta_last = stage.make(capacity, layer.inputs), torch.empty_like(self.back)

    def prepare(self) -> None:
        if not self.layer.by_taps:
            return
        held, s, layer = self.stage.held, self.stage.shape, self.layer.weighted
        grid = (math.ceil(layer.outputs / 32), math.ceil(layer.channels / 32), s.agents)
        self.kernels.turn_weights[grid](
            *(held.theta, self._ahead_taps, self._back_taps, s.dimension, layer.weight),
            N=layer.outputs, C=layer.channels, TAPS=layer.kernel[0] * layer.kernel[1], BLOCK=32,
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        self.x = x
        held, s, layer, by_taps = self.stage.held, self.stage.shape, self.layer.weighted, self.layer.by_taps
        bm, bn, bk, warps, stages = self._forward_blocks
        if by_taps:
            if not isinstance(self.before, WeightedUnit):  # which writes the copy along with its output
                self._channels_last(x, self._last, layer.channels, layer.height * layer.width)
            x = self._last
            self.stage.streams.wait(self.stage.prepared)
        after = self.after
        copy = after._last if isinstance(after, WeightedUnit) and after.layer.by_taps else None
        grid = (math.ceil(s.capacity * self.layer.positions / bm), math.ceil(layer.outputs / bn), s.agents)
        self.kernels.forward[grid](
            *(x, held.theta, self._ahead_taps if by_taps else held.theta, self._out, self.winner),
            *(self._out if copy is None else copy, held.counts, held.step),
            *(s.agents, s.capacity, s.dimension, layer.weight),
            **self._geometry, BIAS=self._bias, POOLED=self.layer.pooled, ACT=self._code(self.layer.activation),
            LAST=by_taps, COPY=copy is not None,
            PRECISION=self.stage.precision, BM=bm, BN=bn, BK=bk, num_warps=warps, num_stages=stages,
        )  # fmt: skip
        return self._out

    def backward(self, delta: Tensor) -> Tensor:
        held, s, layer, by_taps = self.stage.held, self.stage.shape, self.layer.weighted, self.layer.by_taps
        bm, bn, bk, warps, stages = self._backward_blocks
        if by_taps:
            self._channels_last(delta, self._delta_last, layer.outputs, self.layer.positions)
            delta = self._delta_last
        before = self.before if isinstance(self.before, WeightedUnit) else None
        back = torch.empty_like(self.x) if before is None else before.back
        unpooled = before.layer.out[1] if before is not None and before.layer.pooled else 0
        grid = (math.ceil(s.capacity * layer.height * layer.width / bm), math.ceil(layer.channels / bn), s.agents)
        # The loop needs under 100 registers, the scattered stores after it 180; at 128 twice as many programs fit.
        registers = 128 if unpooled and self.stage.precision == "tf32" and not by_taps else None
        self.kernels.backward[grid](
            *(delta, held.theta, self._back_taps if by_taps else held.theta, self.x),
            *(before.winner if before is not None and unpooled else held.flags, back, held.counts, held.step),
            *(s.agents, s.capacity, s.dimension, layer.weight),
            **self._geometry, ACT=self._code(None if before is None else before.layer.activation), UNPOOL=unpooled,
            LAST=by_taps, PRECISION=self.stage.precision, BM=bm, BN=bn, BK=bk,
            num_warps=warps, num_stages=stages, maxnreg=registers,
        )  # fmt: skip
        return back

    def unfuse(self, out: Tensor, delta: Tensor) -> Tensor:
        if self.layer.activation is not None:
            delta = self.layer.activation.derivative(out, delta)
        return unpool(self.layer.weighted.outputs, self.layer.out, self.winner, delta) if self.layer.pooled else delta

    def sum(self, mode: Any, masked: bool) -> None:
        layer, (bo, bj, bq, *_) = self.layer.weighted, self.sum_blocks
        if layer.one_pixel:
            sizes = {"C": layer.channels, "N": layer.outputs, "BIAS": self._bias, "BO": bo, "BJ": bj}
            self.launch_sum(self.kernels.linear_sums, self.x, mode, masked, **sizes)
            return
        blocks = {"PRECISION": self.stage.precision, "BO": bo, "BJ": bj, "BQ": bq}
        self.launch_sum(self.kernels.conv_sums, self.x, mode, masked, **self._geometry, BIAS=self._bias, **blocks)

    def _channels_last(self, images: Tensor, out: Tensor, channels: int, positions: int) -> None:
        held, s = self.stage.held, self.stage.shape
        grid = (math.ceil(channels / 32) * math.ceil(positions / 32), s.capacity, s.agents)
        self.kernels.channels_last[grid](
            *(images, out, held.counts, held.step, s.agents, s.capacity), C=channels, P=positions, BLOCK=32
        )

    def _code(self, activation: Activation | None) -> Any:
        if activation is None:
            return self.kernels.NONE
        return self.kernels.RELU if activation.kind == "relu" else self.kernels.TANH
