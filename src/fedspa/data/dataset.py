"""What a run trains on and is judged by: examples for the agents and held-out ones, checked when they are made."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedspa.data.columns import Schema
from fedspa.data.features import Features, transform
from fedspa.errors import DataError, quoted
from fedspa.examples import (
    MOST_SLOTS,
    Examples,
    Tree,
    count,
    layout,
    leaves,
    mapped,
    named_leaves,
    require_aligned,
    taken,
    zero_examples,
)

MOST_NAME = 200  # characters of an agent's name


@dataclass(frozen=True)
class Dataset:
    """Examples for the agents (train) and held out for evaluation (test): inputs x and targets y.

    Each is a tensor, or a dict or tuple of tensors, whose first dimension counts the examples: float32, int64 or bool,
    and finite. `classes` is how many there are where a target is a class, numbered from 0. `key` is where the targets
    lay in a dict that held all, "" where there were none; None where inputs and targets came apart. `owners` says which
    agent holds each training example, `persons` whom it belongs to, by numbers from 0; without, they are assigned, and
    each is a person's own. `agents` are the names of the owners, in the order of their numbers. Where a table's targets
    were scaled, `y * target_scale + target_offset` is in their own units; `schema` is the table's. There may be no
    held-out examples yet: a run then holds out some of the others.
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
    agents: tuple[str, ...] | None = None

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
        if self.agents is not None:
            _check_names(f"data {self.name!r}", self.agents, self.owners)

    def __repr__(self) -> str:
        """Describe the data without a value of any record: what is printed ends in logs and notebooks."""
        sizes = f"{count(self.train_y):,} records for training, {count(self.test_y):,} for testing"
        parts = f"x {layout(self.train_x)}; y {layout(self.train_y)}"
        classes = "" if self.classes is None else f"; {self.classes} classes"
        return f"<Dataset {self.name!r}: {sizes}; {parts}{classes}>"

    @property
    def input_shape(self) -> tuple[int, ...] | None:
        """The shape of one record, where it is one tensor."""
        return tuple(self.train_x.shape[1:]) if isinstance(self.train_x, torch.Tensor) else None

    @property
    def example_spec(self) -> Examples:
        """One example of zeros, made as all of them are."""
        return Examples(zero_examples(self.train_x), zero_examples(self.train_y))


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
    """Return the type of a leaf that is no tensor, if there is one."""
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
    """Return whether these are as many whole numbers, none of them negative or masked."""
    return (
        isinstance(numbers, np.ndarray)
        and not np.ma.is_masked(numbers)
        and numbers.dtype == np.int64
        and numbers.shape == (examples,)
        and int(numbers.min()) >= 0
    )


def _check_names(what: str, names: tuple[str, ...], owners: NDArray[np.int64] | None) -> None:
    if owners is None or (len(owners) and int(owners.max()) >= len(names)):
        raise DataError(f"{what} names {len(names)} agents: `owners` must say which of them holds each example")
    if len(set(names)) < len(names):
        twice = next(name for name, times in Counter(names).items() if times > 1)
        raise DataError(f"{what} has two agents named {quoted(twice)}: each needs a name of its own")
    if bad := next((name for name in names if not (name.isprintable() and 0 < len(name) <= MOST_NAME)), None):
        raise DataError(
            f"{what} names an agent {quoted(bad, 40)}: a name has 1 to {MOST_NAME} characters that can be printed"
        )


def _check_labels(what: str, y: Tree, classes: int) -> None:
    if not isinstance(y, torch.Tensor) or y.dtype != torch.int64 or y.ndim != 1:
        raise DataError(f"{what} has labels {layout(y)}: with `classes`, one whole number per record is needed")
    low, high = (int(y.min()), int(y.max())) if len(y) else (0, 0)
    if low < 0 or high >= classes:
        raise DataError(f"{what} has label {low if low < 0 else high}, outside 0..{classes - 1}")


# A person's records as one example, so that the person is what is protected.
#
# At most `most` of a person's records count, a public number. Which ones is random, and costs no privacy: who counts
# with what is drawn for each person apart, so that with one person more or less all others keep theirs, in law where
# the draws are secret. Hence the draws must not come from a public seed: read in order, they would give everyone behind
# that person other records.

Numbers = NDArray[np.int64]


def grouped(x: Tree, y: Tree, persons: Numbers, most: int, draws: NDArray[np.uint64]) -> Examples:
    """Return an example per person, by their numbers: inputs {"records": [persons, c, …], "count": [persons]} and
    targets [persons, c, …], of which the first `count` are the person's and all others repeat the first.

    `persons` says whom each record belongs to. `draws` are private random numbers, one per record: a person's records
    with the smallest ones count, `most` of them, in their own order.
    """
    of = numbered(persons)
    held = np.bincount(of)
    kept = np.minimum(held, most)
    places = np.arange(kept.max())
    counts = places < kept[:, None]
    shuffled = np.lexsort((draws, of))  # person by person
    starts = np.cumsum(held) - held
    # Beyond every record, so that sorting leaves the empty places behind.
    index = np.where(counts, shuffled[starts[:, None] + np.where(counts, places, 0)], len(of))
    index.sort(axis=1)
    chosen = torch.from_numpy(np.where(counts, index, index[:, :1]))
    return Examples({"records": taken(x, chosen), "count": torch.from_numpy(kept)}, taken(y, chosen))


