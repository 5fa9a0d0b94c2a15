"""What a step does with per-example gradients, on a GPU by kernels and on a CPU by their twins."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fedspa.engine.stacked.buffers import RoundBuffers, Shape
from fedspa.engine.stacked.chacha import GROUP, LANES
from fedspa.engine.traced import gpu_twins
from fedspa.engine.traced.gpu_layers import TILE, Made, OfTokens
from fedspa.mechanisms.clipping import CLIP_MARGIN

_BLOCK, _ROWS, _COLUMNS = 512, 8, 256
_UNITS = 2.0**40  # whole numbers of an Embedding's sums, to the clip value


class Steps:
    def __init__(self, held: RoundBuffers, shape: Shape, sums: Tensor, shares: Tensor) -> None:
        self._held, self._shape, self._sums, self._shares = held, shape, sums, shares
        self._table = torch.tensor([[0, shape.dimension, 0, 1]], dtype=torch.int64, device=sums.device)
        self._on_gpu = sums.is_cuda

    def draw_noise(self) -> None:
        held, s = self._held, self._shape
        if not self._on_gpu:
            held.noise.copy_(gpu_twins.noise(held.keys, int(held.step), s.active))
            return
        from fedspa.engine.stacked import step_kernels

        grid = (math.ceil(s.active / GROUP) + 1, s.agents)
        step_kernels.noise[grid](held.keys, held.step, held.noise, s.active, LANES=LANES, num_warps=2)

    def measured(self, parts: Sequence[Made], examples: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of each example [agents, examples]: Σ g² of its active gradients, how many are not zero, or above a clip."""
        s, clips = self._shape, self._held.clips
        if not self._on_gpu:
            found = [gpu_twins.measure(part.values.flatten(2), part.mask, clips, s.quantile) for part in parts]
            squares, alive, above = (torch.stack(each).sum(0) for each in zip(*found))
            return squares, alive, above
        from fedspa.engine.traced import gpu_kernels

        tiles = sum(part.tiles for part in parts)
        squares, alive, above = (
            torch.zeros(s.agents, examples, tiles if wanted else 1, dtype=torch.float64, device=clips.device)
            for wanted in (True, s.quantile, s.quantile)
        )
        first = 0
        for part in parts:
            mask = part.mask
            gpu_kernels.measure[(part.tiles, s.agents * examples)](
                *(part.values, part.values if mask is None else mask, clips, squares, alive, above),
                *(part.size, examples, tiles, first),
                MASKED=mask is not None, COUNT=s.quantile, BLOCK=TILE,
            )  # fmt: skip
            first += part.tiles
        return squares.sum(2), alive.sum(2), above.sum(2)

    def add(self, parts: Sequence[Made], factors: Tensor, *, more: bool) -> None:
        """Clipped gradients into the sums; `more` where these hold a block already."""
        s = self._shape
        bounds, clamp = self._held.clips * (1 - CLIP_MARGIN), s.clip == "coordinate"
        units = _UNITS / self._held.clips
        for part in parts:
            layer = part.layer
            if part.tokens is None:
                self._add_dense(part, factors, bounds, clamp, more)
                continue
            assert isinstance(layer, OfTokens)
            if not more:
                layer.whole.zero_()
            if self._on_gpu:
                from fedspa.engine.traced import gpu_kernels

                gpu_kernels.scatter[(math.ceil(part.size / _BLOCK), factors.numel())](
                    *(part.values, part.tokens, factors, bounds, units, layer.whole),
                    *(factors.shape[1], layer.words, part.values.shape[3], part.size),
                    CLAMP=clamp, BLOCK=_BLOCK,
                )  # fmt: skip
            else:
                layer.whole += gpu_twins.scatter(part.values, part.tokens, factors, bounds, units, layer.words, clamp)
            place = self._sums[:, layer.start : layer.start + layer.size]
            place.copy_(layer.whole.flatten(1).double() / units.unsqueeze(1))

    def _add_dense(self, part: Made, factors: Tensor, bounds: Tensor, clamp: bool, more: bool) -> None:
        layer, s = part.layer, self._shape
        if not self._on_gpu:
            found = gpu_twins.add(part.values, factors, bounds, clamp)
            found = found + self._sums[:, layer.coordinates] if more else found
            self._sums.index_copy_(1, layer.coordinates, found)
            return
        from fedspa.engine.traced import gpu_kernels

        gpu_kernels.add[(math.ceil(part.size / _COLUMNS), s.agents)](
            *(part.values, factors, bounds, layer.coordinates, self._sums),
            *(part.size, factors.shape[1], s.dimension),
            CLAMP=clamp, MORE=more, ROWS=_ROWS, BLOCK=_COLUMNS,
        )  # fmt: skip

    def step(self) -> None:
        """θ moves by the noisy sums, and the clip by the private quantile."""
        held, s = self._held, self._shape
        if not self._on_gpu:
            gpu_twins.take_step(held, self._sums, masked=s.masked)
            if s.quantile:
                gpu_twins.move_clip(held, self._shares)
            held.step.add_(1)
            return
        from fedspa.engine.stacked.step_end import end_step

        end_step(held, s, self._sums, self._table, 1, self._shares)
