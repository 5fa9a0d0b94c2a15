"""Where records stand in an engine that takes them together: at places that no other record has a part in."""

from __future__ import annotations

from collections import Counter
from itertools import permutations

import numpy as np
import pytest
import torch
from plain import plain

from fedspa.engine.local import EMPTY, SlotAssignment
from fedspa.engine.task import LocalTask
from fedspa.errors import DataError
from fedspa.privacy.event import Sampling
from fedspa.randomness.streams import derive_key


def placed(task: LocalTask) -> SlotAssignment:
    return SlotAssignment(task.records, task.max_records, task.sampling, task.key)


def task(records: int, room: int | None, number: int = 0, sampling: Sampling = "poisson") -> LocalTask:
    key = derive_key(bytes(32), f"agent {number}")
    x, y = torch.zeros(records, 1), torch.zeros(records, dtype=torch.int64)
    return LocalTask(x, y, None, 1.0, 0.1, plain(sampling, 2, 1), key, max_records=room)


def dealt(places: SlotAssignment) -> list[int]:
    """The record of each place, EMPTY where there is none."""
    records, there = places.records(np.arange(places.count))
    return [int(r) if there is None or there[i] else EMPTY for i, r in enumerate(records)]


@pytest.mark.parametrize("records", [1, 5, 20])
def test_without_a_room_each_record_has_its_own_number(records: int) -> None:
    assert dealt(placed(task(records, None))) == list(range(records))


@pytest.mark.parametrize("sampling", ["poisson", "fixed"])
@pytest.mark.parametrize(("records", "room"), [(1, 1), (1, 9), (7, 8), (8, 8), (20, 100)])
def test_every_record_has_one_place_and_the_others_are_empty(sampling: Sampling, records: int, room: int) -> None:
    places = placed(task(records, room, sampling=sampling))
    assert places.count == (room if sampling == "poisson" else records)  # fixed-size neighbours have as many records
    found = dealt(places)
    assert sorted(r for r in found if r != EMPTY) == list(range(records))
    assert found.count(EMPTY) == places.count - records


def test_an_empty_place_asks_for_a_record_that_is_there() -> None:
    records, there = placed(task(3, 50)).records(np.arange(50))
    assert there is not None
    assert there.sum() == 3
    assert set(records.tolist()) <= {0, 1, 2}


def test_too_many_records_are_refused() -> None:
    with pytest.raises(DataError, match="9 records do not fit into room for 8"):
        placed(task(9, 8))


@pytest.mark.parametrize("records", [3, 4])
def test_all_ways_to_deal_are_equally_likely(records: int) -> None:
    """With as many records as places, too: neighbours of such a file have an empty one and are dealt."""
    rounds, ways = 4800, [p[:4] for p in set(permutations([*range(records), *[EMPTY] * (4 - records)]))]
    found = Counter(tuple(dealt(placed(task(records, 4, number)))) for number in range(rounds))
    assert set(found) == set(ways)
    expected = rounds / len(ways)
    chi_squared = sum((found[way] - expected) ** 2 / expected for way in ways)
    assert chi_squared < len(ways) + 5 * (2 * len(ways)) ** 0.5


def test_the_others_have_the_same_places_in_law_whichever_record_is_taken_out() -> None:
    """Record a of a full file and of one without its first record, where it stands one line further up."""
    rounds = 4000
    full = Counter(tuple(dealt(placed(task(4, 4, n))).index(r) for r in (1, 2, 3)) for n in range(rounds))
    less = Counter(tuple(dealt(placed(task(3, 4, n))).index(r) for r in (0, 1, 2)) for n in range(rounds))
    ways = list(permutations(range(4), 3))
    assert set(full) == set(less) == set(ways)
    chi_squared = sum((full[way] - less[way]) ** 2 / (full[way] + less[way]) for way in ways)
    assert chi_squared < len(ways) + 5 * (2 * len(ways)) ** 0.5
