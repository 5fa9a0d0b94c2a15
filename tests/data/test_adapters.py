"""Data given in Python: whatever it came as, a checked Dataset with its agents, persons and key; or one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from torch.utils.data import DataLoader, TensorDataset

import fedspa
from fedspa.data.columns import checked
from fedspa.errors import DataError, RunWarning

X, Y = np.arange(12.0).reshape(4, 3), np.array([0, 1, 1, 0])
IDS = np.arange(12).reshape(4, 3)


def examples(**fields: Any) -> dict[str, Any]:
    return {"input_ids": IDS, "attention_mask": np.ones((4, 3), bool), **fields}


def test_examples_without_targets_have_a_row_with_nothing_in_it() -> None:
    data = fedspa.from_examples(examples(), examples(), name="d", target="")
    assert data.key == ""
    assert data.classes is None
    assert isinstance(data.train_y, torch.Tensor)
    assert data.train_y.shape == (4, 0)


def test_whose_records_they_are() -> None:
    data = fedspa.from_arrays(X, Y, X, Y, name="d", owners=["b", "a", "b", "a"], persons=[17, 4, 17, 3])
    assert data.owners.tolist() == [1, 0, 1, 0]
    assert data.persons.tolist() == [2, 1, 2, 0]


def test_agents_are_joined_and_owned() -> None:
    pairs = TensorDataset(torch.tensor(X[:2]), torch.tensor(Y[:2]))
    data = fedspa.from_agents([(X, Y), pairs], test=(X[:1], Y[:1]), name="d", persons=[[1, 1, 2, 2], [3, 4]])
    assert torch.equal(data.train_x, torch.tensor(np.concatenate([X, X[:2]]), dtype=torch.float32))  # type: ignore[arg-type]
    assert data.train_y.tolist() == [0, 1, 1, 0, 0, 1]
    assert data.test_y.tolist() == [0]
    assert data.owners.tolist() == [0, 0, 0, 0, 1, 1]
    assert data.persons.tolist() == [0, 0, 1, 1, 2, 3]


def test_keys_may_come_in_any_order() -> None:
    turned = dict(reversed(examples(labels=Y).items()))
    data = fedspa.from_agents([examples(labels=Y), turned], test=turned, name="d")
    assert data.key == "labels"
    for x in (data.train_x, data.test_x):
        assert isinstance(x, dict)
        assert list(x) == ["input_ids", "attention_mask"]
    assert torch.equal(data.train_x["input_ids"], torch.from_numpy(np.concatenate([IDS, IDS])))  # type: ignore[index]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ((X[:, :2], Y), "agent 1: x has shape (2,) and that of agent 0 has (3,); pad or cut"),
        ((X.astype(int), Y), "agent 1: x holds torch.int64 and that of agent 0 torch.float32"),
        (({"a": X}, Y), "agent 1: x is a dict of ['a'] and that of agent 0 is a tensor"),
        ((X[:0], Y[:0]), "agent 1 has no records"),
    ],
)
def test_agents_must_agree(other: Any, words: str) -> None:
    for agents, test, said in (([(X, Y), other], (X, Y), words), ([(X, Y)], other, words.replace("agent 1", "test"))):
        with pytest.raises(DataError) as caught:
            fedspa.from_agents(agents, test=test, name="d")
        assert said in str(caught.value)
        assert "\n" not in str(caught.value)


# Tables

SCHEMA: dict[str, Any] = {
    "columns": {
        "age": {"kind": "number", "range": [0, 100]},
        "score": {"kind": "number", "range": [100, 300], "target": True},
    },
    "agent": "clinic",
    "person": "patient",
    "split": "part",
}
ROWS = {
    "clinic": ["n", "n", "s", "s"],
    "patient": [1, 1, 2, 3],
    "part": ["train", "test", "train", "train"],
    "age": [50, 25, 100, 0],
    "score": [100, 150, 200, 900],
}


def written(folder: Path) -> Path:
    lines = [",".join(ROWS), *(",".join(map(str, row)) for row in zip(*ROWS.values()))]
    (folder / "visits.csv").write_text("\n".join(lines) + "\n", "utf-8")
    return folder / "visits.csv"


def tables(folder: Path) -> list[fedspa.Dataset]:
    (folder / "schema.toml").write_text(
        tomli_w.dumps(
            {"data": {"person": SCHEMA["person"], "table": {k: v for k, v in SCHEMA.items() if k != "person"}}}
        ),
        "utf-8",
    )
    frame = pytest.importorskip("pandas").DataFrame(ROWS)
    schemas: list[Any] = [SCHEMA, checked(SCHEMA), folder / "schema.toml", str(folder / "schema.toml")]
    return [
        *(fedspa.from_table(written(folder), schema) for schema in schemas),
        fedspa.from_table(frame, SCHEMA, name="visits.csv"),
    ]


def test_a_table_is_a_dataset_whatever_it_and_its_schema_came_as(tmp_path: Path) -> None:
    for data in tables(tmp_path):
        assert data.name == "visits.csv"
        assert data.classes is None
        assert data.train_x.tolist() == [[0], [1], [-1]]
        assert data.test_x.tolist() == [[-0.5]]
        assert data.train_y.tolist() == [-1, 0, 1]  # clipped
        assert data.owners.tolist() == [0, 1, 1]
        assert data.persons.tolist() == [0, 1, 2]
        assert (data.target_scale, data.target_offset) == ((100.0,), (200.0,))


def test_what_is_printed_of_a_dataset_holds_no_value_of_a_record() -> None:
    data = fedspa.from_arrays([[0.123456], [7.654321]], [0, 1], [[0.5]], [1], name="mine")
    assert repr(data) == (
        "<Dataset 'mine': 2 records for training, 1 for testing; x (1,) float32; y () int64; 2 classes>"
    )


def test_a_data_loader_is_told_from_its_dataset() -> None:
    pairs = TensorDataset(torch.rand(4, 2), torch.arange(4) % 2)
    with pytest.raises(DataError, match=r"is a DataLoader; .*give its \.dataset"):
        fedspa.from_examples(DataLoader(pairs), pairs, name="d")


def test_labels_that_begin_at_1_are_warned_of() -> None:
    x = [[0.0], [1.0]]
    with pytest.warns(RunWarning, match="no record has the label 0, and classes are numbered from 0 to 2"):
        fedspa.from_arrays(x, [1, 2], x, [2, 1], name="d")
