"""Fed-SPA's mechanism in plain PyTorch, for rows of per-example gradients, and Opacus to make such rows.

Needs torch and Opacus only, so that peers in an environment of their own can use it. The noise is torch's ordinary
generator's, which is cheaper than a cryptographic one and not private.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class Mechanism:
    """Clip, cut to the mask, sum, add noise, step, on rows of per-example gradients; nothing of size d but at p = 1."""

    def __init__(
        self,
        module: nn.Module,
        mask: Tensor | None,
        clip: str,
        bound: float,
        noise_multiplier: float,
        rate: float,
        generator: torch.Generator,
    ) -> None:
        """`rate` is what the noisy sum is multiplied by in a step; `mask` numbers the active coordinates of θ."""
        sizes = [p.numel() for p in trained(module)]
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        self._masks = [
            None if mask is None else mask[(mask >= start) & (mask < start + size)] - start
            for start, size in zip(starts, sizes)
        ]
        self._clip, self._bound = clip, bound
        active = sum(sizes) if mask is None else len(mask)
        self._deviation = noise_multiplier * bound * (math.sqrt(active) if clip == "coordinate" else 1.0)
        self._rate, self._generator = rate, generator

    def __call__(self, rows: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
        """`rows` are the gradients of all examples, a tensor a parameter; they are used up."""
        active = [
            row.flatten(1) if mask is None else row.flatten(1).index_select(1, mask)
            for row, mask in zip(rows, self._masks)
        ]
        if self._clip == "coordinate":
            sums = [part.clamp_(-self._bound, self._bound).sum(0) for part in active]
        else:
            norms = torch.stack([torch.linalg.vector_norm(part, dim=1) for part in active]).norm(dim=0)
            factors = (self._bound / norms).clamp_(max=1.0)
            sums = [factors @ part for part in active]
        self.step(sums, parameters)

    @torch.no_grad()
    def step(self, sums: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
        for total, mask, p in zip(sums, self._masks, parameters):
            total.add_(torch.randn(total.shape, generator=self._generator, device=total.device), alpha=self._deviation)
            if mask is None:
                p.add_(total.view_as(p), alpha=-self._rate)
            else:
                p.view(-1).index_add_(0, mask, total, alpha=-self._rate)


def trained(module: nn.Module) -> list[nn.Parameter]:
    """θ's parts; what is frozen is none of them."""
    return [p for p in module.parameters() if p.requires_grad]


def opacus_rows(module: nn.Module, mode: str) -> Callable[[Tensor, Tensor], list[Tensor]]:
    """Per-example gradients, a tensor a parameter. `mode` is Opacus's: hooks, functorch or ew (expanded weights)."""
    from opacus.grad_sample import wrap_model

    wrapped = wrap_model(module, grad_sample_mode=mode, loss_reduction="sum")
    parameters: list[Any] = trained(module)  # Opacus gives them a `grad_sample`
    warnings.filterwarnings("ignore", message="Full backward hook is firing")

    def rows(x: Tensor, y: Tensor) -> list[Tensor]:
        wrapped.zero_grad(set_to_none=True)
        functional.cross_entropy(wrapped(x), y, reduction="sum").backward()
        found = [p.grad_sample for p in parameters]
        for p in parameters:
            p.grad_sample = None
        return found

    return rows
