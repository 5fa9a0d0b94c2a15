"""Dicts that hold their targets, as a tokenizer's output does."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import numpy as np
import pytest
import torch

import fedspa

IDS = np.arange(12).reshape(4, 3)


def examples(**fields: Any) -> dict[str, Any]:
    return {"input_ids": IDS, "attention_mask": np.ones((4, 3), bool), **fields}


@pytest.mark.parametrize("key", ["labels", "label", "target", "targets", "y"])
def test_the_target_is_found_under_its_usual_names(key: str) -> None:
    given = examples(**{key: [0, 1, 2, 1]})
    data = fedspa.from_examples(given, given, name="d")
    assert data.key == key
    assert data.classes == 3
    assert isinstance(data.train_x, dict)
    assert list(data.train_x) == ["input_ids", "attention_mask"]
    assert torch.equal(data.train_x["input_ids"], torch.from_numpy(IDS))
    assert data.train_x["attention_mask"].dtype == torch.bool
    assert data.test_y.tolist() == [0, 1, 2, 1]


def test_a_named_target_leaves_the_others_to_the_module() -> None:
    given = examples(labels=[0, 1, 2, 1], weight_kg=np.ones(4))
    data = fedspa.from_examples(given, given, name="d", target="weight_kg")
    assert data.key == "weight_kg"
    assert isinstance(data.train_x, dict)
    assert "labels" in data.train_x


def test_examples_without_targets_have_a_row_with_nothing_in_it() -> None:
    data = fedspa.from_examples(examples(), examples(), name="d", target="")
    assert data.key == ""
    assert data.classes is None
    assert isinstance(data.train_y, torch.Tensor)
    assert data.train_y.shape == (4, 0)


def test_any_mapping_will_do_and_targets_may_be_rows() -> None:
    """A tokenizer gives a UserDict."""
    given: Any = UserDict(examples(labels=IDS))
    data = fedspa.from_examples(given, given, name="d")
    assert data.classes is None
    assert torch.equal(data.train_y, torch.from_numpy(IDS))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("train", "test", "options", "says"),
    [
        (examples(), examples(), {}, "train has the keys input_ids, attention_mask: just one of labels, label, target"),
        (examples(labels=[0] * 4, y=[1] * 4), None, {}, "just one of labels"),
        (examples(labels=[0] * 4), None, {"target": "age"}, "'age' must be among them"),
        (examples(labels=[0] * 4), examples(label=[0] * 4), {}, "test has the keys .* 'labels' must be among them"),
        ({"labels": [0, 1]}, None, {}, "nothing but its targets 'labels'"),
        ({}, None, {"target": ""}, "nothing but its targets"),
        ([1, 2], None, {}, "train is a list: a dict of arrays is needed"),
        (examples(labels=[0, 1]), None, {}, "4 records and 2 labels"),
        ({"words": ["a", "b"], "labels": [0, 1]}, None, {}, "'words' are text, as in 'a': numbers are needed"),
        (examples(labels=[0, 1, 1, 0]), None, {"name": 3}, "the name of the data is 3"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(train: Any, test: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(fedspa.FedspaError, match=says) as refusal:
        fedspa.from_examples(train, train if test is None else test, **{"name": "d", **options})
    assert "\n" not in str(refusal.value)
