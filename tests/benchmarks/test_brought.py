"""The models of `benchmarks/models.py` are of the size that is stated, and can be trained privately."""

from __future__ import annotations

import pytest
import torch

import fedspa
from brought.rows import ROWS, Row
from fedspa.learning.flat import FlatModel


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_as_many_parameters_are_trained_as_is_stated(row: Row) -> None:
    assert FlatModel(row.build()).dimension == row.dimension


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_nothing_keeps_it_from_being_trained_privately(row: Row) -> None:
    assert fedspa.check(row.build(), row.examples(2, seed=0).x) == []


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_it_gives_a_score_per_class_and_learns_from_the_input(row: Row) -> None:
    x, _ = row.examples(3, seed=0)
    scores = row.build()(x)
    assert scores.shape == (3, row.classes)
    assert scores.std(0).min() > 0


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_it_is_the_same_every_time(row: Row) -> None:
    first, second = (FlatModel(row.build()).flatten() for _ in "ab")
    torch.testing.assert_close(first, second, rtol=0, atol=0)


@pytest.mark.parametrize("row", [row for row in ROWS.values() if row.frozen], ids=lambda row: row.title)
def test_a_frozen_body_is_frozen(row: Row) -> None:
    trained = [name for name, p in row.build().named_parameters() if p.requires_grad]
    assert all(name.startswith("head.") or ".up." in name or ".down." in name for name in trained)
