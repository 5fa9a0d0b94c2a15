"""What each layer of a module takes and gives in a forward pass, to find the one in which two passes part."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

CPU = torch.device("cpu")


class Call(NamedTuple):
    """One call of one layer. `drew` names the generators beside torch's that moved within it."""

    layer: str
    inputs: list[Tensor]
    outputs: list[Tensor]
    drew: list[str]


@contextmanager
def watched(module: nn.Module) -> Iterator[list[Call]]:
    """Calls of the module's layers in the order in which they end, so that a layer comes before those around it."""
    calls: list[Call] = []
    begun: list[tuple[list[Tensor], dict[str, object]]] = []

    def hooks(name: str, layer: nn.Module) -> list[Any]:
        def begin(_: nn.Module, given: object, named: object) -> None:
            begun.append((_kept((given, named)), foreign_generators()))

        def end(_: nn.Module, given: object, named: object, found: object) -> None:
            inputs, before = begun.pop()
            drew = [which for which, state in foreign_generators().items() if state != before[which]]
            calls.append(Call(name, inputs, _kept(found), drew))

        return [
            layer.register_forward_pre_hook(begin, with_kwargs=True),
            layer.register_forward_hook(end, with_kwargs=True),
        ]

    handles = [handle for name, layer in module.named_modules() for handle in hooks(name, layer)]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def first_difference(one: list[Call], other: list[Call], same: Callable[[Tensor, Tensor], bool | None]) -> str:
    """The innermost layer that was given the same in both passes and gave something else; "" if only the whole module
    does. `same` may say None of tensors that cannot be held against each other."""
    for a, b in zip(one, other):
        inputs = [same(*pair) for pair in zip(a.inputs, b.inputs)]
        if a.layer == b.layer and all(inputs) and any(same(*pair) is False for pair in zip(a.outputs, b.outputs)):
            return a.layer
    return ""


def foreign_generators() -> dict[str, object]:
    """How far the generators are that Python and numpy share among all that runs."""
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002
    return {"Python's random": random.getstate(), "numpy.random": (kind, np.asarray(keys).tobytes(), *rest)}


def tensors(found: object) -> list[Tensor]:
    """Those in what a module takes or returns."""
    if isinstance(found, Tensor):
        return [found]
    if isinstance(found, Mapping):
        return [tensor for part in found.values() for tensor in tensors(part)]
    if isinstance(found, tuple | list):
        return [tensor for part in found for tensor in tensors(part)]
    logits = getattr(found, "logits", None)
    return [logits] if isinstance(logits, Tensor) else []


def _kept(found: object) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors(found) if tensor.layout is torch.strided]


@contextmanager
def generators_kept(device: torch.device = CPU) -> Iterator[None]:
    """Keep the states of the generators of torch (also of `device`, where it is a GPU), numpy and Python."""
    numpys, pythons = np.random.get_state(), random.getstate()  # noqa: NPY002
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        np.random.set_state(numpys)  # noqa: NPY002
        random.setstate(pythons)
