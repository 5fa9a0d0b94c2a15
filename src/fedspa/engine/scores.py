"""What an agent's records say of several models, as an engine: the gradient of a record is replaced by its scores.

There is a coordinate per model. A record adds 1 − 2s to each, s between 0 and 1: how well that model meets it. The loop
of the local steps then samples, clips, adds up and noises this as it does a gradient, so that a private score has no
code of its own that decides privacy, and costs what a training does.

A record's scores are a function of that record and the models alone: each is taken by itself, as a gradient is where a
site keeps records apart. Where a server chose a model that almost ties, the rounding of a batch could turn many
answers at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from fedspa.engine.local import local_steps
from fedspa.engine.task import LocalResult, LocalTask
from fedspa.errors import PrivacyError
from fedspa.examples import Tree, count, each_alone, leaves, mapped
from fedspa.learning.flat import FlatModel
from fedspa.learning.forward import evaluating, outputs
from fedspa.learning.tasks import Classification, PerPerson, Task
from fedspa.learning.threads import Switches, one_example_a_time

_SEED = 0  # of a model that draws even where it is evaluated: each record meets the same draws


class Scores:
    """`model` is the module and what it learns; `parameters` has a θ per row."""

    name = "scores"
    separates_records = True
    draws = False

    def __init__(self, model: FlatModel, parameters: Tensor) -> None:
        self._model, self._parameters = model, parameters

    def train(self, theta: Tensor, tasks: Sequence[LocalTask]) -> list[LocalResult]:
        """Δ of each is the noisy mean of 2s − 1 over the agent's records, a number per model, where θ is 0 and the
        local rate is 1 over the steps."""
        return [local_steps(theta, task, self) for task in tasks]

    def rows(self, theta: Tensor, x: Tree, y: Tree, coordinates: Tensor | None) -> Iterator[Tensor]:
        columns = []
        with one_example_a_time(), evaluating(self._model.module), torch.random.fork_rng(devices=[]), torch.no_grad():
            for parameters in self._parameters:
                columns.append(self._model.at(parameters.clone(), lambda module: self._column(module, x, y)))
        yield 1 - 2 * torch.stack(columns, dim=1).to(theta.device)

    def mean(self, theta: Tensor, x: Tree, y: Tree) -> Tensor:
        raise PrivacyError("scores of an agent's records leave with noise, or not at all")

    def _column(self, module: nn.Module, x: Tree, y: Tree) -> Tensor:
        found, switches = torch.full((count(y),), torch.nan), Switches()
        for number, (one, target) in enumerate(zip(each_alone(x), each_alone(y))):
            torch.default_generator.manual_seed(_SEED)
            try:
                found[number] = score(self._model.task, module, one, target)
            except (Exception, SystemExit):  # whatever a record makes the model raise must not be told
                continue
            finally:
                switches.put_back()
        return found


def score(task: Task, module: nn.Module, x: Tree, y: Tree) -> Tensor:
    """Of one example, from 0 to 1: whether its class was found; for all other tasks e^(−loss). A person's is the mean
    over the records that count."""
    if isinstance(task, PerPerson):
        assert isinstance(x, dict)
        records, targets = (mapped(lambda leaf: leaf[0], tree) for tree in (x["records"], y))
        own = slice(int(next(leaves(x["count"]))[0]))
        each = zip(*(each_alone(mapped(lambda leaf: leaf[own], tree)) for tree in (records, targets)))
        return torch.stack([score(task.task, module, *one) for one in each]).mean()
    if isinstance(task, Classification):
        assert isinstance(y, Tensor)
        return (outputs(module, x).argmax(dim=1) == y).float().mean()
    return torch.exp(-task.loss(module, x, y).float()).clamp(0, 1)
