"""What one record at a site holds never shows in what another adds, to the bit, nor in whether the site answers."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="needs the extra: pip install 'fedspa[flower]'")

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedspa.engine.per_example import PerExampleEngine
from fedspa.errors import DataError
from fedspa.examples import taken
from fedspa.flower import records, site
from fedspa.learning.tasks.named import resolve


def load(monkeypatch: pytest.MonkeyPatch, made: Any, classes: int | None = None, **how: bool) -> records.Records:
    monkeypatch.setattr(records, "_users", lambda *_: made)
    return records.load({"data": "a:b"}, classes, **how)


def test_a_bad_image_leaves_the_others_their_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images are often turned from channels last, and where one is bad all are copied."""
    images, y = np.random.default_rng(0).normal(size=(6, 8, 8, 3)).astype(np.float32), np.arange(6) % 4
    spoilt = images.copy()
    spoilt[5, 0, 0, 0] = np.nan
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.Flatten(), nn.Linear(128, 4))
    theta = nn.utils.parameters_to_vector(module.parameters()).detach()
    rows: list[Tensor] = []
    for some in (images, spoilt):
        own = load(monkeypatch, (some.transpose(0, 3, 1, 2), y), 4)
        x, labels = (taken(tree, torch.tensor([0, 3])) for tree in (own.x, own.y))
        rows.append(torch.cat(list(PerExampleEngine(module).rows(theta, x, labels, None))))
    assert rows[0].isfinite().all()
    assert torch.equal(*rows)


IDS: list[list[Any]] = [["ann", "bob", *[None] * 4], ["ann", "bob", *[float("nan")] * 4], ["ann", "bob", *[""] * 4]]


@pytest.mark.parametrize("ids", IDS)
@pytest.mark.parametrize("dtype", [np.int64, np.bool_, np.float32])
def test_a_record_without_an_id_is_in_no_persons_example(monkeypatch: pytest.MonkeyPatch, ids, dtype) -> None:
    """Its person may be among the others. No filling would keep it out of a release for every model: some take any
    whole number, and no truth value is a bad one."""
    made = np.arange(18).reshape(6, 3).astype(dtype), np.zeros(6), ids
    monkeypatch.setattr(records, "_users", lambda *_: made)
    site._own_records.cache_clear()
    node = (("agent", f"{ids} {dtype}"), ("data", "a:b"), ("model", "a:b"), ("task", "regression"))
    persons = site._grouped(node, None, 8)
    assert isinstance(persons.x, dict)
    assert persons.x["count"].tolist() == [1, 1]
    assert persons.x["records"].tolist() == made[0][:2, None].tolist()


def test_where_no_record_has_an_id_nobody_is_protected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_users", lambda *_: (np.zeros((2, 3)), np.zeros(2), [None, None]))
    with pytest.raises(DataError, match="no record says whose it is"):
        site._grouped((("agent", "nobody"), ("data", "a:b"), ("task", "regression")), None, 8)


def test_a_long_id_costs_the_others_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an array of texts these would be 80 GB."""
    own = load(monkeypatch, (np.zeros((1000, 3)), np.zeros(1000), [*["ann"] * 999, "b" * 20_000_000]))
    assert own.persons is not None
    assert own.persons.tolist() == [0] * 999 + [1]


class Anything(nn.Module):
    """Takes whatever it is given."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.last = nn.Linear(3, width)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(x.float().nan_to_num())
        return found


TARGETS: dict[str, tuple[int | None, int, Any, Any]] = {
    "classification": (3, 3, np.array([0, 1, 2]), 7),
    "binary": (None, 1, np.array([0, 1, 1]), 7),
    "multi-label": (None, 2, np.array([[0, 1], [1, 1], [1, 0]]), 7),
    "regression": (None, 1, np.array([0.5, 1, 2]), np.nan),
}


@pytest.mark.parametrize("task", TARGETS)
@pytest.mark.parametrize("dtype", [np.int64, np.bool_, np.float32])
def test_a_bad_record_counts_as_zero_even_where_the_model_takes_anything(monkeypatch, task, dtype) -> None:
    classes, width, y, strange = TARGETS[task]
    y = y.copy()
    y[1] = strange
    own = load(monkeypatch, (np.arange(9).reshape(3, 3).astype(dtype), y), classes, integers=True)
    learned = resolve(task, own.y, classes, None)
    own = records.settled(own, learned, "data")
    assert own.bad == (1,)
    module = Anything(width)
    theta = nn.utils.parameters_to_vector(module.parameters()).detach()
    (rows,) = PerExampleEngine(module, learned).rows(theta, own.x, own.y, None)
    assert rows.isfinite().all(dim=1).tolist() == [True, False, True]


LISTS: list[tuple[Any, Any]] = [
    ([0, 1, 1], [0, 1, None]),
    ([0, 1, 1], [0, 1, 0.5]),
    ([0, 1, 1], [0, 1, 2**70]),
    ([True, False, True], [True, False, 2]),
    ([[0, 1], [1, 1], [1, 0]], [[0, 1], [1, 1], [None, 0]]),
]


@pytest.mark.parametrize(("targets", "odd"), LISTS)
def test_one_target_in_a_list_does_not_decide_the_type_of_the_others(monkeypatch, targets, odd) -> None:
    kept = [load(monkeypatch, (np.zeros((3, 2)), some), integers=True).y for some in (targets, odd)]
    assert all(isinstance(y, Tensor) and y.dtype == torch.float32 for y in kept)
    assert taken(kept[0], slice(2)).tolist() == taken(kept[1], slice(2)).tolist()


@pytest.mark.parametrize("kind", ["Int64", None])
def test_a_column_of_a_frame_does_not_say_its_type(monkeypatch: pytest.MonkeyPatch, kind: str | None) -> None:
    pandas = pytest.importorskip("pandas")
    for last in (1, None):
        x = {"age": pandas.Series([4, 5, last], dtype=kind)}
        with pytest.raises(DataError, match="is a Series; give an array or tensor, whose type says what it holds"):
            load(monkeypatch, (x, np.zeros(3)), integers=True)


@pytest.mark.parametrize("bad", [(), (7,), (0, 999), tuple(range(500, 520))])
def test_a_bad_target_takes_hardly_longer_to_read(monkeypatch: pytest.MonkeyPatch, bad: tuple[int, ...]) -> None:
    """Reading comes before any payment, and a server may time it as often as it likes: one label that is neither 0 nor
    1 used to have a thousand records read one by one."""
    y = np.zeros((1000, 2), dtype=np.float32)
    y[::3, 1], y[list(bad), 0] = 1, 0.5
    own = load(monkeypatch, (np.ones((1000, 3), dtype=np.float32), y))
    task, calls = resolve("multi-label", own.y, None, None), 0

    def counted(some: Any, what: str) -> Any:
        nonlocal calls
        calls += 1
        return type(task).targets(task, some, what)

    monkeypatch.setattr(task, "targets", counted)
    found = records.settled(own, task, "data")
    assert found.bad == bad
    assert calls <= 1 + 22 * len(bad)
    good = np.setdiff1d(np.arange(1000), bad)
    assert isinstance(found.y, Tensor)
    assert np.array_equal(found.y[good], y[good])
    assert bool(found.y[list(bad)].isnan().all())
