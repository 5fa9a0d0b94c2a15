"""The audit of a release: what one record or person adds, held on production and with a known fault in it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedspa.audit.probes import part_question
from fedspa.data import dataset
from fedspa.data.columns import checked
from fedspa.learning.tasks.totals import Block, Layout

COLUMNS = {
    "age": {"kind": "number", "range": [0, 100]},
    "weight": {"kind": "number", "range": [0, 200], "missing": "indicator"},
    "seen": {"kind": "date", "range": ["2020-01-01", "2020-12-31"], "parts": ["days", "month"]},
    "ward": {"kind": "category", "categories": ["a", "b", "c"]},
}
TARGETS: dict[str, dict[str, Any]] = {
    "classes": {"ill": {"kind": "flag", "target": True}},
    "number": {"cost": {"kind": "number", "range": [0, 9], "target": True}},
    "flags": {name: {"kind": "flag", "target": True} for name in ("a", "b")},
}


def part(kind: str = "classes", unit: Any = "record", **options: Any) -> Any:
    layout = Layout.of(checked({"columns": {**COLUMNS, **TARGETS[kind]}}), options)
    return part_question(layout, unit, 3, torch.Generator().manual_seed(0)).answer(0.0)


@pytest.mark.parametrize("unit", ["record", "person"])
@pytest.mark.parametrize("kind", TARGETS)
def test_one_part_stays_within_the_bound(kind: str, unit: str) -> None:
    assert part(kind, unit).holds
    assert part(kind, unit).lower_bound > 0.5  # the extremes come near
    assert part("classes", unit, by_class=True, shares={"age": 4.0}).holds


@pytest.mark.parametrize("unit", ["record", "person"])
def test_a_range_that_is_not_enforced_is_caught(monkeypatch: pytest.MonkeyPatch, unit: str) -> None:
    honest = Block.vectors

    def unclamped(self: Block, x: Tensor, y: Tensor) -> Tensor:
        found = honest(self, x, y)
        if self.kind == "moments" and not self.of_target:
            found[:, 0] = self.weight / 2**0.5 * x[:, self.start]
        return found

    monkeypatch.setattr(Block, "vectors", unclamped)
    assert not part(unit=unit).holds


def test_a_person_who_is_counted_twice_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = dataset.grouped

    def twice(x: Any, y: Any, of: Any, most: int, draws: Any) -> Any:
        return honest(x, y, 2 * of + np.arange(len(of)) % 2, most, draws)

    monkeypatch.setattr(dataset, "grouped", twice)
    assert not part(unit="person").holds
