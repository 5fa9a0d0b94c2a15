"""A module called as its inputs lie, and the numbers found in what it returns.

A tensor is the one argument, a tuple are the arguments in order, a dict are the keyword arguments. What comes back is a
tensor, or an object or dict with `logits` (as transformers' models give), or a tuple that begins with one of these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fedspa.errors import ConfigError
from fedspa.examples import Tree


def returned(module: nn.Module, x: Tree) -> object:
    """What the module gives for x."""
    if isinstance(x, Tensor):
        return module(x)
    return module(**x) if isinstance(x, dict) else module(*x)


def outputs(module: nn.Module, x: Tree) -> Tensor:
    """The tensor that a loss is made of."""
    return _logits(returned(module, x))


def _logits(found: object) -> Tensor:
    if isinstance(found, Tensor):
        return found
    logits = found.get("logits") if isinstance(found, Mapping) else getattr(found, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    if isinstance(found, tuple | list) and found:
        return _logits(found[0])
    raise ConfigError(
        f"it returns a {type(found).__name__}; a tensor, an object or dict with `logits`, or a tuple that "
        "begins with one is needed, or a task of your own: task=lambda module, example: …"
    )


Modes = list[tuple[nn.Module, bool]]


def modes(module: nn.Module) -> Modes:
    """Which mode each layer is in: `training`, or not."""
    return [(layer, layer.training) for layer in module.modules()]


@contextmanager
def in_modes(wanted: Modes) -> Iterator[None]:
    """Layers in these modes; afterwards each is in the mode that it was in."""
    before = [(layer, layer.training) for layer, _ in wanted]
    for layer, training in wanted:
        layer.training = training
    try:
        yield
    finally:
        for layer, training in before:
            layer.training = training


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """In eval mode; afterwards each layer is in the mode that it was in."""
    with in_modes(modes(module)):
        module.eval()  # which a module may have its own way for
        yield


@contextmanager
def attributes_kept(module: nn.Module) -> Iterator[None]:
    """Attributes and buffers that a forward pass assigns are afterwards the objects that they were: a trace, whose
    tensors torch wraps, would leave one that no other pass can read."""
    layers = [layer for layer in module.modules() if not isinstance(layer, torch.jit.ScriptModule)]
    before = [(holder, dict(holder)) for layer in layers for holder in (vars(layer), layer._buffers)]
    try:
        yield
    finally:
        for holder, kept in before:
            for key in [key for key in holder if key not in kept]:
                del holder[key]
            for key, value in kept.items():
                if key not in holder or holder[key] is not value:
                    holder[key] = value


@contextmanager
def differentiable(module: nn.Module) -> Iterator[None]:
    """On a GPU, recurrent layers in eval mode run by torch's own kernels: cuDNN's have no backward pass in that mode,
    and each example would lose its gradient."""
    layers = [layer for layer in module.modules() if isinstance(layer, nn.RNNBase) and not layer.training]
    if not any(parameter.is_cuda for layer in layers for parameter in layer.parameters()):
        yield
        return
    with torch.backends.cudnn.flags(enabled=False):
        yield
