"""Operations that a trace keeps whole, because what vmap would make of them is slow or could fail for one example.

Each is an operator of its own, so that it stands in the trace as one node; `plain` has what runs in its place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

aten = torch.ops.aten


@torch.library.custom_op("fedspa::within", mutates_args=())
def within(index: Tensor, size: int, allowed: int | None) -> Tensor:
    """The index where it lies in 0 … size - 1 or is `allowed`, else 0."""
    return _within(index, size, allowed)


def _within(index: Tensor, size: int, allowed: int | None) -> Tensor:
    return torch.where(inside(index, size, allowed), index, torch.zeros_like(index))


def inside(index: Tensor, size: int, allowed: int | None) -> Tensor:
    """Which of them `within` leaves as they are."""
    good = (index >= 0) & (index < size)
    return good if allowed is None else good | (index == allowed)


@within.register_fake
def _(index: Tensor, size: int, allowed: int | None) -> Tensor:
    return torch.empty_like(index)


@within.register_vmap
def _(info: Any, dims: Any, index: Tensor, size: int, allowed: int | None) -> tuple[Tensor, int]:
    return within(index, size, allowed), dims[0]


@torch.library.custom_op("fedspa::normed", mutates_args=())
def normed(x: Tensor, groups: int, eps: float) -> list[Tensor]:
    """x [n, c, …] less each group's mean, over its deviation; the means; and 1/deviation."""
    return _normed(x, groups, eps)


def _normed(x: Tensor, groups: int, eps: float) -> list[Tensor]:
    x = x.contiguous()
    return list(aten.native_group_norm(x, None, None, *_sizes(x), groups, eps))


@normed.register_fake
def _(x: Tensor, groups: int, eps: float) -> list[Tensor]:
    return [torch.empty_like(x), *(x.new_empty(len(x), groups) for _ in range(2))]


@torch.library.custom_op("fedspa::normed_backward", mutates_args=())
def normed_backward(delta: Tensor, x: Tensor, mean: Tensor, scale: Tensor, groups: int) -> Tensor:
    """δ of x."""
    return _normed_backward(delta, x, mean, scale, groups)


def _normed_backward(delta: Tensor, x: Tensor, mean: Tensor, scale: Tensor, groups: int) -> Tensor:
    x, wanted = x.contiguous(), [True, False, False]
    made = aten.native_group_norm_backward(delta.contiguous(), x, mean, scale, None, *_sizes(x), groups, wanted)
    return cast(Tensor, made[0])


@normed_backward.register_fake
def _(delta: Tensor, x: Tensor, mean: Tensor, scale: Tensor, groups: int) -> Tensor:
    return torch.empty_like(x)


class _Normed(torch.autograd.Function):
    """`normed` with its derivative, for torch.func."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, groups: int, eps: float) -> tuple[Tensor, ...]:
        return tuple(normed(x, groups, eps))

    @staticmethod
    def setup_context(context: Any, inputs: Any, output: Any) -> None:
        x, context.groups, _ = inputs
        context.mark_non_differentiable(*output[1:])
        context.save_for_backward(x, *output[1:])

    @staticmethod
    def backward(context: Any, delta: Tensor, *_: Tensor) -> Any:
        return _of_function(_NormedBackward, delta, *context.saved_tensors, context.groups), None, None


class _NormedBackward(torch.autograd.Function):
    """`normed_backward` for torch.func, which asks for a rule even where nobody differentiates it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(delta: Tensor, x: Tensor, mean: Tensor, scale: Tensor, groups: int) -> Tensor:
        return cast(Tensor, normed_backward(delta, x, mean, scale, groups))

    @staticmethod
    def setup_context(context: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(context: Any, *deltas: Tensor) -> Any:
        raise RuntimeError("a second derivative of group_norm")


@normed.register_vmap
def _(info: Any, dims: Any, x: Tensor, groups: int, eps: float) -> Any:
    x, sizes, dim = _folded(x, dims[0], info.batch_size)
    found = normed(x, groups, eps)
    return [each.unflatten(0, sizes) for each in found], [dim] * 3


@normed_backward.register_vmap
def _(info: Any, dims: Any, delta: Tensor, x: Tensor, mean: Tensor, scale: Tensor, groups: int) -> Any:
    size, dim = info.batch_size, dims[1]
    others = (
        each if at == dim else (each.expand(size, *each.shape) if at is None else each.movedim(at, 0)).movedim(0, dim)
        for each, at in zip((delta, mean, scale), (dims[0], *dims[2:4]))
    )
    (delta, sizes, dim), (mean, *_), (scale, *_) = (_folded(each, dim, size) for each in others)
    return normed_backward(delta, _folded(x, dims[1], size)[0], mean, scale, groups).unflatten(0, sizes), dim


def _folded(values: Tensor, dim: int, size: int) -> tuple[Tensor, tuple[int, int], int]:
    """The mapped dimension as part of the first one, and how to have it back. Samples are normed one by one, in any
    order: where it comes second, nothing has to be moved."""
    if dim != 1:
        values, dim = values.movedim(dim, 0), 0
    return values.flatten(0, 1), (values.shape[0], values.shape[1]), dim


def _sizes(x: Tensor) -> tuple[int, int, int]:
    n, c = x.shape[:2]
    return n, c, math.prod(x.shape[2:])


def _of_function(function: type[torch.autograd.Function], *given: Any) -> Any:
    return function.apply(*given)  # type: ignore[no-untyped-call]


def group_norm(
    x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """As torch.nn.functional's."""
    found: Tensor = _of_function(_Normed, x, num_groups, eps)[0]
    for way, values in ((torch.mul, weight), (torch.add, bias)):
        if values is not None:
            found = way(found, values.view(-1, *[1] * (x.ndim - 2)))
    return found


within_node = torch.ops.fedspa.within.default
plain: dict[Any, Callable[..., Any]] = {
    within_node: _within,
    torch.ops.fedspa.normed.default: _normed,
    torch.ops.fedspa.normed_backward.default: _normed_backward,
}


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
