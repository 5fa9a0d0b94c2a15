"""Two CUDA streams: the main one, and one beside it for what only a step's end waits for. On a CPU, plain order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Streams:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = new_stream(device) if device.type == "cuda" else None

    @contextmanager
    def beside(self) -> Iterator[None]:
        """What runs in it starts after all that was started before it on either stream."""
        if self._side is None:
            yield
            return
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            yield

    def mark(self) -> torch.cuda.Event | None:
        """A point of the side stream, for `wait`."""
        return None if self._side is None else self._side.record_event()

    def wait(self, event: torch.cuda.Event | None) -> None:
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def join(self) -> None:
        if self._side is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._side)


def new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
