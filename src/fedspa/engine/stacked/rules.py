"""Rules per layer, in torch: forward, backward, and each example's own gradient of a layer's parameters.

These are the twins of the kernels (`kernels.py`), and all there is on a CPU. A convolution is a product over patches:
with δ [b, outputs, L] and patches [b, K, L], an example's weight gradient is δ·patchesᵀ.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from fedspa.engine.layers import Activation, Embedding, Norm, Pool, Weighted
from fedspa.engine.stacked.describe import Layer, first_parameter

aten = torch.ops.aten


def forward(layer: Weighted, theta: Tensor, x: Tensor) -> Tensor:
    """x [b, inputs] → [b, outputs · L]."""
    weight, bias = _parameters(layer, theta)
    if layer.one_pixel:
        return functional.linear(x, weight, bias)
    image = x.view(-1, layer.channels, layer.height, layer.width)
    kernels = weight.view(layer.outputs, layer.channels, *layer.kernel)
    return functional.conv2d(image, kernels, bias, layer.stride, layer.padding).flatten(1)


def backward(layer: Weighted, theta: Tensor, delta: Tensor) -> Tensor:
    """δ of the outputs → δ of the inputs [b, inputs]."""
    weight, _ = _parameters(layer, theta)
    if layer.one_pixel:
        return delta @ weight
    shape = (len(delta), layer.channels, layer.height, layer.width)
    kernels = weight.view(layer.outputs, layer.channels, *layer.kernel)
    image = delta.view(-1, layer.outputs, *layer.out)
    window = (layer.stride, layer.padding, (1, 1), False, (0, 0), 1)
    back: Tensor = aten.convolution_backward(
        image, image.new_empty(shape), kernels, None, *window, (True, False, False)
    )[0]
    return back.flatten(1)


def rows(layer: Weighted, x: Tensor, delta: Tensor) -> Tensor:
    """Each example's gradient of the layer's parameters, [b, layer.size]: the weight's, then the bias's."""
    if layer.one_pixel:
        weights = delta.unsqueeze(2) * x.unsqueeze(1)
        biases = delta
    else:
        image = x.view(-1, layer.channels, layer.height, layer.width)
        patches = functional.unfold(image, layer.kernel, padding=layer.padding, stride=layer.stride)
        delta = delta.view(-1, layer.outputs, layer.positions)
        weights = torch.bmm(delta, patches.transpose(1, 2))
        biases = delta.sum(dim=2)
    flat = weights.flatten(1)
    return flat if layer.bias is None else torch.cat([flat, biases], dim=1)


def pool(layer: Pool, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """[b, inputs] → [b, outputs], and where each maximum was."""
    image = x.view(-1, *layer.image)
    if layer.kind == "max":
        out, where = aten.max_pool2d_with_indices(image, layer.kernel, layer.stride, layer.padding)
        return out.flatten(1), where
    out = aten.avg_pool2d(image, layer.kernel, layer.stride, layer.padding, False, layer.count_padding)
    return out.flatten(1), None


def pool_backward(layer: Pool, x: Tensor, where: Tensor | None, delta: Tensor) -> Tensor:
    image = x.view(-1, *layer.image)
    delta = delta.view(-1, layer.image[0], *layer.out)
    window = (layer.kernel, layer.stride, layer.padding)
    if where is not None:
        back: Tensor = aten.max_pool2d_with_indices_backward(delta, image, *window, (1, 1), False, where)
    else:
        back = aten.avg_pool2d_backward(delta, image, *window, False, layer.count_padding, None)
    return back.flatten(1)


def unpool(planes: int, sides: tuple[int, int], winner: Tensor, delta: Tensor) -> Tensor:
    """δ of 2 × 2 windows' maxima → δ of the windows, [b, planes · sides]; `winner` is each maximum's place (0 to 3)."""
    windows = (-1, planes, sides[0] // 2, 1, sides[1] // 2, 1)
    place = torch.arange(4, device=delta.device).view(1, 1, 1, 2, 1, 2)
    return torch.where(winner.view(windows) == place, delta.view(windows), 0.0).flatten(1)


def normalize(layer: Norm, theta: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[b, inputs] → the outputs, the normalized values x̂ before weight and bias, and what each group was scaled by."""
    groups = x.view(len(x), layer.groups, -1)
    centred = groups - groups.mean(dim=2, keepdim=True)
    scales = (centred.square().mean(dim=2, keepdim=True) + layer.epsilon).rsqrt()
    normal = (centred * scales).flatten(1)
    out = normal if layer.weight is None else normal * _spread(layer, theta, layer.weight)
    return out if layer.bias is None else out + _spread(layer, theta, layer.bias), normal, scales


