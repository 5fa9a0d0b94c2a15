"""Who trains whom in a round. It decides how long a round takes and what travels, and no bit of the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

MOST = 256  # agents in a share
SLACK = 1.1  # a queue that takes this much longer than an even one gives agents away before the round begins


class Queue:
    """Agents that wait for one worker, each with its expected work, and how much of that the worker does a second."""

    def __init__(self) -> None:
        self.open = False  # whether the worker is there
        self.work = 0.0  # of all that wait
        self._waiting: dict[str, float] = {}
        self._taken: dict[str, float] = {}
        self._speed: float | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def names(self) -> list[str]:
        return list(self._waiting)

    @property
    def known(self) -> bool:
        """Whether the worker's speed was ever measured."""
        return self._speed is not None

    def speed(self, usual: float) -> float:
        return self._speed or usual

    def add(self, name: str, work: float) -> None:
        self._waiting[name] = work
        self.work += work

    def give_away(self, name: str) -> float:
        work = self._waiting.pop(name)
        self.work = self.work - work if self._waiting else 0.0
        return work

    def first(self, names: Sequence[str], at_once: int, most: float) -> list[str]:
        """Of those that wait, whole rows from the front that are `most` work together, at least one."""
        work = 0.0
        for count, name in enumerate(names):
            if count and count % at_once == 0 and work >= most:
                return list(names[:count])
            work += self._waiting[name]
        return list(names)

    def begin(self) -> None:
        self.work, self._waiting, self._taken = 0.0, {}, {}

    def take(self, names: Sequence[str]) -> list[str]:
        """They are no longer waiting."""
        self._taken |= {name: self.give_away(name) for name in names}
        return list(names)

    def back(self, names: Sequence[str]) -> None:
        """They wait again."""
        for name in names:
            self.add(name, self._taken.pop(name))

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
    usual = _usual(queues)

    def end(queue: Queue, more: float = 0.0) -> float:
        return (queue.work + more) / queue.speed(usual)

    for name in sorted(work, key=lambda name: (name not in homes, -work[name])):
        queue = homes[name] if name in homes else min(open_, key=lambda queue: end(queue, work[name]))
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
    """Names that the worker of `own` trains next, in whole rows of `at_once`: what it would do in half of the time that
    is left, of what waits for it, or for another where that is nothing; one row while nobody knows how fast it is.

    With None all that waits for it, and of another's only where its worker is lost. Never more than `MOST`.
    """
    others = [queue for queue in queues if len(queue) and (at_once is not None or not queue.open)]
    if not len(own) and not others:
        return []
    source = own if len(own) else max(others, key=lambda queue: queue.work)
    names = source.names if source is own else source.names[::-1]
    if at_once is not None:
        usual = _usual(queues)
        left = sum(queue.work for queue in queues) / sum(queue.speed(usual) for queue in queues if queue.open)
        names = source.first(names, at_once, left / 2 * own.speed(usual) if own.known else 0.0)
    names = names[:MOST]
    if source is not own:
        for name in names:
            own.add(name, source.give_away(name))
    return own.take(names)


def _usual(queues: Sequence[Queue]) -> float:
    """What a worker whose speed nobody knows is taken for."""
    known = [queue.speed(0.0) for queue in queues if queue.open and queue.known]
    return sum(known) / len(known) if known else 1.0
