"""The engine that takes one example at a time by ordinary autograd: any module, any task, any device.

`run.engine = "generic"` runs it as the module is, `"reference"` in float64 on a CPU, to be agreed with: every faster
engine is tested against that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from fedspa.engine.local import local_steps, rows_at_once
from fedspa.engine.task import LocalResult, LocalTask
from fedspa.examples import Tree, blanks, in_float64, mapped, moved, split
from fedspa.learning.flat import FlatModel, copied
from fedspa.learning.forward import in_modes, modes
from fedspa.learning.tasks import Task
from fedspa.learning.tasks.base import OutputTask
from fedspa.learning.tasks.wrappers import Drawing, require_seeds


class PerExampleEngine:
    def __init__(
        self, module: nn.Module, task: Task | None = None, *, draws: bool = False, dtype: torch.dtype | None = None
    ) -> None:
        """`draws` says that a forward pass of the module may draw randomness; `dtype` is float64 for the reference."""
        self.name = "generic" if dtype is None else "reference"
        self._dtype = dtype
        plain = FlatModel(module if dtype is None else copied(module).to("cpu", dtype), task)
        self._model = FlatModel(plain.module, Drawing(plain.task)) if draws else plain
        self.draws = draws
        self._modes = modes(plain.module)  # a caller may change the module's modes between two rounds
        self._blank_outputs: Tensor | None = None

    @property
    def separates_records(self) -> bool:
        """On a CPU. Some of torch's kernels for GPUs add in another order each time."""
        return all(parameter.device.type == "cpu" for parameter in self._model.module.parameters())

    def train(self, theta: Tensor, tasks: Sequence[LocalTask]) -> list[LocalResult]:
        start = theta if self._dtype is None else theta.to("cpu", self._dtype)
        return [local_steps(start, task, self) for task in tasks]

    def rows(self, theta: Tensor, x: Tree, y: Tree, coordinates: Tensor | None) -> Iterator[Tensor]:
        require_seeds(self.draws, x)
        block = rows_at_once(theta)
        for x_part, y_part in zip(split(x, block), split(y, block)):
            gradients = self._gradients(*self._converted(theta, x_part, y_part))
            yield gradients if coordinates is None else gradients[:, coordinates]

    def mean(self, theta: Tensor, x: Tree, y: Tree) -> Tensor:
        with in_modes(self._modes), torch.random.fork_rng(devices=[], enabled=self.draws):
            return self._model.gradient(*self._converted(theta, x, y))

    def _converted(self, theta: Tensor, x: Tree, y: Tree) -> tuple[Tensor, Tree, Tree]:
        if self._dtype is None:
            return theta, x, y
        return theta.to("cpu", self._dtype), in_float64(moved(x, "cpu")), in_float64(moved(y, "cpu"))

    def _gradients(self, theta: Tensor, x: Tree, y: Tree) -> Tensor:
        """Return a row per example. On a GPU a target outside the outputs would end the process: it is looked for
        first, and its example has no gradient."""
        with in_modes(self._modes), torch.random.fork_rng(devices=[], enabled=self.draws):
            invalid = None if theta.device.type == "cpu" else self._invalid_targets(theta, x, y)
            if invalid is None:
                return self._model.gradients_alone(theta, x, y)
            y = mapped(lambda leaf: leaf.masked_fill(invalid.view(-1, *[1] * (leaf.ndim - 1)), 0), y)
            return self._model.gradients_alone(theta, x, y).masked_fill_(invalid.unsqueeze(1), torch.nan)

    def _invalid_targets(self, theta: Tensor, x: Tree, y: Tree) -> Tensor | None:
        if not isinstance(self._model.task, OutputTask):
            return None
        if self._blank_outputs is None:
            with torch.no_grad():
                self._blank_outputs = self._model.outputs(theta, blanks(x))
        return self._model.task.strange(self._blank_outputs, y)


def float64_reference(module: nn.Module, task: Task | None = None, *, draws: bool = False) -> PerExampleEngine:
    """Return the engine that the others are tested against."""
    return PerExampleEngine(module, task, draws=draws, dtype=torch.float64)
