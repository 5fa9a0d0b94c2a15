"""A task whose examples are persons: `data.persons` makes them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedspa.examples import Examples, Tree, mapped
from fedspa.learning.tasks.base import Task
from fedspa.learning.tasks.measures import Measure


class PerPerson(Task):
    """A person's loss is the mean over the records that count, by the task of the records.

    What fills up a person's places is left out before the module sees anything: of a record that is not there, no
    weight of zero would hide a NaN.
    """

    name = "per person"

    def __init__(self, task: Task) -> None:
        self.task = task
        self.headline, self.width = task.headline, task.width

    def targets(self, y: Tree, what: str) -> Tree:
        """Of records."""
        return self.task.targets(y, what)

    def loss(self, module: nn.Module, x: Tree, y: Tree) -> Tensor:
        assert isinstance(x, dict)
        counts = x["count"]
        assert isinstance(counts, Tensor)
        losses = []
        for person, count in enumerate(counts.tolist()):
            records, targets = (_of(tree, person, slice(count)) for tree in (x["records"], y))
            losses.append(self.task.loss(module, records, targets))
        return torch.stack(losses).mean()

    def require_fit(self, module: nn.Module, x: Tree, y: Tree) -> None:
        self.loss(module, x, y)

    def measure(self) -> Measure:
        """Of held-out records."""
        return self.task.measure()


def of_records(like: Examples, task: Task | None) -> tuple[Examples, Task | None]:
    """What a module is tried with: where examples are persons, their first records, and the task of records."""
    if not isinstance(task, PerPerson):
        return like, task
    assert isinstance(like.x, dict)
    x, y = (mapped(lambda leaf: leaf[:, 0], tree) for tree in (like.x["records"], like.y))
    return Examples(x, y), task.task


def _of(tree: Tree, person: int, own: slice) -> Tree:
    return mapped(lambda leaf: leaf[person, own], tree)
