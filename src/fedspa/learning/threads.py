"""How torch runs: the number of its threads, and what suits single examples."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """One thread for the small tensors of local training: torch's barriers between two cost 10 times the work, wherever
    anything else wants the cores, and results must not depend on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def one_example_a_time() -> Iterator[None]:
    """How torch takes one example: on one thread, and without oneDNN, whose set-up for each small convolution costs as
    much as the convolution (a step of the MNIST CNN takes twice as long with it, one of the CIFAR CNN the same)."""
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    try:
        with torch_threads(1):
            yield
    finally:
        torch.backends.mkldnn.enabled = before
