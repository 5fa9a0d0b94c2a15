"""A task whose examples come with seeds, for modules that draw randomness in their forward pass, as dropout does."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedspa.examples import Tree, leaves
from fedspa.learning.tasks.base import Baseline, Task
from fedspa.learning.tasks.measures import Measure


class Drawing(Task):
    """x is the pair of inputs and seeds. Each example draws from its own seed, whatever was drawn before it. The
    generators are left there: whoever asks for a loss keeps those that others need."""

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
    its gradient, and nobody would be told."""
    seeds = x[1] if isinstance(x, tuple) and len(x) == 2 else None
    if draws and not (isinstance(seeds, Tensor) and seeds.dtype == torch.int64 and seeds.ndim == 1):
        raise TypeError("this engine takes x as the pair of inputs and seeds: engine/local.py has `seeded`")
