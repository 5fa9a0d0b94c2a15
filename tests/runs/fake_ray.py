"""Ray played by threads: each actor has a `Worker` of its own, and may be told to die or to be slow."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from threading import Lock
from types import SimpleNamespace
from typing import Any

import pytest

from fedspa.runs import ray_workers

_ONE = Lock()  # torch's generator and switches are one for all threads; processes have their own


class Died(Exception):
    """What a call to a dead actor ends in."""


class Stored:
    """A reference to an object of the store."""

    def __init__(self, value: object) -> None:
        self.content = pickle.dumps(value)


class Actor:
    """Started anew, and its call repeated, as often as its options say."""

    def __init__(self, ray: FakeRay, make: Callable[[], Any], number: int, retries: int) -> None:
        self.ray, self.make, self.number, self.retries, self.killed = ray, make, number, retries, False
        self.worker: Any = None
        self._thread = ThreadPoolExecutor(1)
        self.facts, self.train = (SimpleNamespace(remote=self._remote(name)) for name in ("facts", "train"))

    def _remote(self, name: str) -> Callable[..., Future[Any]]:
        def remote(*arguments: Any) -> Future[Any]:
            return self._thread.submit(self._call, name, arguments)

        return remote

    def _call(self, name: str, arguments: tuple[Any, ...]) -> Any:
        for _ in range(self.retries + 1):
            self.ray.calls.append((name, arguments))
            if self.ray.dies(self.number, name, sum(called == name for called, _ in self.ray.calls)):
                self.worker, self.ray.lost = None, self.ray.lost + 1
                continue
            time.sleep(self.ray.slow.get(self.number, 0.0) if name == "train" else 0.0)
            with _ONE:
                if self.worker is None:
                    self.worker = self.make()
                return getattr(self.worker, name)(*map(_content, arguments))
        raise Died(f"worker {self.number}")


def _content(value: Any) -> Any:
    return pickle.loads(value.content) if isinstance(value, Stored) else value


class ActorPool:
    """As Ray's: each actor that is free gets the next value."""

    def __init__(self, actors: list[Actor]) -> None:
        self.actors = actors

    def map_unordered(self, submit: Callable[[Actor, Any], Future[Any]], values: list[Any]) -> Iterator[Any]:
        idle, busy, left = list(self.actors), dict[Future[Any], Actor](), list(values)
        while left or busy:
            while left and idle:
                actor = idle.pop()
                busy[submit(actor, left.pop(0))] = actor
            done, _ = wait(busy, return_when=FIRST_COMPLETED)
            for future in done:
                idle.append(busy.pop(future))
                yield future.result()


class FakeRay:
    """`dies` is asked before each call, with the actor's number, the call's name and how many of them there were;
    `slow` are seconds per batch of an actor."""

    exceptions = SimpleNamespace(RayError=Died)
    cloudpickle = pickle
    util = SimpleNamespace(ActorPool=ActorPool)

    def __init__(
        self,
        dies: Callable[[int, str, int], bool] = lambda number, name, count: False,
        slow: dict[int, float] | None = None,
    ) -> None:
        self.dies, self.slow = dies, slow or {}
        self.actors: list[Actor] = []
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.stored: list[Stored] = []
        self.closed = self.lost = 0

    def put(self, value: object) -> Stored:
        self.stored.append(Stored(value))
        return self.stored[-1]

    def remote(self, make: Callable[..., Any]) -> Any:
        def options(max_task_retries: int, **_: Any) -> Any:
            def started(*made: Stored) -> Actor:
                own = lambda: make(*map(_content, made))  # noqa: E731
                self.actors.append(Actor(self, own, len(self.actors), max_task_retries))
                return self.actors[-1]

            return SimpleNamespace(remote=started)

        return SimpleNamespace(options=options)

    def wait(self, futures: list[Future[Any]], num_returns: int, timeout: float | None) -> tuple[list[Any], list[Any]]:
        done, left = wait(futures, timeout=timeout)
        return list(done)[:num_returns], list(left)

    def get(self, future: Future[Any]) -> Any:
        return future.result()

    def kill(self, actor: Actor) -> None:
        actor.killed = True

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 8.0}


@pytest.fixture
def fake_ray(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeRay]:
    """Makes the Ray that runs with workers have from here on."""

    def play(**how: Any) -> FakeRay:
        ray = FakeRay(**how)

        @contextmanager
        def connected(*asked: int) -> Iterator[FakeRay]:
            try:
                yield ray
            finally:
                ray.closed += 1

        monkeypatch.setattr(ray_workers, "connected", connected)
        return ray

    return play
