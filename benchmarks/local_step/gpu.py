"""Time and memory of work on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def timed(work: Callable[[], object]) -> float:
    """Seconds until the GPU has done it."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def finished(work: Callable[[int], T]) -> Callable[[int], T]:
    """The same work, which returns when the GPU has done it."""

    def run(steps: int) -> T:
        result = work(steps)
        torch.cuda.synchronize()
        return result

    return run


def peak_mib(work: Callable[[], object]) -> tuple[float, float]:
    """Over what was held before: the most that tensors had, and the most that torch took of the GPU (graphs too)."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    tensors, taken = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    work()
    torch.cuda.synchronize()
    return (
        (torch.cuda.max_memory_allocated() - tensors) / 2**20,
        (torch.cuda.max_memory_reserved() - taken) / 2**20,
    )
