"""How torch runs: its threads, the settings for single examples, and the switches and generators of the process."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

import numpy as np
import torch

_CPU = torch.device("cpu")


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


# oneDNN is switched for the whole process.
_OTHERS, _users = Lock(), 0
_before: bool = True


@contextmanager
def one_example_a_time() -> Iterator[None]:
    """How torch takes one example: on one thread, and without oneDNN, whose set-up for each small convolution costs as
    much as the convolution (a step of the MNIST CNN takes twice as long with it, one of the CIFAR CNN the same).

    Where several threads take examples, oneDNN comes back with the last of them: before, it would round what others are
    in the midst of.
    """
    global _users, _before
    with _OTHERS:
        if not _users:
            _before = bool(torch.backends.mkldnn.enabled)
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
        _users += 1
    try:
        with torch_threads(1):
            yield
    finally:
        with _OTHERS:
            _users -= 1
            if not _users:
                torch.backends.mkldnn.enabled = _before  # type: ignore[assignment]


class Switches:
    """What a forward pass may switch for its thread or for the process, as it was when this was made.

    One that raises for an example before it has switched back leaves it so, and all later examples would be computed
    otherwise, or would have no gradient at all.
    """

    def __init__(self) -> None:
        self._before = _switches()

    def put_back(self) -> None:
        if _switches() == self._before:
            return
        gradients, threads, kind, autocast, autocast_kind = self._before
        torch.set_grad_enabled(gradients)
        torch.set_num_threads(threads)
        torch.set_default_dtype(kind)
        torch.set_autocast_enabled("cpu", autocast)
        torch.set_autocast_dtype("cpu", autocast_kind)


def _switches() -> tuple[bool, int, torch.dtype, bool, torch.dtype]:
    return (
        torch.is_grad_enabled(),
        torch.get_num_threads(),
        torch.get_default_dtype(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
    )


@contextmanager
def generators_kept(device: torch.device = _CPU) -> Iterator[None]:
    """Restore the generators of torch (also of `device`, where it is a GPU), numpy and Python afterwards."""
    numpys, pythons = np.random.get_state(), random.getstate()  # noqa: NPY002
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        np.random.set_state(numpys)  # noqa: NPY002
        random.setstate(pythons)
