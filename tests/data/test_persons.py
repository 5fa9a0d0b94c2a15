"""Records by person: who counts with what, how persons are assigned, and ids that cannot be used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedspa.data.adapters import from_arrays
from fedspa.data.dataset import Dataset, grouped, owners_of, view
from fedspa.data.datasets import load
from fedspa.errors import DataError

PERSONS = np.array([4, 1, 4, 9, 4, 1])
X = torch.arange(6.0)[:, None] * 10
Y = torch.arange(6)


def draws(*numbers: int) -> Any:
    return np.array(numbers, dtype=np.uint64)


def test_a_person_is_an_example_with_those_of_their_records_that_were_drawn() -> None:
    people = grouped(X, Y, PERSONS, 2, draws(5, 0, 1, 0, 3, 0))
    assert isinstance(people.x, dict)
    assert people.x["count"].tolist() == [2, 2, 1]  # type: ignore[union-attr]
    assert people.y.tolist() == [[1, 5], [2, 4], [3, 3]]  # type: ignore[union-attr]
    assert people.x["records"].squeeze(2).tolist() == [[10, 50], [20, 40], [30, 30]]  # type: ignore[union-attr]


def test_which_records_count_is_uniform() -> None:
    """Two of four: each of the six pairs about as often as any other."""
    rng, seen = np.random.default_rng(0), dict[tuple[int, ...], int]()
    for _ in range(1200):
        people = grouped(X[:4], Y[:4], np.zeros(4, np.int64), 2, rng.integers(0, 2**63, 4).astype(np.uint64))
        pair = tuple(people.y[0].tolist())  # type: ignore[index, union-attr]
        seen[pair] = seen.get(pair, 0) + 1
    assert len(seen) == 6
    assert all(140 < times < 265 for times in seen.values())  # 200 ± 5 standard deviations


def test_a_person_is_at_one_agent() -> None:
    assert owners_of(PERSONS, np.array([1, 0, 1, 2, 1, 0])).tolist() == [0, 1, 2]
    with pytest.raises(DataError, match=r"person 4 has records at agents 0 and 1: .*number persons anew at each agent"):
        owners_of(PERSONS, np.array([1, 0, 0, 2, 1, 0]))


@pytest.mark.parametrize(
    "ids", [[1.0, 2.0, float("nan")], [["a"], ["b"], ["a"]], ["a", 1, "b"], [True, False, True], object()]
)
def test_an_id_that_is_missing_or_none_is_refused(ids: Any) -> None:
    """Records without one would be one person, and their people would be in two places."""
    with pytest.raises(DataError, match=r"data 'd': persons( are|: 1 of 3 ids are missing)"):
        from_arrays(np.zeros((3, 2)), [0, 1, 0], np.zeros((2, 2)), [0, 1], name="d", persons=ids)


def test_an_array_of_an_npz_says_whose_records_they_are(tmp_path: Path) -> None:
    arrays = {"x_train": np.zeros((3, 2)), "y_train": [0, 1, 0], "x_test": np.zeros((2, 2)), "y_test": [0, 1]}
    np.savez(tmp_path / "visits.npz", **arrays, patient=["p1", "p2", "p1"])
    found = load("visits.npz", tmp_path, "patient")
    assert found.persons.tolist() == [0, 1, 0]
    assert load("visits.npz", tmp_path).persons is None
    with pytest.raises(DataError, match=r"visits\.npz lacks doctor"):
        load("visits.npz", tmp_path, "doctor")


def visits(persons: Any) -> Dataset:
    rows = len(persons)
    return from_arrays(
        np.arange(rows)[:, None], np.arange(rows) % 2, [[0], [1]], [0, 1], name="visits", persons=persons
    )


@pytest.mark.parametrize("share", [0.01, 0.5])
def test_whole_persons_are_held_out(share: float) -> None:
    data = visits(np.random.default_rng(0).integers(0, 40, 300))
    parted = view(data, None, share)
    kept = parted.persons
    out = data.persons[parted.test_x.squeeze(1).long().numpy()]  # type: ignore[union-attr]
    assert not set(kept.tolist()) & set(out.tolist())
    assert len(kept) + len(out) == 300
    assert share * 300 <= len(out) < share * 300 + np.bincount(data.persons).max()


def test_somebody_must_be_left_to_train_on() -> None:
    with pytest.raises(DataError, match="whose 1 persons would all be held out"):
        view(visits([3] * 10), None, 0.2)
