"""A crew's processes played by threads: each has a `Worker` of its own, and may be told to die or to be slow."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Any

import pytest

from fedspa.runs.workers import hired
from fedspa.runs.workers.messages import packed
from fedspa.runs.workers.pool import LARGEST_SHARE
from fedspa.runs.workers.worker import Worker

_ALONE = Lock()  # torch's generator and switches are one for all threads; processes have their own


class Died(Exception):
    """What a call to a dead process ends in."""


class ThreadHand:
    def __init__(self, pool: ThreadPool, number: int) -> None:
        self.pool, self.number, self.worker, self.dead = pool, number, Worker(), False
        self.rounds: list[bytes] = []
        self._thread = ThreadPoolExecutor(1)

    def start(self, made: bytes) -> Future[bytes]:
        return self._thread.submit(self._alive, lambda: self.worker.start(made), "start")

    def work(self, announced: bytes | None, share: bytes, records: bytes) -> Future[bytes]:
        assert len(share) < LARGEST_SHARE
        if announced is not None:
            self.rounds.append(announced)
        return self._thread.submit(self._alive, lambda: self.worker.work(announced, share, records), "work")

    def end(self) -> None:
        self._thread.shutdown(wait=False)

    def _alive(self, call: Callable[[], bytes], what: str) -> bytes:
        self.pool.calls[what] += 1
        self.dead = self.dead or self.pool.dies(self, what)
        if self.dead:
            raise Died(f"worker {self.number}")
        time.sleep(self.pool.slow.get(self.number, 0.0) if what == "work" else 0.0)
        with _ALONE:
            return call()


class ThreadPool:
    """`dies` is asked before each call, with the hand and the call's name; `slow` are seconds per share of a hand."""

    lost = (Died,)
    room = "there are threads"

    def __init__(self, dies: Callable[[ThreadHand, str], bool] | None = None, slow: dict[int, float] | None = None):
        self.hands: list[ThreadHand] = []
        self.calls: Counter[str] = Counter()
        self.dies, self.slow = dies or (lambda hand, what: False), slow or {}
        self.closed = 0

    def hire(self) -> ThreadHand:
        self.hands.append(ThreadHand(self, len(self.hands)))
        return self.hands[-1]

    def publish(self, content: bytes) -> bytes:
        return content

    def packed(self, value: object) -> bytes:
        return packed(value)

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ThreadPool]:
    """Gives the pool that runs with workers have from here on."""

    def play(**how: Any) -> ThreadPool:
        pool = ThreadPool(**how)
        monkeypatch.setattr(hired, "RayPool", lambda *asked: pool)
        return pool

    return play
