"""Tasks around tasks: one that seeds each example's randomness, and one whose examples are persons."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedspa.examples import Examples, Tree, leaves, mapped
from fedspa.learning.tasks.base import Baseline, Task
from fedspa.learning.tasks.measures import Measure


class Drawing(Task):
    """x is the pair of inputs and seeds. Each example draws from its own seed, whatever was drawn before it. The
    generators are left there: the caller of a loss keeps those that others need."""

    name = "drawing"

    def __init__(self, task: Task) -> None:
        self._task = task
        self.headline, self.width = task.headline, task.width

    def labels(self, x: Tree, y: Tree) -> Tree:
        return self._task.labels(x, y)

    def targets(self, y: Tree, what: str) -> Tree:
        return self._task.targets(y, what)

    def loss(self, module: nn.Module, x: Tree, y: Tree) -> Tensor:
        assert isinstance(x, tuple)
        inputs, seeds = x
        assert isinstance(seeds, Tensor)
        torch.default_generator.manual_seed(int(seeds[0]))
        for device in {leaf.device for leaf in leaves(inputs) if leaf.device.type == "cuda"}:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(int(seeds[0]))
        return self._task.loss(module, inputs, y)

    def require_fit(self, module: nn.Module, x: Tree, y: Tree) -> None:
        self._task.require_fit(module, x, y)

    def measure(self) -> Measure:
        return self._task.measure()

    def baseline(self, y: Tree) -> Baseline | None:
        return self._task.baseline(y)


def require_seeds(draws: bool, x: Tree) -> None:
    """Raise where an engine whose model may draw is given inputs without seeds. Example by example that would cost each
    its gradient without any error."""
    seeds = x[1] if isinstance(x, tuple) and len(x) == 2 else None
    if draws and not (isinstance(seeds, Tensor) and seeds.dtype == torch.int64 and seeds.ndim == 1):
        raise TypeError("this engine takes x as the pair of inputs and seeds: engine/local.py has `seeded`")


TRIED = 3  # records of a person that a module is tried with together


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
        """Return the targets of records."""
        return self.task.targets(y, what)

    def loss(self, module: nn.Module, x: Tree, y: Tree) -> Tensor:
        assert isinstance(x, dict)
        counts = x["count"]
        assert isinstance(counts, Tensor)
        losses = []
        for person, count in enumerate(counts.tolist()):
            records, targets = (mapped(lambda leaf: leaf[person, :count], tree) for tree in (x["records"], y))  # noqa: B023
            losses.append(self.task.loss(module, records, targets))
        return torch.stack(losses).mean()

    def require_fit(self, module: nn.Module, x: Tree, y: Tree) -> None:
        self.loss(module, x, y)

    def measure(self) -> Measure:
        """Return the measure of held-out records."""
        return self.task.measure()


def tried(example_spec: Examples, task: Task | None) -> list[tuple[Examples, Task | None]]:
    """Return what a module is tried with. Where examples are persons: a record by itself, and some of a person's
    together, of which a module may keep what it keeps of none alone, as norms do that count a batch."""
    if not isinstance(task, PerPerson):
        return [(example_spec, task)]
    assert isinstance(example_spec.x, dict)
    (x, alone_x), (y, alone_y) = (
        (mapped(lambda leaf: leaf[:, :TRIED], tree), mapped(lambda leaf: leaf[:, 0], tree))
        for tree in (example_spec.x["records"], example_spec.y)
    )
    some = Examples({"records": x, "count": example_spec.x["count"]}, y)
    several = next(leaves(y)).shape[1] > 1
    return [(Examples(alone_x, alone_y), task.task), *([(some, task)] if several else [])]
