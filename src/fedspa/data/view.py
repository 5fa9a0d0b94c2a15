"""Records as a run wants them: some of the training records held out, each record as its features."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedspa.data.dataset import Dataset
from fedspa.data.features import Features, transform
from fedspa.errors import DataError
from fedspa.examples import Tree, count, layout, leaves, mapped, taken


def view(data: Dataset, features: Features | None, holdout: float, *, alone: bool = False) -> Dataset:
    """`holdout` of the training records, the same in every run, stand in for the test records; then the features."""
    if holdout > 0:
        data = _held_out(data, holdout)
    if features is not None:
        train_x, test_x = (transform(features, _images(x), alone=alone) for x in (data.train_x, data.test_x))
        data = replace(data, train_x=train_x, test_x=test_x)
    return data


def _held_out(data: Dataset, share: float) -> Dataset:
    kept, out = map(torch.from_numpy, divided(count(data.train_y), data.persons, share))
    return replace(
        data,
        train_x=taken(data.train_x, kept),
        train_y=taken(data.train_y, kept),
        test_x=taken(data.train_x, out),
        test_y=taken(data.train_y, out),
        owners=None if data.owners is None else data.owners[kept.numpy()],
        persons=None if data.persons is None else data.persons[kept.numpy()],
    )


def divided(
    records: int, persons: NDArray[np.int64] | None, share: float
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Which of so many training records stay with the agents, and which are held out. `persons` says whose each is."""
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
    """The records in that order of their persons, each of whom stands where the first of their records does."""
    first = np.full(int(persons.max()) + 1, len(order))
    np.minimum.at(first, persons[order], np.arange(len(order)))
    return order[np.argsort(first[persons[order]], kind="stable")]


def _whole_persons(persons: NDArray[np.int64], held: int) -> int:
    """How many records to hold out of those of `persons`, one person after another: at least `held`."""
    ends = np.flatnonzero(np.append(persons[1:] != persons[:-1], True)) + 1
    enough = int(ends[np.searchsorted(ends, held)])
    if enough == len(persons):
        raise DataError(
            f"data.holdout asks for {held} of {len(persons)} training records, whose {len(ends)} persons would all be "
            "held out: choose a smaller share"
        )
    return enough


def with_floats(data: Dataset) -> Dataset:
    """For the models that come with fedspa: whole numbers and bools among the inputs as float32."""
    if all(leaf.is_floating_point() for leaf in leaves(data.train_x)):
        return data
    train_x, test_x = (mapped(lambda leaf: leaf.to(torch.float32), x) for x in (data.train_x, data.test_x))
    return replace(data, train_x=train_x, test_x=test_x)


def _images(x: Tree) -> Tensor:
    if not isinstance(x, Tensor):
        raise DataError(f"data.features are of images, one tensor each; these examples are {layout(x)}")
    return x.to(torch.float32)
