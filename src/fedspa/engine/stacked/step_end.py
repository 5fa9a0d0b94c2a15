"""The end of a GPU's step, whoever made the sums: θ moves by the noisy mean, the clip by the private quantile."""

from __future__ import annotations

import math

from torch import Tensor

from fedspa.engine.stacked import step_kernels
from fedspa.engine.stacked.buffers import RoundBuffers, Shape
from fedspa.mechanisms.base import LARGEST_CLIP, SMALLEST_CLIP
from fedspa.mechanisms.gaussian.plan import CLIP_QUANTILE, CLIP_RATE


def end_step(held: RoundBuffers, s: Shape, sums: Tensor, table: Tensor, parts: int, shares: Tensor) -> None:
    """`table` says where in `sums` each layer's are, in `parts` at most; `shares` feed the quantile."""
    step_kernels.take_step[(math.ceil(s.active / 256), s.agents)](
        *(held.theta, held.coordinates, sums, table, held.noise, held.clips, held.sigmas),
        *(held.batches, held.sizes, held.flags, s.agents, s.dimension, s.active),
        LAYERS=len(table), SPLITS=parts, MASKED=s.masked, NOISY=s.clip is not None, BLOCK=256,
    )  # fmt: skip
    if s.quantile:
        step_kernels.move_clip[(s.agents,)](
            *(shares, held.noise, held.clips, held.count_sigmas, held.batches, held.counts, held.step),
            *(s.agents, s.capacity, s.active),
            RATE=CLIP_RATE, QUANTILE=CLIP_QUANTILE, LEAST=SMALLEST_CLIP, MOST=LARGEST_CLIP, BLOCK=64, num_warps=1,
        )  # fmt: skip
    held.step.add_(1)
