"""A task says what is learned: a loss of a module on examples, and how well held-out examples are met.

The guarantee does not care which: it is made of each example's gradient, whatever the loss is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from torch import Tensor, nn

from fedspa.examples import Tree
from fedspa.learning.forward import outputs
from fedspa.learning.tasks.measures import Measure


class Baseline(NamedTuple):
    """What the best answer that looks at no input scores on the very examples that it was chosen by."""

    answer: str
    score: float


class Task(ABC):
    """What every task answers.

    `loss` is the mean over the examples that it is given; a private step gives it one at a time. It runs inside vmap
    too, so that it may not ask a tensor for its values. `headline` is the score that a run is judged by.
    """

    name: str
    headline: str
    width: int | None = None  # outputs per example of a model that is built for the task; None: only a user's fits

    def labels(self, x: Tree, y: Tree) -> Tree:
        """The targets that came with such examples, or those that the task itself makes of the inputs."""
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

    def baseline(self, y: Tree) -> Baseline | None:
        """The headline without any input, by the targets of held-out examples; None where nobody knows."""
        return None

    @staticmethod
    def answers(found: Tensor) -> Tensor:
        """What a module's outputs answer, in the form of the targets: the outputs themselves where nobody knows."""
        return found


class OfOutputs(Task):
    """A task whose loss is a function of the module's outputs and of the targets. `takes_logits` says that the loss
    makes probabilities of the outputs itself, by a sigmoid or softmax."""

    takes_logits = False

    def loss(self, module: nn.Module, x: Tree, y: Tree) -> Tensor:
        return self.mean_loss(outputs(module, x), y)

    def require_fit(self, module: nn.Module, x: Tree, y: Tree) -> None:
        self.require_outputs(outputs(module, x), y)

    @abstractmethod
    def losses(self, found: Tensor, y: Tree) -> Tensor:
        """Of each of the examples whose outputs and targets these are."""

    def mean_loss(self, found: Tensor, y: Tree) -> Tensor:
        return self.losses(found, y).mean()

    def total_loss(self, found: Tensor, y: Tree) -> Tensor:
        """The sum over the examples, in float64."""
        return self.losses(found, y).double().sum()

    @abstractmethod
    def require_outputs(self, found: Tensor, y: Tree) -> None:
        """Raise a ConfigError where such outputs cannot be held against such targets."""

    def strange(self, found: Tensor, y: Tree) -> Tensor | None:
        """Which examples' targets no such outputs can be held against, as a mask; None where every number will do. A
        GPU ends the process over one."""
        return None
