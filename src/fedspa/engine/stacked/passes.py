"""Forward and backward over a stack of agents on a GPU, and the sums of clipped gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedspa.engine.stacked import sum_kernels
from fedspa.engine.stacked.buffers import ChainBuffers, Shape
from fedspa.engine.stacked.layers import fuse
from fedspa.engine.stacked.layers.base import Layer, Stage
from fedspa.engine.stacked.streams import Streams


class Passes:
    """`all_sums` holds every layer's partial sums; `table` says where: first coordinate, size, start, parts."""

    def __init__(self, layers: Sequence[Layer], shape: Shape, held: ChainBuffers, tf32: bool, streams: Streams) -> None:
        self.stage = Stage(shape, held, "tf32" if tf32 else "ieee", streams)
        self._units = [layer.unit(self.stage) for layer in fuse(list(layers))]
        for before, after in zip(self._units, self._units[1:]):
            before.after, after.before = after, before
        self._trained = [unit for unit in self._units if unit.layer.size]
        self._allocate(held.x.device)

    def _allocate(self, device: torch.device) -> None:
        stage, s = self.stage, self.stage.shape
        parts: list[tuple[int | None, int, int, int]] = []
        end = 0
        for unit in self._trained:
            parts.append((unit.layer.start, unit.layer.size, end, unit.split))
            end += s.agents * unit.split * unit.layer.size
            unit.first_tile = stage.tiles
            stage.tiles += unit.programs
        self.all_sums = torch.zeros(end, dtype=torch.float64, device=device)
        for unit, (_, size, start, split) in zip(self._trained, parts):
            unit.sums = self.all_sums[start : start + s.agents * split * size]
        self.table = torch.tensor(parts, dtype=torch.int64, device=device)
        self.most_parts = max(unit.split for unit in self._trained)
        statistics = stage.tiles if s.clip == "l2" or s.quantile else 1
        stage.first = stage.make(s.capacity, statistics, dtype=torch.float64)
        stage.second = stage.make(s.capacity, statistics if s.clip == "coordinate" else 1, dtype=torch.float64)
        stage.factors = torch.ones(s.agents, s.capacity, device=device)

    def prepare(self) -> None:
        """What the step's kernels need of θ; they wait for it."""
        for unit in self._units:
            unit.prepare()
        self.stage.prepared = self.stage.streams.mark()

    def forward(self) -> Tensor:
        """The logits of the step's batches; units keep what `backward` needs."""
        s, x = self.stage.shape, self.stage.held.x
        for unit in self._units:
            x = unit.forward(x).view(s.agents, s.capacity, -1)
        return x

    def backward(self, delta: Tensor, mode: Any) -> None:
        """From the loss's δ; adds up every layer's gradients by `mode`."""
        for unit in reversed(self._units):
            if unit.layer.size:
                unit.delta = delta
                with self.stage.streams.beside():
                    unit.sum(mode, self._masked(mode))
            if unit is self._trained[0]:
                return
            delta = unit.backward(delta)

    def sum_again(self, mode: Any) -> None:
        for unit in reversed(self._trained):
            unit.sum(mode, self._masked(mode))

    def _masked(self, mode: Any) -> bool:
        return self.stage.shape.masked and mode != sum_kernels.SUM and mode != sum_kernels.CLAMP
