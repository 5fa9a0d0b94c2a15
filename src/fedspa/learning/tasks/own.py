"""A task of the user's own: `loss(module, example) → scalar`; and the loss that a module has of its own.

The function gets a batch of examples as they were given: the pair (x, y), or the dict with its targets in it. Its loss
should be the mean over the batch; a private step hands it one example at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from fedspa.errors import ConfigError
from fedspa.examples import Tree, count, layout
from fedspa.learning.forward import returned
from fedspa.learning.tasks.base import Task
from fedspa.learning.tasks.measures import Measure, NoScores

Loss = Callable[[nn.Module, Tree], Tensor]


class Own(Task):
    """`key` is where in a dict the targets lay: "" where there were none, None for pairs. `width` is the number of
    classes that the targets are, if any. `what` names the function in what is said of it."""

    name = "own"
    headline = "loss"

    def __init__(
        self, function: Loss, key: str | None = None, width: int | None = None, what: str = "the task's function"
    ) -> None:
        self.function, self._key, self.width, self.what = function, key, width, what

    def targets(self, y: Tree, what: str) -> Tree:
        return y

    def loss(self, module: nn.Module, x: Tree, y: Tree) -> Tensor:
        example: Tree = (x, y)
        if self._key is not None:
            example = {**x, self._key: y} if self._key and isinstance(x, dict) else x
        found = self.function(module, example)
        if not isinstance(found, Tensor) or found.numel() != 1:
            got = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise ConfigError(
                "its loss must be one number, a tensor with a gradient, as `.mean()` makes of many; for a batch of "
                f"{count(y)}, each {layout(x)}, it gave {got}"
            )
        return found.reshape(())

    def require_fit(self, module: nn.Module, x: Tree, y: Tree) -> None:
        self.loss(module, x, y)

    def measure(self) -> Measure:
        return NoScores()


class OfModule(Own):
    """The loss that the module itself returns, as transformers' models do: `module(**example).loss`."""

    name = "module"

    def __init__(self, key: str | None = None) -> None:
        super().__init__(_returned_loss, "labels" if key is None else key)

    def require_fit(self, module: nn.Module, x: Tree, y: Tree) -> None:
        if not isinstance(x, dict):
            raise ConfigError(
                "task 'module' calls it with keywords, so an example must be a dict of tensors; for others "
                "give a function: task=lambda module, example: …"
            )
        super().require_fit(module, x, y)


def _returned_loss(module: nn.Module, example: Tree) -> Tensor:
    found = returned(module, example)
    loss = found.get("loss") if isinstance(found, Mapping) else getattr(found, "loss", None)
    if not isinstance(loss, Tensor):
        raise ConfigError(
            f"task 'module' needs a module that returns its loss, as `.loss`; this one gave a {type(found).__name__} "
            "without: name another task"
        )
    return loss
