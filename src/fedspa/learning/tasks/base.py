"""A task says what is learned: a loss of a module on examples, and how well held-out examples are met.

The guarantee does not care which: it is made of each example's gradient, whatever the loss is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import NamedTuple

from torch import Tensor, nn

from fedspa.errors import ConfigError
from fedspa.examples import Tree, count, layout
from fedspa.learning.forward import outputs, returned
from fedspa.learning.tasks.measures import Measure, NoScores

Loss = Callable[[nn.Module, Tree], Tensor]
Metric = Callable[[Tensor, Tree], float]  # of all held-out outputs and targets; NaN where they do not define one


class Baseline(NamedTuple):
    """What the best answer that looks at no input scores on the very examples that it was chosen by."""

    answer: str
    score: float


class Task(ABC):
    """What every task answers.

    `loss` is the mean over the examples that it is given; a private step gives it one at a time. It runs inside vmap
    too, so that it may not ask a tensor for its values. `headline` is the score that a run is judged by, and
    `headline_note` says why where it is not the task's usual one and nobody chose it.
    """

    name: str
    headline: str
    headline_note: str = ""
    width: int | None = None  # outputs per example of a model that is built for the task; None: only a user's fits

    def labels(self, x: Tree, y: Tree) -> Tree:
        """Return the targets that came with such examples, or those that the task itself makes of the inputs."""
        return y

    @abstractmethod
    def targets(self, y: Tree, what: str) -> Tree:
        """Targets as the loss takes them, or a DataError that begins with `what`."""

    @abstractmethod
    def loss(self, module: nn.Module, x: Tree, y: Tree) -> Tensor: ...

    @abstractmethod
    def require_fit(self, module: nn.Module, x: Tree, y: Tree) -> None:
        """Raise a ConfigError where the module cannot learn this from such examples."""

    @abstractmethod
    def measure(self) -> Measure: ...

    @property
    def measured(self) -> tuple[str, ...]:
        """Return the names of the scores that every run of the task has."""
        return (self.headline,)

    def on_request(self) -> Mapping[str, Metric]:
        """Return the scores that a run has only where it is judged by them."""
        return {}

    def fair_headline(self, y: Tree) -> tuple[str, str]:
        """Return the headline for held-out examples with such targets, and a note where it is not the usual one."""
        return self.headline, ""

    def baseline(self, y: Tree) -> Baseline | None:
        """Return the headline without any input, by the targets of held-out examples; None where nobody knows."""
        return None

    @staticmethod
    def answers(found: Tensor) -> Tensor:
        """Return what a module's outputs answer, in the form of the targets: by default, the outputs themselves."""
        return found

    @staticmethod
    def probabilities(found: Tensor) -> Tensor | None:
        """Return the probabilities of classes or labels that a module's outputs stand for; None where they stand for
        none."""
        return None


class OutputTask(Task):
    """A task whose loss is a function of the module's outputs and of the targets. `takes_logits` says that the loss
    makes probabilities of the outputs itself, by a sigmoid or softmax."""

    takes_logits = False

    def loss(self, module: nn.Module, x: Tree, y: Tree) -> Tensor:
        return self.mean_loss(outputs(module, x), y)

    def require_fit(self, module: nn.Module, x: Tree, y: Tree) -> None:
        self.require_outputs(outputs(module, x), y)

    @abstractmethod
    def losses(self, found: Tensor, y: Tree) -> Tensor:
        """Return the loss of each example."""

    def mean_loss(self, found: Tensor, y: Tree) -> Tensor:
        return self.losses(found, y).mean()

    def total_loss(self, found: Tensor, y: Tree) -> Tensor:
        """Return the sum over the examples, in float64."""
        return self.losses(found, y).double().sum()

    @abstractmethod
    def require_outputs(self, found: Tensor, y: Tree) -> None:
        """Raise a ConfigError where such outputs cannot be held against such targets."""

    def invalid_targets(self, found: Tensor, y: Tree) -> Tensor | None:
        """Return a mask of the examples whose targets are outside such outputs; None where every number will do. A GPU
        ends the process over one."""
        return None


class CustomLoss(Task):
    """A loss `function(module, example)` of the user's own, the mean over a batch of examples as they were given: the
    pair (x, y), or the dict with its targets in it. A private step gives it one example at a time.

    `key` is where in a dict the targets lay: "" where there were none, None for pairs. `width` is the number of
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


class ModuleLoss(CustomLoss):
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
