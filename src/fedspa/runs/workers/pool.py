"""Processes that a crew is made of, whoever starts them."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Protocol

LARGEST_SHARE = 90_000  # bytes; from 100 KiB on Ray keeps what is sent in its store of objects


class Hand(Protocol):
    """One worker process. Its answers are those of `worker.Worker`, whose calls may fail with one of `Pool.lost`."""

    def start(self, made: Any) -> Future[bytes]:
        """Build what it works with; `made` was published."""
        ...

    def work(self, announced: Any | None, share: bytes, records: bytes) -> Future[bytes]:
        """Train a share of a round. `announced` is the round as it was published, None where it has that already. The
        share has keys in it, and is less than `LARGEST_SHARE`: it must touch no disk."""
        ...

    def end(self) -> None:
        """It may be dead already, or at work: nobody waits for it."""
        ...


class Pool(Protocol):
    """Where worker processes come from."""

    lost: tuple[type[Exception], ...]

    @property
    def room(self) -> str:
        """What there is to place workers on, in words."""
        ...

    def hire(self) -> Hand:
        """One more process, which may take a while to come up."""
        ...

    def publish(self, content: bytes) -> Any:
        """What stands for `content` in calls, so that it travels once to each machine."""
        ...

    def close(self) -> None: ...
