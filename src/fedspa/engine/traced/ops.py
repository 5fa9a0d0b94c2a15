"""Operations that a trace keeps whole, because what vmap would make of them is slow or could fail for one example.

Each is an operator of its own, so that it stands in the trace as one node; `plain` has what runs in its place. Those of
GroupNorm and of indices stand in every trace. Those of convolutions, linear layers and the loss of classes stand in a
trace for a GPU: there vmap's rules would make grouped convolutions, and of their ways back tensors as large as the
gradients of all examples that nobody reads. They take lines of examples, one agent's after the other's: a convolution
[n, C, H, W] with the weights [g, O, C, h, w] of g agents, n/g lines each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

aten = torch.ops.aten

_library = torch.library.Library("fedspa", "FRAGMENT")  # type: ignore[no-untyped-call]
# What runs in the place of each node of a program.
plain: dict[Any, Callable[..., Any]] = {}


class _Operator:
    """A function as an operator of its name, in a trace `node`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        name = function.__name__
        schema = torch.library.infer_schema(function, mutates_args=())
        _library.define(name + schema)  # type: ignore[no-untyped-call]
        _library.impl(name, function, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        self.name, self.node = f"fedspa::{name}", getattr(torch.ops.fedspa, name).default
        plain[self.node] = function

    def __call__(self, *given: Any) -> Any:
        return self.node(*given)

    def register_vmap(self, rule: Callable[..., Any]) -> None:
        torch.library.register_vmap(self.name, rule, lib=_library)


@_Operator
def within(index: Tensor, size: int, allowed: int | None) -> Tensor:
    """The index where it lies in 0 … size - 1 or is `allowed`, else 0."""
    if index.is_cuda and index.ndim:
        return cast(Tensor, _kernels().held(index, size, allowed)[0])
    return torch.where(inside(index, size, allowed), index, torch.zeros_like(index))


def inside(index: Tensor, size: int, allowed: int | None) -> Tensor:
    """Which of them `within` leaves as they are."""
    good = (index >= 0) & (index < size)
    return good if allowed is None else good | (index == allowed)


@_Operator
def all_inside(index: Tensor, size: int, allowed: int | None) -> Tensor:
    """Of each line [n, …] whether `within` leaves all of it as it is."""
    if index.is_cuda:
        return cast(Tensor, _kernels().held(index, size, allowed)[1])
    return inside(index, size, allowed).reshape(len(index), -1).all(1)


@within.register_vmap
def _(info: Any, dims: Any, index: Tensor, size: int, allowed: int | None) -> tuple[Tensor, int]:
    return within(index, size, allowed), dims[0]


@_Operator
def normed(x: Tensor, groups: int, eps: float) -> list[Tensor]:
    """x [n, c, …] less each group's mean, over its deviation; the means; and 1/deviation."""
    x = x.contiguous()
    return list(aten.native_group_norm(x, None, None, *_sizes(x), groups, eps))


@_Operator
def normed_backward(delta: Tensor, x: Tensor, mean: Tensor, scale: Tensor, groups: int) -> Tensor:
    """δ of x."""
    x, wanted = x.contiguous(), [True, False, False]
    made = aten.native_group_norm_backward(delta.contiguous(), x, mean, scale, None, *_sizes(x), groups, wanted)
    return cast(Tensor, made[0])


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


class _Function(torch.autograd.Function):
    """An operator for torch.func, with its derivative: `(operator, derivative, *given)`. Of several outputs only the
    first is differentiated."""

    generate_vmap_rule = True

    @staticmethod
    def forward(operator: Callable[..., Any], derivative: Any, *given: Any) -> Any:
        found = operator(*given)
        return tuple(found) if isinstance(found, list) else found

    @staticmethod
    def setup_context(context: Any, inputs: Any, output: Any) -> None:
        _, context.derivative, *given = inputs
        rest = output[1:] if isinstance(output, tuple) else ()
        context.mark_non_differentiable(*rest)
        context.given = [None if isinstance(each, Tensor) else each for each in given]
        context.save_for_backward(*rest, *(each for each in given if isinstance(each, Tensor)))
        context.places, context.rest = [i for i, each in enumerate(given) if isinstance(each, Tensor)], len(rest)

    @staticmethod
    def backward(context: Any, delta: Tensor, *_: Tensor) -> Any:
        if context.derivative is None:
            raise RuntimeError("a second derivative of a layer")
        saved, given = context.saved_tensors, list(context.given)
        for place, tensor in zip(context.places, saved[context.rest :]):
            given[place] = tensor
        found = context.derivative(delta, *saved[: context.rest], *given)
        return None, None, *found, *[None] * (len(given) - len(found))


def _applied(operator: Callable[..., Any], derivative: Callable[..., tuple[Tensor | None, ...]], *given: Any) -> Any:
    return _Function.apply(operator, derivative, *given)  # type: ignore[no-untyped-call]


def _once(operator: Callable[..., Any], *given: Any) -> Any:
    """torch.func asks for a derivative even where nobody takes it."""
    return _Function.apply(operator, None, *given)  # type: ignore[no-untyped-call]


def _of_normed(
    delta: Tensor, mean: Tensor, scale: Tensor, x: Tensor, groups: int, _eps: float
) -> tuple[Tensor | None, ...]:
    return (_once(normed_backward, delta, x, mean, scale, groups),)


def group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    layers: bool = False,
) -> Tensor:
    """As torch.nn.functional's; as one operator with its weight and bias where layers are kept whole."""
    if layers and x.ndim > 2 and x.dtype == torch.float32 and weight is not None and bias is not None:
        given = x, weight.unsqueeze(0), bias.unsqueeze(0), num_groups, eps
        return cast(Tensor, _applied(group_scaled, _of_group_scaled, *given)[0])
    found: Tensor = _applied(normed, _of_normed, x, num_groups, eps)[0]
    for way, values in ((torch.mul, weight), (torch.add, bias)):
        if values is not None:
            found = way(found, values.view(-1, *[1] * (x.ndim - 2)))
    return found