def normalize_backward(layer: Norm, theta: Tensor, normal: Tensor, scales: Tensor, delta: Tensor) -> Tensor:
    if layer.weight is not None:
        delta = delta * _spread(layer, theta, layer.weight)
    shape = (len(delta), layer.groups, -1)
    delta, normal = delta.view(shape), normal.view(shape)
    along = normal * (delta * normal).mean(dim=2, keepdim=True)
    return (scales * (delta - delta.mean(dim=2, keepdim=True) - along)).flatten(1)


def normalize_rows(layer: Norm, normal: Tensor, delta: Tensor) -> Tensor:
    """Each example's gradient of the weight, then of the bias, where there are any."""
    shape = (len(delta), layer.outer, layer.parameters, layer.inner)
    weights, biases = (delta * normal).view(shape).sum(dim=(1, 3)), delta.view(shape).sum(dim=(1, 3))
    parts = [weights] if layer.weight is not None else []
    return torch.cat([*parts, biases] if layer.bias is not None else parts, dim=1)


def _spread(layer: Norm, theta: Tensor, offset: int) -> Tensor:
    """The weight or bias of every input."""
    parameters = theta[offset : offset + layer.parameters].view(1, -1, 1)
    return parameters.expand(layer.outer, -1, layer.inner).reshape(1, -1)


def embed(layer: Embedding, theta: Tensor, x: Tensor) -> Tensor:
    """[b, tokens] whole numbers → [b, tokens · width]."""
    weight = theta[layer.weight : layer.weight + layer.size].view(layer.words, layer.width)
    return weight[x.long()].flatten(1)


def embed_rows(layer: Embedding, x: Tensor, delta: Tensor) -> Tensor:
    """Each example's gradient: a word's uses are summed before anything is clipped."""
    rows = delta.new_zeros(len(x), layer.words, layer.width)
    places = x.long().unsqueeze(2).expand(-1, -1, layer.width)
    return rows.scatter_add_(1, places, delta.view(len(x), -1, layer.width)).flatten(1)


def activate(layer: Activation, x: Tensor) -> Tensor:
    return x.relu() if layer.kind == "relu" else x.tanh()


def activate_backward(layer: Activation, out: Tensor, delta: Tensor) -> Tensor:
    if layer.kind == "relu":
        back: Tensor = aten.threshold_backward(delta, out, 0)
        return back
    return delta * (1 - out * out)


def loss_gradient(logits: Tensor, y: Tensor) -> Tensor:
    """δ of the cross-entropy of each example by itself."""
    return logits.softmax(dim=1) - functional.one_hot(y, logits.shape[1])


def gradient_rows(layers: Sequence[Layer], theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Gradients of the examples, [b, d]."""
    x = x.flatten(1)
    taped: list[tuple[Layer, Tensor, Tensor, Tensor, Tensor | None]] = []
    for layer in layers:
        kept, where = x, None
        if isinstance(layer, Weighted):
            out = forward(layer, theta, x)
        elif isinstance(layer, Pool):
            out, where = pool(layer, x)
        elif isinstance(layer, Norm):
            out, kept, where = normalize(layer, theta, x)
        elif isinstance(layer, Embedding):
            out = embed(layer, theta, x)
        else:
            out = activate(layer, x)
        taped.append((layer, x, out, kept, where))
        x = out
    delta = loss_gradient(x, y)
    gradients = torch.empty(len(y), len(theta), dtype=theta.dtype, device=theta.device)
    lowest = next(i for i, layer in enumerate(layers) if first_parameter(layer) is not None)
    for layer, x, out, kept, where in reversed(taped[lowest:]):
        if isinstance(layer, Weighted):
            gradients[:, layer.weight : layer.weight + layer.size] = rows(layer, x, delta)
            if layer is layers[lowest]:
                break
            delta = backward(layer, theta, delta)
        elif isinstance(layer, Pool):
            delta = pool_backward(layer, x, where, delta)
        elif isinstance(layer, Norm):
            assert where is not None
            if (start := first_parameter(layer)) is not None:
                gradients[:, start : start + layer.size] = normalize_rows(layer, kept, delta)
            delta = normalize_backward(layer, theta, kept, where, delta)
        elif isinstance(layer, Embedding):
            gradients[:, layer.weight : layer.weight + layer.size] = embed_rows(layer, x, delta)
        else:
            delta = activate_backward(layer, out, delta)
    return gradients


def _parameters(layer: Weighted, theta: Tensor) -> tuple[Tensor, Tensor | None]:
    end = layer.weight + layer.outputs * layer.columns
    weight = theta[layer.weight : end].view(layer.outputs, layer.columns)
    return weight, None if layer.bias is None else theta[end : end + layer.outputs]
