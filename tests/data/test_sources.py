"""What people bring: arrays, torch and Hugging Face datasets, partitioners, as trees; or one line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from fedspa.data.sources import examples
from fedspa.errors import DataError
from fedspa.examples import TARGETS, count

X = np.arange(12.0).reshape(4, 3)
Y = np.array([0, 1, 1, 0])
TOKENS = {"input_ids": torch.arange(8).reshape(4, 2), "attention_mask": torch.ones(4, 2, dtype=torch.bool)}


class Items(Dataset[Any]):
    """A map-style Dataset of what a function gives."""

    def __init__(self, give: Callable[[int], Any], count: int = 4) -> None:
        self._give, self._count = give, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, i: int) -> Any:
        return self._give(i)


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield 1, 2


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(DataError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(equal(a, b) for a, b in zip(one, other))
    return one.dtype == other.dtype and torch.equal(one, other)


SAME = (torch.arange(12.0).reshape(4, 3), torch.tensor([0, 1, 1, 0]))


@pytest.mark.parametrize(
    "source",
    [
        (X, Y),
        (X.tolist(), Y.tolist()),
        (torch.tensor(X, dtype=torch.bfloat16), torch.tensor(Y, dtype=torch.int16)),
        ([torch.tensor(row) for row in X], torch.tensor(Y, dtype=torch.uint8)),
        TensorDataset(torch.tensor(X), torch.tensor(Y)),
        Items(lambda i: [X[i].tolist(), int(Y[i])]),
    ],
    ids=["numpy", "lists", "small types", "list of tensors", "TensorDataset", "lists of"],
)
def test_pairs(source: Any) -> None:
    assert equal(examples(source, "it")[:2], SAME)


@pytest.mark.parametrize("key", TARGETS)
def test_a_dict_has_its_target_by_name(key: str) -> None:
    rows = Items(lambda i: {**{name: part[i] for name, part in TOKENS.items()}, key: int(Y[i])})
    for source in ({**TOKENS, key: Y}, rows):
        x, y, found = examples(source, "it")
        assert found == key
        assert equal((x, y), (TOKENS, torch.tensor(Y)))


@pytest.mark.parametrize(
    ("source", "x"),
    [(TOKENS, TOKENS), (X, SAME[0]), ((X, Y), SAME), (Items(lambda i: (X[i], Y[i])), SAME)],
    ids=["dict", "array", "tuple", "items of tuples"],
)
def test_without_a_target_all_are_inputs(source: Any, x: Any) -> None:
    found, y, key = examples(source, "it", "")
    assert key == ""
    assert equal(found, x)
    assert isinstance(y, Tensor)
    assert y.shape == (4, 0)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ((X, Y[:3]), "it: x has 4 records and y has 3"),
        (({"a": X, "b": X[:3]}, Y), "it: x 'b' has 3 examples, and 4 are in 'a'"),
        ((X, 5), "it: y is a single number"),
        ((X, ["a", "b", "c", "d"]), "it: y holds <U1, as 'a'"),
        ((X * 1j, Y), "it: x holds complex128"),
        ((np.array([None, 1]), Y), "it: x holds object, as None"),
        ((np.array([2**64 - 1], dtype=np.uint64), Y[:1]), "too large for int64"),
        (([[1, 2], [3]], Y[:2]), "it: x cannot be read as numbers of one shape (ValueError: "),
        (([torch.ones(2), torch.ones(3)], Y[:2]), "it: x cannot be read as numbers of one shape (RuntimeError: "),
        (({"a": [[1], [2, 3]], "labels": Y[:2]}), "it cannot be read as numbers of one shape (ValueError: "),
        (
            (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), Y[:2]),
            "it: x is a nested tensor",
        ),
        (((), Y), "it: x is an empty tuple"),
        (({}, Y), "it: x is an empty dict"),
        (({1: X}, Y), "it: x has the key 1; keys must be texts"),
        ({"x": X}, "it has the keys ['x']; just one of 'labels', 'label', 'target', 'targets', 'y' must be among them"),
        ({"labels": Y}, "it has nothing but 'labels'"),
        (Items(lambda i: (X[i],)), "it: record 0 is a tuple; a pair (x, y) or a dict is needed"),
        (Items(lambda i: (1.5 if i else 1, 0)), "it: record 1[0] holds torch.float32 and that of record 0 torch.int64"),
        (Items(lambda i: ("text", 0)), "it: record 0[0] holds <U4, as"),
        (Items(lambda i: (1, 2), count=0), "it has no records"),
        (Endless(), "it cannot be read as numbers of one shape (TypeError: "),
        (X, "it is a ndarray; a pair (x, y), a dict of arrays"),
        ("text", "it is a str"),
        (None, "it is a NoneType"),
        (5, "it is a int"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_what_is_wrong_is_one_line(source: Any, words: str) -> None:
    assert words in refused(lambda: examples(source, "it"))


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.just(X),
    st.just(Y),
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.tuples(inner, inner),
        st.dictionaries(st.sampled_from(["x", "label", "labels", "target"]), inner, max_size=3),
    ),
    max_leaves=10,
)


@given(TREES)
def test_anything_is_examples_or_one_line(source: Any) -> None:
    for target in (None, ""):
        try:
            x, y, _ = examples(source, "it", target)
        except DataError as error:
            assert "\n" not in str(error)  # noqa: PT017
        else:
            assert count(x) == count(y) > 0


# Hugging Face


def hugging(**columns: Any) -> Any:
    return pytest.importorskip("datasets").Dataset.from_dict(columns)


def test_a_datasets_dataset() -> None:
    data = hugging(input_ids=[[1, 2], [3, 4]], weight=[0.5, 1.0], ok=[True, False], label=[0, 1])
    x = {
        "input_ids": torch.tensor([[1, 2], [3, 4]]),
        "weight": torch.tensor([0.5, 1]),
        "ok": torch.tensor([True, False]),
    }
    for given_data in (data, data.with_format("torch"), data.select([0, 1])):
        assert equal(examples(given_data, "it")[:2], (x, torch.tensor([0, 1])))