@_Operator
def group_scaled(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> list[Tensor]:
    """GroupNorm of lines [n, C, …] with the weights and biases [g, C] of g agents; means; and 1/deviation."""
    if x.is_cuda:
        return cast(list[Tensor], _kernels().group_scaled(x, weight, bias, groups, eps))
    found, mean, scale = normed(x, groups, eps)
    return [found * _of_lines(weight, x) + _of_lines(bias, x), mean, scale]


@_Operator
def group_scaled_back(
    delta: Tensor, x: Tensor, mean: Tensor, scale: Tensor, weight: Tensor, groups: int
) -> list[Tensor]:
    """δ of x, and each line's gradients of weight and bias [n, C]."""
    if delta.is_cuda:
        return cast(list[Tensor], _kernels().group_scaled_back(delta, x, mean, scale, weight, groups))
    apart = x.reshape(*mean.shape, -1)
    products = delta * ((apart - mean.unsqueeze(2)) * scale.unsqueeze(2)).view(x.shape)
    back = normed_backward(delta * _of_lines(weight, x), x, mean, scale, groups)
    return [back, products.flatten(2).sum(2), delta.flatten(2).sum(2)]


def _of_lines(values: Tensor, x: Tensor) -> Tensor:
    """Channels [g, C] of the agents, for each of their lines of x [n, C, …]."""
    lines = values.repeat_interleave(len(x) // len(values), 0)
    return lines.view(*lines.shape, *[1] * (x.ndim - 2))


def _of_group_scaled(
    delta: Tensor, mean: Tensor, scale: Tensor, x: Tensor, weight: Tensor, _bias: Tensor, groups: int, _eps: float
) -> tuple[Tensor | None, ...]:
    back, *own = _once(group_scaled_back, delta, x, mean, scale, weight, groups)
    return back, *map(_over_lines, own)


@_Operator
def layer_scaled(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> list[Tensor]:
    """LayerNorm of lines [n, T, F] with the weights and biases [g, F] of g agents; means [n, T]; and 1/deviation."""
    if x.is_cuda:
        return cast(list[Tensor], _kernels().layer_scaled(x, weight, bias, eps))
    found, mean, scale = aten.native_layer_norm(x, x.shape[2:], None, None, eps)
    return [found * _rows_of_lines(weight, x) + _rows_of_lines(bias, x), mean.squeeze(2), scale.squeeze(2)]


@_Operator
def layer_scaled_back(delta: Tensor, x: Tensor, mean: Tensor, scale: Tensor, weight: Tensor) -> list[Tensor]:
    """δ of x, and each line's gradients of weight and bias [n, F]."""
    if delta.is_cuda:
        return cast(list[Tensor], _kernels().layer_scaled_back(delta, x, mean, scale, weight))
    statistics = mean.unsqueeze(2), scale.unsqueeze(2)
    products = delta * ((x - statistics[0]) * statistics[1])
    wanted, weighted = (True, False, False), delta * _rows_of_lines(weight, x)
    back = aten.native_layer_norm_backward(weighted, x, x.shape[2:], *statistics, None, None, wanted)[0]
    return [back, products.sum(1), delta.sum(1)]


def _rows_of_lines(values: Tensor, x: Tensor) -> Tensor:
    """Features [g, F] of the agents, for each of their lines of x [n, T, F]."""
    return values.repeat_interleave(len(x) // len(values), 0).unsqueeze(1)


def _of_layer_scaled(
    delta: Tensor, mean: Tensor, scale: Tensor, x: Tensor, weight: Tensor, _bias: Tensor, _eps: float
) -> tuple[Tensor | None, ...]:
    back, *own = _once(layer_scaled_back, delta, x, mean, scale, weight)
    return back, *map(_over_lines, own)


_WIDEST = 8192  # features of a row that lie in registers


def layer_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """As torch.nn.functional's."""
    own = len(normalized_shape) == 1 and normalized_shape[0] <= _WIDEST and x.dtype == torch.float32
    if not own or weight is None or bias is None:
        return functional.layer_norm(x, normalized_shape, weight, bias, eps)
    lines = x.reshape(1, -1, x.shape[-1])
    given = lines, weight.unsqueeze(0), bias.unsqueeze(0), eps
    return cast(Tensor, _applied(layer_scaled, _of_layer_scaled, *given)[0]).view(x.shape)


Window = Sequence[int]  # of a convolution: strides, paddings and dilations, two each, and groups


def _kernels() -> Any:
    """Triton is there on a GPU only."""
    return import_module("fedspa.engine.traced.gpu_work")


@_Operator
def convolved(x: Tensor, weight: Tensor, bias: Tensor | None, window: Sequence[int]) -> Tensor:
    """Lines [n, O, …] of x [n, C, H, W], by weights [g, O, C, h, w] and biases [g, O]."""
    if x.is_cuda and has_kernel(window):
        return cast(Tensor, _kernels().convolved(x, weight, bias, window))
    agents = len(weight)
    stride, padding, dilation, groups = _opened(window)
    lines = x.reshape(agents, -1, *x.shape[1:]).transpose(0, 1).flatten(1, 2)
    biases = None if bias is None else bias.flatten()
    found = functional.conv2d(lines, weight.flatten(0, 1), biases, stride, padding, dilation, groups * agents)
    return found.view(len(found), agents, -1, *found.shape[2:]).transpose(0, 1).flatten(0, 1)


@_Operator
def convolved_back(delta: Tensor, weight: Tensor, sides: Sequence[int], window: Sequence[int]) -> Tensor:
    """δ of x [n, C, H, W], whose sides are H and W."""
    if delta.is_cuda and has_kernel(window):
        return cast(Tensor, _kernels().convolved_back(delta, weight, sides, window))
    agents = len(weight)
    stride, padding, dilation, groups = _opened(window)
    lines = delta.reshape(agents, -1, *delta.shape[1:]).transpose(0, 1).flatten(1, 2)
    channels = agents * groups * weight.shape[2]
    x = delta.new_empty(1).expand(len(lines), channels, *sides)
    rest = (None, stride, padding, dilation, False, (0, 0), groups * agents, (True, False, False))
    found = aten.convolution_backward(lines, x, weight.flatten(0, 1), *rest)[0]
    return cast(Tensor, found.reshape(len(lines), agents, -1, *sides).transpose(0, 1).flatten(0, 1))


@_Operator
def convolved_weights(delta: Tensor, x: Tensor, kernel: Sequence[int], window: Sequence[int]) -> Tensor:
    """Each line's gradient of the weights, [n, O, C, h, w]."""
    stride, padding, dilation, groups = _opened(window)
    patches = unfolded(x, kernel, stride, padding, dilation)
    patches = patches.view(len(x) * groups, -1, patches.shape[2])
    delta = delta.reshape(len(patches), -1, patches.shape[2])
    return torch.bmm(delta, patches.transpose(1, 2)).view(len(x), -1, x.shape[1] // groups, *kernel)


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


def _opened(window: Window) -> tuple[Sequence[int], Sequence[int], Sequence[int], int]:
    return window[:2], window[2:4], window[4:6], window[6]


def has_kernel(window: Window) -> bool:
    return tuple(window[4:]) == (1, 1, 1)


@_Operator
def pooled(x: Tensor, window: Sequence[int]) -> list[Tensor]:
    """The maxima of windows of x [n, C, H, W], and their places in these. A window is sides, strides and paddings."""
    if x.is_cuda:
        return cast(list[Tensor], _kernels().pooled(x, window))
    found, index = aten.max_pool2d_with_indices(x, window[:2], window[2:4], window[4:])
    rows, columns = _corners(found.shape[2:], window, x.device)
    place = (index // x.shape[3] - rows) * window[1] + index % x.shape[3] - columns
    return [found, place.to(torch.int16)]


@_Operator
def pooled_back(delta: Tensor, winner: Tensor, sides: Sequence[int], window: Sequence[int]) -> Tensor:
    """δ of x [n, C, H, W], whose sides are H and W."""
    if delta.is_cuda:
        return cast(Tensor, _kernels().pooled_back(delta, winner, sides, window))
    rows, columns = _corners(delta.shape[2:], window, delta.device)
    index = (winner // window[1] + rows) * sides[1] + winner % window[1] + columns
    x = delta.new_zeros(*delta.shape[:2], *sides)
    rest = (window[:2], window[2:4], window[4:], (1, 1), False, index)
    return cast(Tensor, aten.max_pool2d_with_indices_backward(delta.contiguous(), x, *rest))


def _corners(sides: Sequence[int], window: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """The first row and column of each window."""
    rows, columns = (torch.arange(sides[i], device=device) * window[2 + i] - window[4 + i] for i in range(2))
    return rows.unsqueeze(1), columns


def _of_pooled(delta: Tensor, winner: Tensor, x: Tensor, window: Sequence[int]) -> tuple[Tensor | None, ...]:
    return (_once(pooled_back, delta, winner, x.shape[2:], window),)


def _of_convolved(
    delta: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, window: Window
) -> tuple[Tensor | None, ...]:
    back = _once(convolved_back, delta, weight, x.shape[2:], window)
    weights = _once(convolved_weights, delta, x, weight.shape[3:], window)
    return back, _over_lines(weights), None if bias is None else _over_lines(delta.sum((2, 3)))


def _over_lines(found: Tensor) -> Tensor:
    """The gradient for all lines, as the gradient of one agent's parameter."""
    return found if len(found) == 1 else found.sum(0, keepdim=True)


@_Operator
def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Lines x · weightᵀ + bias [n, T, O] of x [n, T, I], by weights [g, O, I] and biases [g, O]."""
    lines = x.reshape(len(weight), -1, x.shape[2])
    if bias is None:
        found = torch.bmm(lines, weight.transpose(1, 2))
    else:
        found = torch.baddbmm(bias.unsqueeze(1), lines, weight.transpose(1, 2))
    return found.view(*x.shape[:2], weight.shape[1])


@_Operator
def product_back(delta: Tensor, weight: Tensor) -> Tensor:
    """δ of x."""
    lines = delta.reshape(len(weight), -1, delta.shape[2])
    return torch.bmm(lines, weight).view(*delta.shape[:2], weight.shape[2])


@_Operator
def product_weights(delta: Tensor, x: Tensor) -> Tensor:
    """Each line's gradient of the weights, [n, O, I]."""
    return torch.bmm(delta.transpose(1, 2), x)


def _of_product(delta: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor | None, ...]:
    back, weights = _once(product_back, delta, weight), _once(product_weights, delta, x)
    return back, _over_lines(weights), None if bias is None else _over_lines(delta.sum(1))


@_Operator
def attended(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """softmax(q · kᵀ · scale) · v of q [n, heads, T, D] and of k and v [n, heads, S, D]."""
    if q.is_cuda:
        return cast(Tensor, _kernels().attended(q, k, v, scale))
    return torch.matmul(torch.softmax(torch.matmul(q * scale, k.transpose(2, 3)), 3), v)


@_Operator
def attended_back(delta: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float) -> list[Tensor]:
    """δ of q, k and v."""
    if q.is_cuda:
        return cast(list[Tensor], _kernels().attended_back(delta, q, k, v, scale))
    shares = torch.softmax(torch.matmul(q * scale, k.transpose(2, 3)), 3)
    of_shares = torch.matmul(delta, v.transpose(2, 3))
    of_scores = shares * (of_shares - (shares * of_shares).sum(3, keepdim=True)) * scale
    found = torch.matmul(of_scores, k), torch.matmul(of_scores.transpose(2, 3), q)
    return [*found, torch.matmul(shares.transpose(2, 3), delta)]


def _of_attended(delta: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor | None, ...]:
    return tuple(_once(attended_back, delta, q, k, v, scale))


@_Operator
def class_delta(scores: Tensor, classes: Tensor, delta: Tensor, ignored: int) -> Tensor:
    """δ of scores [n, C] by the cross-entropy of each line, whose own δ is [n]; zero where the class is `ignored`."""
    if scores.is_cuda:
        return cast(Tensor, _kernels().class_delta(scores, classes, delta, ignored))
    hot = torch.arange(scores.shape[1], device=scores.device) == classes.unsqueeze(1)
    found = (scores.softmax(1) - hot.to(scores)) * delta.unsqueeze(1)
    return found.masked_fill((classes == ignored).unsqueeze(1), 0.0)


def _class_losses(scores: Tensor, classes: Tensor, ignored: int) -> Tensor:
    return functional.cross_entropy(scores, classes, reduction="none", ignore_index=ignored)


def _of_class_losses(delta: Tensor, scores: Tensor, classes: Tensor, ignored: int) -> tuple[Tensor | None, ...]:
    return (_once(class_delta, scores, classes, delta, ignored),)


def _lines_of_agents(operator: Any, lines: int, of_agents: tuple[int, ...]) -> None:
    """The rule for one more dimension: lines and agents are both counted with it in front. Where no parameter has it,
    there are more lines of the same agents; that is exact for one agent only, and others are repeated."""

    def rule(info: Any, dims: Any, *given: Any) -> Any:
        size, given_list = info.batch_size, list(given)
        own = [i for i in of_agents if isinstance(given[i], Tensor)]
        shared = bool(own) and all(dims[i] is None and len(given[i]) == 1 for i in own)
        for i in (*range(lines), *(() if shared else own)):
            each = given[i].expand(size, *given[i].shape) if dims[i] is None else given[i].movedim(dims[i], 0)
            given_list[i] = each.flatten(0, 1)
        found = operator(*given_list)
        if isinstance(found, list):
            return [each.unflatten(0, (size, -1)) for each in found], [0] * len(found)
        return found.unflatten(0, (size, -1)), 0

    operator.register_vmap(rule)


_lines_of_agents(convolved, 1, (1, 2))
_lines_of_agents(convolved_back, 1, (1,))
_lines_of_agents(convolved_weights, 2, ())
_lines_of_agents(product, 1, (1, 2))
_lines_of_agents(product_back, 1, (1,))
_lines_of_agents(product_weights, 2, ())
_lines_of_agents(group_scaled, 1, (1, 2))
_lines_of_agents(group_scaled_back, 4, (4,))
_lines_of_agents(layer_scaled, 1, (1, 2))
_lines_of_agents(layer_scaled_back, 4, (4,))
_lines_of_agents(class_delta, 3, ())
_lines_of_agents(all_inside, 1, ())
_lines_of_agents(attended, 3, ())
_lines_of_agents(attended_back, 4, ())
_lines_of_agents(pooled, 1, ())
_lines_of_agents(pooled_back, 2, ())


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """As torch.nn.functional's, of images [n, C, H, W]."""
    (down, across), (high, wide), (tall, broad) = _pair(stride), (0, 0), _pair(dilation)
    if padding == "same":
        margins = [(size - 1) * each for size, each in zip(weight.shape[2:], (tall, broad))]
        x = functional.pad(x, (margins[1] // 2, -(-margins[1] // 2), margins[0] // 2, -(-margins[0] // 2)))
    elif padding != "valid":
        high, wide = _pair(padding)
    window = (down, across, high, wide, tall, broad, groups)
    biases = None if bias is None else bias.unsqueeze(0)
    return cast(Tensor, _applied(convolved, _of_convolved, x, weight.unsqueeze(0), biases, window))


def max_pool2d(
    x: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor:
    """As torch.nn.functional's."""
    if x.ndim != 4 or _pair(dilation) != (1, 1) or ceil_mode or return_indices:
        rest: Any = kernel_size, stride, padding, dilation, ceil_mode, return_indices
        return cast(Tensor, functional.max_pool2d(x, *rest))
    window = (*_pair(kernel_size), *_pair(stride or kernel_size), *_pair(padding))
    return cast(Tensor, _applied(pooled, _of_pooled, x, window)[0])


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As torch.nn.functional's."""
    lines = x.reshape(1, -1, x.shape[-1])
    biases = None if bias is None else bias.unsqueeze(0)
    found: Tensor = _applied(product, _of_product, lines, weight.unsqueeze(0), biases)
    return found.view(*x.shape[:-1], weight.shape[0])


_LONGEST = 128  # rows and values of a head that lie in registers


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """As torch.nn.functional.scaled_dot_product_attention."""
    sizes = (*q.shape[2:], *k.shape[2:])
    plain = attn_mask is None and not (dropout_p or is_causal or enable_gqa)
    if not plain or q.ndim != 4 or k.shape != v.shape or q.shape[:2] != k.shape[:2] or max(sizes) > _LONGEST:
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    wanted = q.shape[3] ** -0.5 if scale is None else scale
    return cast(Tensor, _applied(attended, _of_attended, q, k, v, wanted))


def class_loss(scores: Tensor, classes: Tensor, ignored: int) -> Tensor:
    """The cross-entropy of one line [1, C]."""
    return cast(Tensor, _applied(_class_losses, _of_class_losses, scores, classes, ignored)).sum()


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[-1])


within_node, convolved_weights_node, product_weights_node = within.node, convolved_weights.node, product_weights.node


_MANY = 128 * 128 * 9  # weights of an example
_NARROW = 32  # channels


def weights_of_groups(delta: Tensor, x: Tensor, weight: Tensor, bias: Any, *rest: Any) -> tuple[None, Tensor, None]:
    """What aten.convolution_backward gives with the mask (False, True, False)."""
    stride, padding, dilation, transposed, _, groups, _ = rest
    flat = not transposed and x.ndim == 4 and len(x) == 1 and groups > 1
    if not flat or weight.numel() // groups < _MANY:
        return cast(tuple[None, Tensor, None], aten.convolution_backward(delta, x, weight, bias, *rest))
    patches = unfolded(x.view(groups, -1, *x.shape[2:]), weight.shape[2:], stride, padding, dilation)
    delta = delta.reshape(groups, -1, patches.shape[2])
    if delta.shape[1] > _NARROW:
        return None, torch.bmm(delta, patches.transpose(1, 2)).view(weight.shape), None
    made = torch.bmm(patches, delta.transpose(1, 2))  # a product with few rows is slow
    return None, made.transpose(1, 2).reshape(weight.shape), None
