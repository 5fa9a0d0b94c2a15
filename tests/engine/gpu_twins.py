"""The work of a step in torch, on a CPU: what the kernels of `gpu_work.py` are tested against."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from chacha import ChaChaNoise
from torch import Tensor

from fedspa.engine.traced import ops
from fedspa.engine.traced.gpu_stack import UNITS, Columns, Parameters, RoundBuffers, Shape, Tokens
from fedspa.mechanisms.clipping import CLIP_MARGIN


class Twins:
    def __init__(self, held: RoundBuffers, shape: Shape) -> None:
        self._held, self._shape = held, shape

    def draw_noise(self) -> None:
        self._held.noise.copy_(noise(self._held.keys, int(self._held.step), self._shape.active))

    def spread(self, parameters: Parameters) -> None:
        for agent, first, to, size in parameters.tiles.tolist():
            parameters.whole[to : to + size] = self._held.theta[agent, first : first + size]

    def gather(self, pool: Tensor, start: int, size: int) -> Tensor:
        chosen, there = self._chosen(start, size)
        agent = torch.arange(self._shape.agents).unsqueeze(1)
        found = pool[agent, chosen.clamp(min=0)]
        return found.masked_fill_(~there.view(*there.shape, *[1] * (found.ndim - 2)), 0)

    def cut(self, columns: Columns, at: int, rows: Tensor, made: Tensor) -> None:
        made = made.view(*rows.shape[:2], -1)
        for w in range(self._shape.agents):
            line = w if self._shape.masked else 0
            low, high = columns.firsts[line, at : at + 2].tolist()
            rows[w, :, low:high] = made[w][:, columns.number[line, low:high].long()]

    def cut_factors(self, columns: Columns, at: int, rows: Tensor, delta: Tensor, x: Tensor) -> None:
        factors = columns.parts[at].factors
        assert factors is not None
        operator, *rest = factors
        self.cut(columns, at, rows, ops.plain[operator](delta, x, *rest).flatten(1))

    def weigh(self, columns: Columns, rows: Tensor, tokens: Sequence[Tokens], readable: Tensor, start: int) -> Tensor:
        """The factors of the examples, float64 [agents, examples]."""
        held, s = self._held, self._shape
        used = torch.arange(s.width).expand(s.agents, -1) < columns.ends.unsqueeze(1)
        parts = [torch.where(used.unsqueeze(1), rows, 0.0), *(each.values.flatten(2) for each in tokens)]
        found = [part.double() for part in parts]
        squares = torch.stack([each.square().sum(2) for each in found]).sum(0)
        norms, limit = squares.sqrt(), (held.clips * (1 - CLIP_MARGIN)).unsqueeze(1)
        _, there = self._chosen(start, rows.shape[1])
        counted = readable.view_as(norms) & squares.isfinite()
        held.zeroed += (there & ~counted).sum(1)
        factors = limit / torch.maximum(norms, limit) if s.clip == "l2" else torch.ones_like(norms)
        return torch.where(counted & there & (factors >= torch.finfo(torch.float32).tiny), factors, 0.0)

    def add(self, columns: Columns, rows: Tensor, factors: Tensor, more: bool) -> None:
        clipped = self._clipped(rows, factors).sum(1)
        for w, sums in enumerate(self._held.sums):
            line = w if self._shape.masked else 0
            at = columns.coordinate[line, : int(columns.ends[line])].long()
            sums[at] = clipped[w, : len(at)] + (sums[at] if more else 0.0)

    def scatter(self, tokens: Tokens, factors: Tensor, more: bool) -> None:
        values = self._clipped(tokens.values.flatten(2), factors).view(tokens.values.shape)
        whole = (values * (UNITS / self._held.clips).view(-1, 1, 1, 1)).long().flatten(1, 2)
        index = tokens.tokens.flatten(1).unsqueeze(2).expand_as(whole)
        found = torch.zeros_like(tokens.whole).scatter_add_(1, index, whole)
        tokens.whole.copy_(tokens.whole + found if more else found)

    def step(self) -> None:
        """θ[ω] −= step size · (Σ clipped + noise)/B."""
        held, s = self._held, self._shape
        total = held.sums.gather(1, held.coordinates) if s.masked else held.sums
        mean = (total + (held.sigmas * held.clips).unsqueeze(1) * held.noise) / held.batches.unsqueeze(1)
        move = (held.sizes.unsqueeze(1) * mean).float()
        held.theta.copy_(held.theta.scatter_add(1, held.coordinates, -move) if s.masked else held.theta - move)
        held.step.add_(1)

    def _chosen(self, start: int, size: int) -> tuple[Tensor, Tensor]:
        """The records of a block of the step's places, and which of these have one."""
        held, places = self._held, torch.arange(start, start + size)
        chosen = held.index[int(held.step)][:, start : start + size]
        return chosen, (places < held.counts[int(held.step)].unsqueeze(1)) & (chosen >= 0)

    def _clipped(self, rows: Tensor, factors: Tensor) -> Tensor:
        """Rows within the bound, in float64; zero where the factor is."""
        g, bound = rows.double(), (self._held.clips * (1 - CLIP_MARGIN)).view(-1, 1, 1)
        g = torch.clamp(g, -bound, bound) if self._shape.clip == "coordinate" else g * factors.unsqueeze(2)
        return torch.where(factors.unsqueeze(2) != 0, g, 0.0)


def noise(keys: Tensor, step: int, active: int) -> Tensor:
    """Standard normals [agents, active]."""
    drawn = []
    for key in keys:
        stream = ChaChaNoise(key.numpy().tobytes())
        stream.start_step(step)
        drawn.append(stream.gaussian(active))
    return torch.from_numpy(np.stack(drawn))
