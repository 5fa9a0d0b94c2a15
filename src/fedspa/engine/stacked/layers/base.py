"""What a layer is to this back end: a rule in torch, and on a GPU a unit with buffers and launches.

The rules are all there is on a CPU, and the twins of the kernels. A layer `norm.py` has its kernels in
`norm_kernels.py`, which is imported on a GPU only: Triton is there only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedspa.engine import Unsupported, chain
from fedspa.engine.stacked.buffers import ChainBuffers, Shape, Streams

Kept = tuple[Tensor, ...]
Blocks = tuple[int, int, int, int, int]


class Layer(ABC):
    """`inputs` and `outputs` are values of an example, which are flat. A layer that is trained has `size` parameters
    from `start` on in θ: its weight's, then its bias's."""

    size: int = 0
    start: int | None = None
    only_first: ClassVar[bool] = False
    # Whether its unit has kernels, and buffers for them.
    launched: ClassVar[bool] = False

    def __init__(self, inputs: int, outputs: int) -> None:
        self.inputs, self.outputs = inputs, outputs

    @abstractmethod
    def forward(self, theta: Tensor, x: Tensor) -> tuple[Tensor, Kept]:
        """[b, inputs] → [b, outputs], and what the way back needs."""

    @abstractmethod
    def backward(self, theta: Tensor, kept: Kept, delta: Tensor) -> Tensor:
        """δ of the outputs → δ of the inputs."""

    def gradients(self, kept: Kept, delta: Tensor) -> Tensor:
        """Each example's gradient of the layer's parameters, [b, size]."""
        return delta.new_empty(len(delta), 0)

    def readable(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Records that it can take as they are, and which of them it could not; None: none."""
        return x, None

    def as_module_takes(self, x: Tensor) -> Tensor:
        """Records in the type that torch's own layer wants."""
        return x

    def fuse(self, following: Sequence[Layer]) -> tuple[Layer, int]:
        """The layer with as many of the following ones as its kernels run with it, and how many those are."""
        return self, 0

    def unit(self, stage: Stage) -> Unit:
        return Unit(self, stage)


