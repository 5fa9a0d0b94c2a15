"""The back end for any module that autograd can go through, and any task.

On a CPU each example by itself, which keeps examples apart to the bit; on a GPU `vmap(grad)` in micro-batches under a
memory budget, which does not (`separates_records`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from fedspa.engine.local import local_steps, rows_at_once
from fedspa.engine.obstacle import Obstacle
from fedspa.engine.task import LocalResult, LocalTask
from fedspa.examples import Tree, blanks, count, mapped, split
from fedspa.learning.flat import FlatModel
from fedspa.learning.forward import in_modes, modes
from fedspa.learning.layers import may_draw
from fedspa.learning.tasks import Task
from fedspa.learning.tasks.base import OutputTask
from fedspa.learning.tasks.wrappers import Drawing, require_seeds


def slows(module: nn.Module, device: torch.device | str) -> Obstacle | None:
    """None if it runs as fast there as it can, as far as the kinds of layers tell."""
    if torch.device(device).type == "cpu":
        return None
    for name, layer in module.named_modules():
        where = f"layer '{name or '(root)'}' ({type(layer).__name__})"
        if isinstance(layer, nn.RNNBase):
            why = f"vmap has no rule for {where}, so that examples go one by one"
            return Obstacle(why, f"a layer without recurrence in place of {where} lets examples go together")
        if may_draw(layer):
            why = f"{where} draws for each example, so that examples go one by one"
            return Obstacle(why, f"without {where}, or with it in eval mode, examples go together")
    return None


class GenericEngine:
    name = "generic"

    def __init__(
        self, module: nn.Module, task: Task | None = None, *, draws: bool = False, memory_budget: int | None = None
    ) -> None:
        """`draws` says that a forward pass of the module may draw randomness. `memory_budget` is in bytes of
        per-example gradients; what the device likes without it."""
        plain = FlatModel(module, task)
        self._model = FlatModel(module, Drawing(plain.task)) if draws else plain
        self.draws = draws
        # Those that were found sound: whoever has the module may change its modes between two rounds.
        self._modes = modes(module)
        self._budget = memory_budget
        self._maps: bool | None = None  # these two on a GPU
        self._blank_outputs: Tensor | None = None

    @property
    def separates_records(self) -> bool:
        return all(parameter.device.type == "cpu" for parameter in self._model.module.parameters())

    def train(self, theta: Tensor, tasks: Sequence[LocalTask]) -> list[LocalResult]:
        return [local_steps(theta, task, self) for task in tasks]

    def rows(self, theta: Tensor, x: Tree, y: Tree, coordinates: Tensor | None) -> Iterator[Tensor]:
        require_seeds(self.draws, x)
        microbatch = rows_at_once(theta, self._budget)
        gradients_of = self._model.gradients_alone if theta.device.type == "cpu" else self._on_gpu
        for x_part, y_part in zip(split(x, microbatch), split(y, microbatch)):
            with in_modes(self._modes), torch.random.fork_rng(devices=[], enabled=self.draws):
                gradients = gradients_of(theta, x_part, y_part)
            yield gradients if coordinates is None else gradients[:, coordinates]

    def mean(self, theta: Tensor, x: Tree, y: Tree) -> Tensor:
        with in_modes(self._modes), torch.random.fork_rng(devices=[], enabled=self.draws):
            return self._model.gradient(theta, x, y)

    def _on_gpu(self, theta: Tensor, x: Tree, y: Tree) -> Tensor:
        """There a target that the outputs have no place for would end the process: it is looked for first, and costs
        its example the gradient."""
        if self._maps is None:
            self._maps = not self.draws and self._can_map(theta, blanks(x), blanks(y))
        together = self._maps and count(y) > 1
        gradients_of = self._model.per_example_gradients() if together else self._model.gradients_alone
        task = self._model.task
        if not isinstance(task, OutputTask):
            return gradients_of(theta, x, y)
        if self._blank_outputs is None:
            with torch.no_grad():
                self._blank_outputs = self._model.outputs(theta, blanks(x))
        strange = task.strange(self._blank_outputs, y)
        if strange is None:
            return gradients_of(theta, x, y)
        y = mapped(lambda leaf: leaf.masked_fill(strange.view(-1, *[1] * (leaf.ndim - 1)), 0), y)
        return gradients_of(theta, x, y).masked_fill_(strange.unsqueeze(1), torch.nan)

    def _can_map(self, theta: Tensor, x: Tree, y: Tree) -> bool:
        """Whether vmap can take this model: it has no rule for an LSTM, for example."""
        try:
            self._model.per_example_gradients()(theta, x, y)
        except RuntimeError:
            return False
        return True
