"""The slow, obvious back end: one example at a time, ordinary autograd, float64.

It exists to be read and to be agreed with: every faster back end is tested against it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from fedspa.engine.local import local_steps
from fedspa.engine.task import LocalResult, LocalTask
from fedspa.examples import Tree, each_alone, in_float64, moved
from fedspa.learning.flat import FlatModel, copied
from fedspa.learning.tasks import Task
from fedspa.learning.tasks.wrappers import Drawing, require_seeds
from fedspa.learning.threads import Switches, one_example_a_time


class ReferenceEngine:
    name = "reference"
    separates_records = True

    def __init__(self, module: nn.Module, task: Task | None = None, *, draws: bool = False) -> None:
        plain = FlatModel(copied(module).to("cpu", torch.float64), task)
        self._model = FlatModel(plain.module, Drawing(plain.task)) if draws else plain
        self.draws = draws

    def train(self, theta: Tensor, tasks: Sequence[LocalTask]) -> list[LocalResult]:
        return [local_steps(theta.to("cpu", torch.float64), task, self) for task in tasks]

    def rows(self, theta: Tensor, x: Tree, y: Tree, coordinates: Tensor | None) -> Iterator[Tensor]:
        require_seeds(self.draws, x)
        switches = Switches()
        for one, target in zip(each_alone(x), each_alone(y)):
            try:
                with one_example_a_time():
                    gradient = self.mean(theta, one, target)
            except (Exception, SystemExit):  # what the model raises for an example costs it its gradient
                gradient = torch.full_like(theta, torch.nan)
            finally:
                switches.put_back()
            yield (gradient if coordinates is None else gradient[coordinates]).unsqueeze(0)

    def mean(self, theta: Tensor, x: Tree, y: Tree) -> Tensor:
        x, y = (in_float64(moved(tree, "cpu")) for tree in (x, y))
        with torch.random.fork_rng(devices=[], enabled=self.draws):
            return self._model.gradient(theta.to("cpu", torch.float64), x, y)
