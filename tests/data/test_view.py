"""Held-out training records: away from the agents, in place of the test records."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedspa.data.adapters import from_arrays
from fedspa.data.dataset import Dataset, view
from fedspa.data.features import transform
from fedspa.errors import DataError


def numbered(records: int) -> Dataset:
    """Every record says which one it is; test records are negative."""
    x = torch.arange(records, dtype=torch.float32).view(-1, 1)
    return from_arrays(x, torch.arange(records) % 2, -x - 1, torch.arange(records) % 2, name="numbered")


@given(st.integers(2, 60), st.floats(0.01, 0.99))
def test_training_records_go_to_one_side_each_and_test_records_to_none(records, share):
    count = round(share * records)
    if not 0 < count < records:
        with pytest.raises(DataError, match="holdout"):
            view(numbered(records), None, share)
        return
    seen = view(numbered(records), None, share)
    kept, out = seen.train_x.flatten().tolist(), seen.test_x.flatten().tolist()
    assert len(out) == count
    assert sorted(kept + out) == list(range(records))
    assert all(int(x) % 2 == y for x, y in zip(kept + out, seen.train_y.tolist() + seen.test_y.tolist()))


def test_the_held_out_records_are_always_the_same_and_not_the_first():
    first, again = (view(numbered(1000), None, 0.1).test_x.flatten().tolist() for _ in range(2))
    assert first == again
    assert 300 < sum(first) / len(first) < 700  # spread over the file; 5 standard deviations wide


def test_features_are_those_of_the_records():
    x = torch.rand(20, 1, 12, 12, generator=torch.Generator().manual_seed(0))
    data = from_arrays(x, torch.arange(20) % 2, x[:4], torch.arange(4) % 2, name="images")
    seen = view(data, "orientations", 0.25)
    assert (len(seen.train_x), len(seen.test_x)) == (15, 5)
    alone = view(data, "orientations", 0.25, per_example=True)
    assert torch.allclose(alone.train_x, seen.train_x, atol=1e-6)
    every = {tuple(row.tolist()) for row in transform("orientations", x, per_example=True)}
    assert {tuple(row.tolist()) for row in torch.cat((alone.train_x, alone.test_x))} == every  # to the last bit