@dataclass
class Stage:
    """What the units of a stack share. `first`, `second` and `factors` are the examples' statistics by tile."""

    shape: Shape
    held: ChainBuffers
    precision: str
    streams: Streams
    tiles: int = 0
    first: Tensor = field(init=False)
    second: Tensor = field(init=False)
    factors: Tensor = field(init=False)
    prepared: torch.cuda.Event | None = None

    def make(self, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(self.shape.agents, *size, dtype=dtype, device=self.held.x.device)


class Unit:
    """A layer on a GPU, with what is fused to it: this one by its rule, others by their kernels. Values and δ are
    [agents, capacity, …]; `before` and `after` are its neighbours.

    Of a unit that is trained, `programs` make the sums of its gradients, `split` times over: they share an agent's
    examples. Blocks (outputs, columns, inner, warps, stages) depend on the layer alone, so that the order of every sum,
    and with it every bit, is the same in any company."""

    programs: int
    split: int
    sum_blocks: Blocks
    x: Tensor
    delta: Tensor
    sums: Tensor
    first_tile: int
    before: Unit | None = None
    after: Unit | None = None

    def __init__(self, layer: Layer, stage: Stage) -> None:
        self.layer, self.stage = layer, stage

    @cached_property
    def kernels(self) -> Any:
        return import_module(f"{type(self).__module__}_kernels")

    def prepare(self) -> None:
        """What a step's kernels need of θ before they run."""

    def forward(self, x: Tensor) -> Tensor:
        self.x = x
        out, self._kept = self.layer.forward(self.stage.held.theta, self.flat(x))
        return out

    def backward(self, delta: Tensor) -> Tensor:
        """δ of the unit before, as its kernels want it."""
        return self.to_before(self.layer.backward(self.stage.held.theta, self._kept, self.flat(delta)))

    def sum(self, mode: Any, masked: bool) -> None:
        """Add up the gradients of what is trained, by `mode`."""

    def to_before(self, delta: Tensor) -> Tensor:
        """δ of its input → δ of the unit before, where no kernel does it."""
        assert self.before is not None
        return self.before.unfuse(self.flat(self.x), delta).contiguous()

    def unfuse(self, out: Tensor, delta: Tensor) -> Tensor:
        """δ of its output, where `out` is that, back through what is fused to it."""
        return delta

    def flat(self, values: Tensor) -> Tensor:
        return values.reshape(self.stage.shape.agents * self.stage.shape.capacity, -1)

    def share_out(self, sum_blocks: Blocks, programs: int, most: int) -> None:
        """As many parts as make an agent's programs some 64, or `most`."""
        self.sum_blocks, self.programs = sum_blocks, programs
        self.split = power(-(-64 // programs), 1, most)

    def launch_sum(self, kernel: Any, values: Tensor, mode: Any, masked: bool, **constants: Any) -> None:
        stage, held, s = self.stage, self.stage.held, self.stage.shape
        *_, warps, stages = self.sum_blocks
        kernel[(self.programs, self.split, s.agents)](
            *(self.delta, values, self.sums, held.masks, held.clips, stage.factors, stage.first, stage.second),
            *(held.counts, held.step, s.agents, s.capacity, s.dimension, self.layer.start),
            *(self.first_tile, stage.tiles),
            **constants, MASKED=masked, MODE=mode, SPLIT=self.split, num_warps=warps, num_stages=stages,
        )  # fmt: skip


def bias_behind(weight: int | None, weights: int, bias: int | None) -> None:
    if weight is not None and bias is not None and bias != weight + weights:
        raise Unsupported("a bias does not follow its weight in the order of the parameters")


def power(value: int, low: int, high: int) -> int:
    """The power of two that is not below `value`, within [low, high]."""
    return min(high, max(low, 1 << max(0, value - 1).bit_length()))


class Activation(Layer):
    def __init__(self, layer: chain.Activation, inputs: int) -> None:
        super().__init__(inputs, inputs)
        self.kind = layer.kind

    def forward(self, theta: Tensor, x: Tensor) -> tuple[Tensor, Kept]:
        out = x.relu() if self.kind == "relu" else x.tanh()
        return out, (out,)

    def backward(self, theta: Tensor, kept: Kept, delta: Tensor) -> Tensor:
        return self.derivative(kept[0], delta)

    def derivative(self, out: Tensor, delta: Tensor) -> Tensor:
        if self.kind == "relu":
            back: Tensor = torch.ops.aten.threshold_backward(delta, out, 0)
            return back
        return delta * (1 - out * out)


aten = torch.ops.aten


class Pool(Layer):
    def __init__(self, layer: chain.Pool, inputs: int) -> None:
        super().__init__(inputs, layer.image[0] * layer.out[0] * layer.out[1])
        self._layer, self.halves = layer, layer.halves
        self._window = (layer.kernel, layer.stride, layer.padding)

    def forward(self, theta: Tensor, x: Tensor) -> tuple[Tensor, Kept]:
        image = x.view(-1, *self._layer.image)
        if self._layer.kind == "max":
            out, where = aten.max_pool2d_with_indices(image, *self._window)
            return out.flatten(1), (x, where)
        return aten.avg_pool2d(image, *self._window, False, self._layer.count_padding).flatten(1), (x,)

    def backward(self, theta: Tensor, kept: Kept, delta: Tensor) -> Tensor:
        image = kept[0].reshape(-1, *self._layer.image)
        delta = delta.view(-1, self._layer.image[0], *self._layer.out)
        if self._layer.kind == "max":
            back: Tensor = aten.max_pool2d_with_indices_backward(delta, image, *self._window, (1, 1), False, kept[1])
        else:
            back = aten.avg_pool2d_backward(delta, image, *self._window, False, self._layer.count_padding, None)
        return back.flatten(1)


def unpool(planes: int, sides: tuple[int, int], winner: Tensor, delta: Tensor) -> Tensor:
    """δ of 2 × 2 windows' maxima → δ of the windows, [b, planes · sides]; `winner` is each maximum's place (0 to 3)."""
    windows = (-1, planes, sides[0] // 2, 1, sides[1] // 2, 1)
    place = torch.arange(4, device=delta.device).view(1, 1, 1, 2, 1, 2)
    return torch.where(winner.view(windows) == place, delta.view(windows), 0.0).flatten(1)
