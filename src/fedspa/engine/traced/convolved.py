"""The gradients of a convolution's weights, of each example by itself, and of its inputs.

vmap asks for them as one convolution with a group for each example. That is fast where an example's weights are few; a
plain product over unfolded images is faster where they are many, and on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

aten = torch.ops.aten
_MANY = 128 * 128 * 9  # weights of an example
_NARROW = 32  # channels


def convolved_weights(delta: Tensor, x: Tensor, weight: Tensor, bias: Any, *rest: Any) -> tuple[None, Tensor, None]:
    """What aten.convolution_backward gives with the mask (False, True, False)."""
    stride, padding, dilation, transposed, _, groups, _ = rest
    flat = not transposed and x.ndim == 4 and len(x) == 1 and groups > 1
    few = weight.numel() // groups < _MANY
    if not flat or (few and not x.is_cuda):
        return cast(tuple[None, Tensor, None], aten.convolution_backward(delta, x, weight, bias, *rest))
    patches = unfolded(x.view(groups, -1, *x.shape[2:]), weight.shape[2:], stride, padding, dilation)
    delta = delta.reshape(groups, -1, patches.shape[2])
    if delta.shape[1] > _NARROW:
        return None, torch.bmm(delta, patches.transpose(1, 2)).view(weight.shape), None
    made = torch.bmm(patches, delta.transpose(1, 2))  # a product with few rows is slow
    return None, made.transpose(1, 2).reshape(weight.shape), None


def convolved_back(delta: Tensor, x: Tensor, weight: Tensor, bias: Any, *rest: Any) -> tuple[Tensor, None, None]:
    """What aten.convolution_backward gives with the mask (True, False, False). On a GPU the way back through a
    convolution of stride 1 is one with turned weights: those kernels are faster, and add in one order."""
    stride, padding, dilation, transposed, _, groups, _ = rest
    kernel = weight.shape[2:]
    margins = [size - 1 - pad for size, pad in zip(kernel, padding)]
    plain = not transposed and set(stride) == {1} and set(dilation) == {1} and min(margins) >= 0
    if not (plain and x.is_cuda and x.ndim == 4):
        return cast(tuple[Tensor, None, None], aten.convolution_backward(delta, x, weight, bias, *rest))
    turned = weight.view(groups, -1, *weight.shape[1:]).transpose(1, 2).flip(3, 4).flatten(0, 1)
    return functional.conv2d(delta, turned, padding=tuple(margins), groups=groups), None, None


def unfolded(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    """[n, channels · kernel, places] of images [n, channels, rows, columns], in one copy."""
    (rows, columns), (down, right) = kernel, stride
    x = functional.pad(x, (padding[1], padding[1], padding[0], padding[0])) if any(padding) else x
    n, channels, height, width = x.shape
    tall, wide = ((kernel[i] - 1) * dilation[i] + 1 for i in range(2))
    high, broad = (height - tall) // down + 1, (width - wide) // right + 1
    s = x.stride()
    windows = x.as_strided(
        (n, channels, rows, columns, high, broad),
        (s[0], s[1], s[2] * dilation[0], s[3] * dilation[1], s[2] * down, s[3] * right),
    )
    return windows.reshape(n, channels * rows * columns, high * broad)
