"""Operations that a trace keeps whole, because what vmap would make of them is slow or could fail for one example.

Each is an operator of its own, so that it stands in the trace as one node; `plain` has what runs in its place.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

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
