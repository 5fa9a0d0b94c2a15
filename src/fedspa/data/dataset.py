"""What a run trains on and is judged by: examples for the agents and held-out ones, checked when they are made."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from fedspa.data.columns import Schema
from fedspa.errors import DataError, quoted
from fedspa.examples import Examples, Tree, blanks, count, layout, leaves, named_leaves, require_aligned


@dataclass(frozen=True)
class Dataset:
    """Examples for the agents (train) and held out for evaluation (test): inputs x and targets y.

    Each is a tensor, or a dict or tuple of tensors, whose first dimension counts the examples: float32, int64 or bool,
    and finite. `classes` is how many there are where a target is a class, numbered from 0. `key` is where the targets
    lay in a dict that held all, "" where there were none; None where inputs and targets came apart. `owners` says which
    agent holds each training example, `persons` whom it belongs to, by numbers from 0; without, they are dealt out, and
    each is a person's own. Where a table's targets were scaled, `y * target_scale + target_offset` is in their own
    units; `schema` is the table's. There may be no held-out examples yet: a run then holds out some of the others.
    """

    train_x: Tree
    train_y: Tree
    test_x: Tree
    test_y: Tree
    classes: int | None
    name: str
    key: str | None = None
    owners: NDArray[np.int64] | None = None
    persons: NDArray[np.int64] | None = None
    target_scale: tuple[float, ...] | None = None
    target_offset: tuple[float, ...] | None = None
    schema: Schema | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise DataError(f"the name of a Dataset is {quoted(self.name)}: a text is needed")
        for split, x, y in (("train", self.train_x, self.train_y), ("test", self.test_x, self.test_y)):
            _check(f"data {self.name!r}: {split}", x, y)
        if not count(self.train_y):
            raise DataError(f"data {self.name!r}: train is empty")
        for what, train, test in (("records", self.train_x, self.test_x), ("targets", self.train_y, self.test_y)):
            if layout(train) != layout(test):
                raise DataError(
                    f"data {self.name!r}: {what} have shape {layout(train)} in train and {layout(test)} in test"
                )
        if self.classes is not None:
            if not isinstance(self.classes, int):
                raise DataError(f"data {self.name!r}: classes is {quoted(self.classes)}: their number is needed")
            if self.classes < 2:
                raise DataError(f"data {self.name!r} has {self.classes} class(es): a classifier needs at least 2")
            for split, y in (("train", self.train_y), ("test", self.test_y)):
                _check_labels(f"data {self.name!r}: {split}", y, self.classes)
        for what, numbers in (("owners", self.owners), ("persons", self.persons)):
            if numbers is not None and not _from_zero(numbers, count(self.train_y)):
                raise DataError(
                    f"data {self.name!r}: {what} must be one number from 0 on per training example, of which there "
                    f"are {count(self.train_y)}"
                )

    @property
    def input_shape(self) -> tuple[int, ...] | None:
        """The shape of one record, where it is one tensor."""
        return tuple(self.train_x.shape[1:]) if isinstance(self.train_x, torch.Tensor) else None

    @property
    def like(self) -> Examples:
        """One example of zeros, made as all of them are."""
        return Examples(blanks(self.train_x), blanks(self.train_y))


def _check(what: str, x: Tree, y: Tree) -> None:
    for part, tree in (("features", x), ("labels", y)):
        if (kind := _no_tensor(tree)) is not None:
            raise DataError(f"{what} is made of {kind}: fedspa.from_arrays makes a Dataset of arrays")
        require_aligned(tree, f"{what} {part}")
        for name, leaf in named_leaves(tree):
            if leaf.dtype not in (torch.float32, torch.int64, torch.bool):
                raise DataError(
                    f"{what} {part} has {name or 'values'} of {leaf.dtype}: float32, int64 or bool is needed"
                )
        require_finite(tree, f"{what} {part}")
    if count(x) != count(y):
        raise DataError(f"{what} has {count(x)} records and {count(y)} labels: one label per record is needed")
    if count(x) and not any(leaf.numel() for leaf in leaves(x)):
        raise DataError(f"{what} is empty: its features have shape {tuple(next(leaves(x)).shape)}")


def _no_tensor(tree: object) -> str | None:
    """The type of a leaf that is no tensor, if there is one."""
    if isinstance(tree, torch.Tensor):
        return None
    if not isinstance(tree, dict | tuple):
        return type(tree).__name__
    parts = tree.values() if isinstance(tree, dict) else tree
    return next((kind for part in parts if (kind := _no_tensor(part)) is not None), None)


def require_finite(tree: Tree, what: str) -> None:
    for leaf in leaves(tree):
        # aminmax carries NaN through and needs no memory of the data's size.
        if leaf.is_floating_point() and leaf.numel() and not all(map(torch.isfinite, torch.aminmax(leaf))):
            raise DataError(f"{what} hold NaN or ∞ (as float32): clean the data first")


def _from_zero(numbers: object, examples: int) -> bool:
    """Whether these are as many whole numbers, none of them negative or masked."""
    return (
        isinstance(numbers, np.ndarray)
        and not np.ma.is_masked(numbers)
        and numbers.dtype == np.int64
        and numbers.shape == (examples,)
        and int(numbers.min()) >= 0
    )


def _check_labels(what: str, y: Tree, classes: int) -> None:
    if not isinstance(y, torch.Tensor) or y.dtype != torch.int64 or y.ndim != 1:
        raise DataError(f"{what} has labels {layout(y)}: with `classes`, one whole number per record is needed")
    low, high = (int(y.min()), int(y.max())) if len(y) else (0, 0)
    if low < 0 or high >= classes:
        raise DataError(f"{what} has label {low if low < 0 else high}, outside 0..{classes - 1}")
