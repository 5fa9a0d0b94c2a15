"""How a GPU is to compute, so that the same numbers have the same bits each time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def repeatable(device: torch.device, tf32: bool) -> Iterator[None]:
    """Kernels that add in one order, and products of 10 or of 23 bits. On a CPU nothing has to be changed."""
    if device.type != "cuda":
        yield
        return
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        matmul.allow_tf32,
    )
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    matmul.allow_tf32 = tf32
    try:
        with cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=tf32):
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = before[2]  # type: ignore[attr-defined]
        matmul.allow_tf32 = before[3]
