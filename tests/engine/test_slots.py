"""Where records stand in an engine that takes them together: at places that no other record has a part in."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from plain import plain

from fedspa.engine.local import EMPTY, LocalTask, SlotAssignment
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
    assert there.sum() == 3
    assert set(records.tolist()) <= {0, 1, 2}


def test_too_many_records_are_refused() -> None:
    with pytest.raises(DataError, match="9 records do not fit into 8 slots"):
        placed(task(9, 8))
