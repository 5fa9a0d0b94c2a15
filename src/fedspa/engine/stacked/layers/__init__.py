"""The layers that the stacked back end has rules and kernels for."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from fedspa.engine import Unsupported, chain
from fedspa.engine.chain import describe as describe_chain
from fedspa.engine.stacked.layers.base import Activation, Layer, Pool
from fedspa.engine.stacked.layers.norm import Embedding, Norm
from fedspa.engine.stacked.layers.weighted import Weighted

KINDS: dict[type, Any] = {
    chain.Weighted: Weighted,
    chain.Pool: Pool,
    chain.Norm: Norm,
    chain.Embedding: Embedding,
    chain.Activation: Activation,
}


def describe(module: nn.Module, input_shape: chain.Shape) -> list[Layer]:
    """The layers in the order in which data passes them; raises `Unsupported`. Values are flat, so no Flatten."""
    found: list[Layer] = []
    for description in describe_chain(module, input_shape):
        if type(description) is not chain.Flatten:
            inputs = found[-1].outputs if found else math.prod(input_shape)
            found.append(KINDS[type(description)](description, inputs))
    for layer in found[1:]:
        if layer.only_first:
            raise Unsupported(f"an {type(layer).__name__} that is not the first layer")
    return found


def fuse(found: list[Layer]) -> list[Layer]:
    """Each layer with the following ones that its kernels run with it."""
    fused: list[Layer] = []
    rest = list(found)
    while rest:
        layer, taken = rest[0].fuse(rest[1:])
        fused.append(layer)
        rest = rest[1 + taken :]
    return fused
