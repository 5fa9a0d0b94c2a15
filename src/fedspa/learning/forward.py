"""A module called as its inputs lie, and the numbers found in what it returns.

A tensor is the one argument, a tuple are the arguments in order, a dict are the keyword arguments. What comes back is a
tensor, or an object or dict with `logits` (as transformers' models give), or a tuple that begins with one of these.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fedspa.errors import ConfigError
from fedspa.examples import Tree


def returned(module: nn.Module, x: Tree) -> object:
    """Return what the module gives for x."""
    if isinstance(x, Tensor):
        return module(x)
    return module(**x) if isinstance(x, dict) else module(*x)


def outputs(module: nn.Module, x: Tree) -> Tensor:
    """Return the tensor that a loss is made of."""
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
    """Return the mode of each layer: `training`, or not."""
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
    """Set eval mode for the block; afterwards each layer is in the mode that it was in."""
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


# How torch runs: its threads, the settings for single examples, and the switches and generators of the process.

_CPU = torch.device("cpu")


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """One thread for the small tensors of local training: torch's barriers between two cost 10 times the work, wherever
    anything else wants the cores, and results must not depend on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# oneDNN is switched for the whole process.
_OTHERS, _users = Lock(), 0
_before: bool = True


@contextmanager
def one_example_a_time() -> Iterator[None]:
    """Set how torch takes one example: on one thread, and without oneDNN, whose set-up for each small convolution costs
    as much as the convolution (a step of the MNIST CNN takes twice as long with it, one of the CIFAR CNN the same).

    Where several threads take examples, oneDNN comes back with the last of them: before, it would round what others are
    in the midst of.
    """
    global _users, _before
    with _OTHERS:
        if not _users:
            _before = bool(torch.backends.mkldnn.enabled)
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
        _users += 1
    try:
        with torch_threads(1):
            yield
    finally:
        with _OTHERS:
            _users -= 1
            if not _users:
                torch.backends.mkldnn.enabled = _before  # type: ignore[assignment]


_LOW_PRECISION = torch.bfloat16, torch.float16
_LARGE_MODULE = 2**24  # parameters, frozen ones too


def is_large(module: nn.Module) -> bool:
    """Return whether few gradients are tried of a module, so that a large body is tried in minutes."""
    return sum(parameter.numel() for parameter in module.parameters()) > _LARGE_MODULE


@contextmanager
def in_float32(module: nn.Module | None = None) -> Iterator[None]:
    """Compute in float32 what operations would compute in bfloat16 or float16, and keep it so. Tensors that were there
    before keep their types. On a CPU that is much faster.

    Given a module that is not large, or holds no such parameter, nothing is changed: a module may do something else in
    another precision, and what is tried is to be what is trained.
    """
    if module is not None:
        low = any(each.dtype in _LOW_PRECISION for each in module.parameters())
        if not low or not is_large(module):
            yield
            return
    with _Convolutions(), _Operations():  # type: ignore[no-untyped-call]
        yield


class _Convolutions(TorchFunctionMode):
    """They compare the types of what they take before any operation is dispatched."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _CONVOLUTIONS:
            args, kwargs = pytree.tree_map(_widened, (args, kwargs))
        return function(*args, **(kwargs or {}))


_CONVOLUTIONS = (
    *(torch.conv1d, torch.conv2d, torch.conv3d),
    *(torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d),
)


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """All but those that give a view or write in place."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if all(each.alias_info is None for each in function._schema.returns):
            args, kwargs = pytree.tree_map(_widened, (args, kwargs))
        return function(*args, **kwargs)


def _widened(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.float() if value.dtype in _LOW_PRECISION else value
    return torch.float32 if isinstance(value, torch.dtype) and value in _LOW_PRECISION else value


class Switches:
    """What a forward pass may switch for its thread or for the process, as it was when this was made.

    One that raises for an example before it has switched back leaves it so, and all later examples would be computed
    otherwise, or would have no gradient at all.
    """

    def __init__(self) -> None:
        self._before = _switches()

    def put_back(self) -> None:
        if _switches() == self._before:
            return
        gradients, threads, kind, autocast, autocast_kind = self._before
        torch.set_grad_enabled(gradients)
        torch.set_num_threads(threads)
        torch.set_default_dtype(kind)
        torch.set_autocast_enabled("cpu", autocast)
        torch.set_autocast_dtype("cpu", autocast_kind)


def _switches() -> tuple[bool, int, torch.dtype, bool, torch.dtype]:
    return (
        torch.is_grad_enabled(),
        torch.get_num_threads(),
        torch.get_default_dtype(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
    )


@contextmanager
def generators_kept(device: torch.device = _CPU) -> Iterator[None]:
    """Restore the generators of torch (also of `device`, where it is a GPU), numpy and Python afterwards."""
    numpys, pythons = np.random.get_state(), random.getstate()  # noqa: NPY002
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        np.random.set_state(numpys)  # noqa: NPY002
        random.setstate(pythons)