def blank_person(example_spec: Examples, most: int) -> Examples:
    """Return a person made of zeros, whose records are made as the one that is given. It has a slot for each of `most`
    records, or one more than `MOST_SLOTS` where they are more: such persons are never filled up."""
    slots = min(most, MOST_SLOTS + 1)
    x, y = (mapped(lambda leaf: leaf[:, None].expand(1, slots, *leaf.shape[1:]).clone(), tree) for tree in example_spec)
    return Examples({"records": x, "count": torch.full((1,), slots)}, y)


def numbered(persons: Numbers) -> Numbers:
    """Return the same persons by numbers from 0 on, none left out, in the same order."""
    return np.unique(persons, return_inverse=True)[1].astype(np.int64)


def labels_of(persons: Numbers, labels: Numbers) -> Numbers:
    """Return each person's commonest label, the smallest of several, by which persons are assigned."""
    of, (names, place) = numbered(persons), np.unique(labels, return_inverse=True)
    often = np.zeros((int(of.max()) + 1, len(names)), dtype=np.int64)
    np.add.at(often, (of, place), 1)
    return np.asarray(names[often.argmax(axis=1)], dtype=np.int64)


def owners_of(persons: Numbers, owners: Numbers) -> Numbers:
    """Return each person's agent. A person at two agents is a DataError: each of them promises ε for what it holds, and
    what the person pays is both together, which nobody counts."""
    of = numbered(persons)
    agents = np.empty(int(of.max()) + 1, dtype=np.int64)
    agents[of] = owners
    strays = np.flatnonzero(agents[of] != owners)
    if len(strays):
        row = strays[0]
        raise DataError(
            f"person {persons[row]} has records at agents {min(owners[row], agents[of[row]])} and "
            f"{max(owners[row], agents[of[row]])}: each agent bounds its own ε only, and these add up; "
            "give the records of a person to one agent, or number persons anew at each agent to protect them per agent"
        )
    return agents


# Records as a run wants them: some of the training records held out, each record as its features.


def view(data: Dataset, features: Features | None, holdout: float, *, per_example: bool = False) -> Dataset:
    """`holdout` of the training records, the same in every run, stand in for the test records; then the features."""
    if holdout > 0:
        data = _held_out(data, holdout)
    if features is not None:
        train_x, test_x = (
            transform(features, _images(x), per_example=per_example) for x in (data.train_x, data.test_x)
        )
        data = replace(data, train_x=train_x, test_x=test_x)
    return data


def _held_out(data: Dataset, share: float) -> Dataset:
    kept, out = map(torch.from_numpy, held_out(count(data.train_y), data.persons, share))
    return replace(
        data,
        train_x=taken(data.train_x, kept),
        train_y=taken(data.train_y, kept),
        test_x=taken(data.train_x, out),
        test_y=taken(data.train_y, out),
        owners=None if data.owners is None else data.owners[kept.numpy()],
        persons=None if data.persons is None else data.persons[kept.numpy()],
    )


def held_out(
    records: int, persons: NDArray[np.int64] | None, share: float
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return which of so many training records stay with the agents, and which are held out. `persons` are their
    persons."""
    held = round(share * records)
    if not 0 < held < records:
        raise DataError(
            f"data.holdout is {share:g}; of {records} training records it leaves none on one side: choose another share"
        )
    # Not the run's seed: settings are compared over seeds on the same held-out records.
    order = np.random.Generator(np.random.PCG64(0)).permutation(records)
    if persons is not None:  # whole persons: nobody may be in both
        order = _by_person(persons, order)
        held = _whole_persons(persons[order], held)
    return np.sort(order[held:]), np.sort(order[:held])


def _by_person(persons: NDArray[np.int64], order: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the records in that order of their persons, each of whom stands where the first of their records does."""
    first = np.full(int(persons.max()) + 1, len(order))
    np.minimum.at(first, persons[order], np.arange(len(order)))
    return order[np.argsort(first[persons[order]], kind="stable")]


def _whole_persons(persons: NDArray[np.int64], held: int) -> int:
    """Return how many records to hold out of those of `persons`, one person after another: at least `held`."""
    ends = np.flatnonzero(np.append(persons[1:] != persons[:-1], True)) + 1
    enough = int(ends[np.searchsorted(ends, held)])
    if enough == len(persons):
        raise DataError(
            f"data.holdout asks for {held} of {len(persons)} training records, whose {len(ends)} persons would all be "
            "held out: choose a smaller share"
        )
    return enough


def with_floats(data: Dataset) -> Dataset:
    """Convert whole numbers and bools among the inputs to float32, for the models that come with fedspa."""
    if all(leaf.is_floating_point() for leaf in leaves(data.train_x)):
        return data
    train_x, test_x = (mapped(lambda leaf: leaf.to(torch.float32), x) for x in (data.train_x, data.test_x))
    return replace(data, train_x=train_x, test_x=test_x)


def _images(x: Tree) -> Tensor:
    if not isinstance(x, Tensor):
        raise DataError(f"data.features are of images, one tensor each; these examples are {layout(x)}")
    return x.to(torch.float32)
