"""A task of the user's own: `loss(module, example) → scalar`.

The function gets a batch of examples as they were given: the pair (x, y), or the dict with its targets in it. Its loss
should be the mean over the batch; a private step hands it one example at a time.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from fedspa.errors import ConfigError
from fedspa.examples import Tree
from fedspa.learning.tasks.base import Task

Loss = Callable[[nn.Module, Tree], Tensor]


class Own(Task):
    """`key` is where in a dict the targets lay; None for pairs."""

    name = "own"
    headline = "loss"

    def __init__(self, function: Loss, key: str | None = None) -> None:
        self.function, self._key = function, key

    def targets(self, y: Tree, what: str) -> Tree:
        return y

    def loss(self, module: nn.Module, x: Tree, y: Tree) -> Tensor:
        example: Tree = (x, y)
        if self._key is not None:
            assert isinstance(x, dict)
            example = {**x, self._key: y} if self._key else x
        found = self.function(module, example)
        if not isinstance(found, Tensor) or found.numel() != 1:
            got = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise ConfigError(f"the task's loss must be one number, a tensor with a gradient; it gave {got}")
        return found.reshape(())

    def require_fit(self, module: nn.Module, x: Tree, y: Tree) -> None:
        self.loss(module, x, y)

    def measure(self) -> NoScores:
        return NoScores()


class NoScores:
    """The loss says it all."""

    def add(self, found: Tensor, y: Tree) -> None: ...

    def scores(self) -> dict[str, float | None]:
        return {}
