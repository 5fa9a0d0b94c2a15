"""A task says what is learned: a loss of a module on examples, and how well held-out examples are met.

The guarantee does not care which: it is made of each example's gradient, whatever the loss is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Protocol

from torch import Tensor, nn

from fedspa.examples import Tree
from fedspa.learning.forward import outputs


class Measure(Protocol):
    """Scores of held-out examples, gathered part by part."""

    def add(self, found: Tensor, y: Tree) -> None:
        """Outputs and targets of some more examples."""
        ...

    def scores(self) -> dict[str, float | None]:
        """By name, the task's headline first; None where the examples do not say."""
        ...


class Task(ABC):
    """What every task answers.

    `loss` is the mean over the examples that it is given; a private step gives it one at a time. `headline` is the
    score that a run is judged by.
    """

    name: ClassVar[str]
    headline: str
    width: int | None = None  # outputs per example of a model that is built for the task; None: only a user's fits

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


class OfOutputs(Task):
    """A task whose loss is a function of the module's outputs and of the targets."""

    def loss(self, module: nn.Module, x: Tree, y: Tree) -> Tensor:
        return self.mean_loss(outputs(module, x), y)

    def require_fit(self, module: nn.Module, x: Tree, y: Tree) -> None:
        self.require_outputs(outputs(module, x), y)

    @abstractmethod
    def mean_loss(self, found: Tensor, y: Tree) -> Tensor:
        """Over the examples whose outputs and targets these are."""

    @abstractmethod
    def total_loss(self, found: Tensor, y: Tree) -> Tensor:
        """The sum over the examples, in float64."""

    @abstractmethod
    def require_outputs(self, found: Tensor, y: Tree) -> None:
        """Raise a ConfigError where such outputs cannot be held against such targets."""

    def strange(self, found: Tensor, y: Tree) -> Tensor | None:
        """Which examples' targets no such outputs can be held against, as a mask; None where every number will do. A
        GPU ends the process over one."""
        return None
