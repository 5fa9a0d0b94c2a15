"""Who trains whom: each agent once, nobody waits long for anybody, and agents stay where their records lie."""

from __future__ import annotations

import heapq
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedspa.runs.workers.deal import Queue, deal, next_share

Homes = dict[str, Queue]


def queues(count: int) -> list[Queue]:
    found = [Queue() for _ in range(count)]
    for queue in found:
        queue.open = True
    return found


def play(work: dict[str, float], crew: list[Queue], homes: Homes, speeds: list[float], at_once: int | None) -> float:
    """A round by the clock of its workers; how long it takes. An engine trains `at_once` agents as fast as one."""
    deal(work, homes, crew)
    trained: Counter[str] = Counter()
    free = [(0.0, place) for place in range(len(crew))]
    end = 0.0
    while free:
        now, place = heapq.heappop(free)
        names = next_share(crew[place], crew, at_once)
        if not names:
            continue
        seconds = sum(work[name] for name in names) / speeds[place]
        crew[place].measured(names, seconds)
        trained.update(names)
        homes.update(dict.fromkeys(names, crew[place]))
        end = max(end, now + seconds)
        heapq.heappush(free, (now + seconds, place))
    assert trained == Counter(dict.fromkeys(work, 1))
    return end


def ideal(work: dict[str, float], speeds: list[float]) -> float:
    return sum(work.values()) / sum(speeds)


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=40),
    st.lists(st.sampled_from([0.1, 0.5, 1.0, 2.0]), min_size=1, max_size=5),
    st.sampled_from([1, 2, 4, None]),
)
def test_every_agent_is_trained_once(sizes: list[int], speeds: list[float], at_once: int | None) -> None:
    work = {str(number): float(size) for number, size in enumerate(sizes)}
    crew, homes = queues(len(speeds)), Homes()
    for _ in range(3):
        play(work, crew, homes, speeds, at_once)
    assert homes.keys() == work.keys()


@pytest.mark.parametrize(("at_once", "first"), [(1, 1.6), (None, 8.0)])
def test_a_slow_worker_holds_up_no_round(at_once: int | None, first: float) -> None:
    """One of four does a tenth: by chance in the first round, by what was measured in the next ones. A GPU trains all
    that it is given at once, so that only the rounds after the first can heed it."""
    work = {str(number): 1.0 for number in range(80)}
    speeds = [1.0, 1.0, 1.0, 0.1]
    crew, homes = queues(4), Homes()
    assert play(work, crew, homes, speeds, at_once) <= first * ideal(work, speeds)
    for _ in range(3):
        assert play(work, crew, homes, speeds, at_once) <= 1.35 * ideal(work, speeds)


def test_a_worker_that_slows_down_in_mid_run_is_relieved() -> None:
    work = {str(number): 1.0 for number in range(80)}
    crew, homes = queues(4), Homes()
    for _ in range(3):
        play(work, crew, homes, [1.0] * 4, 1)
    assert play(work, crew, homes, [1.0, 1.0, 1.0, 0.25], 1) <= 2.0 * 20 + 1
    for _ in range(3):
        slowed = play(work, crew, homes, [1.0, 1.0, 1.0, 0.25], 1)
    assert slowed <= 1.2 * ideal(work, [1.0, 1.0, 1.0, 0.25])


def test_agents_stay_where_their_records_lie() -> None:
    work = {str(number): float(1 + number % 7) for number in range(40)}
    crew, homes = queues(3), Homes()
    play(work, crew, homes, [1.0] * 3, 1)
    before = dict(homes)
    for _ in range(5):
        play(work, crew, homes, [1.0] * 3, 1)
    assert sum(homes[name] is not before[name] for name in work) <= 2


def test_uneven_agents_are_dealt_out_evenly() -> None:
    work = {"large": 100.0, **{str(number): 1.0 for number in range(100)}}
    crew = queues(2)
    deal(work, {}, crew)
    assert sorted(queue.work for queue in crew) == [100.0, 100.0]


def test_what_waits_for_a_lost_worker_is_taken_by_others() -> None:
    work = {str(number): 1.0 for number in range(6)}
    crew = queues(2)
    deal(work, {}, crew)
    lost = crew[1]
    names = next_share(lost, crew, None)
    lost.back(names)
    lost.open = False
    assert next_share(crew[0], crew, None)
    assert sorted(next_share(crew[0], crew, None)) == sorted(names)
