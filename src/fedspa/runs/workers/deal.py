"""Who trains whom in a round. It decides how long a round takes and what travels, and no bit of the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil

SLACK = 1.1  # a queue that takes this much longer than an even one gives agents away before the round begins


class Queue:
    """Agents that wait for one worker, each with its expected work, and how much of that the worker does a second."""

    def __init__(self) -> None:
        self.open = False  # whether the worker is there
        self._waiting: dict[str, float] = {}
        self._taken: dict[str, float] = {}
        self._speed: float | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def names(self) -> list[str]:
        return list(self._waiting)

    @property
    def work(self) -> float:
        return sum(self._waiting.values())

    @property
    def known(self) -> bool:
        """Whether the worker's speed was ever measured."""
        return self._speed is not None

    def speed(self, usual: float) -> float:
        return self._speed or usual

    def add(self, name: str, work: float) -> None:
        self._waiting[name] = work

    def give_away(self, name: str) -> float:
        return self._waiting.pop(name)

    def begin(self) -> None:
        self._waiting, self._taken = {}, {}

    def take(self, names: Sequence[str]) -> list[str]:
        """They are no longer waiting."""
        self._taken |= {name: self._waiting.pop(name) for name in names}
        return list(names)

    def back(self, names: Sequence[str]) -> None:
        """They wait again."""
        self._waiting = {name: self._taken.pop(name) for name in names} | self._waiting

    def measured(self, names: Sequence[str], seconds: float) -> None:
        """How long a share took: half of what is believed of the speed comes from the last one."""
        speed = sum(self._taken[name] for name in names) / max(seconds, 1e-6)
        self._speed = speed if self._speed is None else (self._speed + speed) / 2


def deal(work: Mapping[str, float], homes: Mapping[str, Queue], queues: Sequence[Queue]) -> None:
    """Each agent to its home, one without to whoever is done first; then from queues that are much too long to those
    that are done first."""
    for queue in queues:
        queue.begin()
    open_ = [queue for queue in queues if queue.open] or queues
    known = [queue.speed(0.0) for queue in open_ if queue.speed(0.0)]
    usual = sum(known) / len(known) if known else 1.0

    def end(queue: Queue, more: float = 0.0) -> float:
        return (queue.work + more) / queue.speed(usual)

    for name in sorted(work, key=lambda name: (name not in homes, -work[name])):
        queue = homes.get(name) or min(open_, key=lambda queue: end(queue, work[name]))
        queue.add(name, work[name])
    even = sum(work.values()) / sum(queue.speed(usual) for queue in open_)
    while True:
        last, first = max(open_, key=end), min(open_, key=end)
        if end(last) <= SLACK * even:
            return
        lightest = min(last.names, key=lambda name: work[name])
        if end(first, work[lightest]) >= end(last):
            return
        first.add(lightest, last.give_away(lightest))


def next_share(own: Queue, queues: Sequence[Queue], at_once: int | None) -> list[str]:
    """Names that the worker of `own` trains next: half of what waits for it, in whole rows of `at_once`, or of what
    waits for another where that is nothing; one row while nobody knows how fast it is. With None all, and of another's
    only where its worker is lost."""
    if not len(own):
        others = [queue for queue in queues if len(queue) and (at_once is not None or not queue.open)]
        if not others:
            return []
        longest = max(others, key=lambda queue: queue.work)
        for name in longest.names[-_part(own, len(longest), at_once) :]:
            own.add(name, longest.give_away(name))
    return own.take(own.names[: _part(own, len(own), at_once)])


def _part(own: Queue, count: int, at_once: int | None) -> int:
    if at_once is None:
        return count
    return min(count, ceil(ceil(count / 2) / at_once) * at_once if own.known else at_once)
