"""The engine that takes one example at a time by ordinary autograd: any module, any task, any device.

`run.engine = "generic"` runs it as the module is, `"reference"` in float64 on a CPU, to be agreed with: every faster
engine is tested against that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from fedspa.engine.local import Engine, LocalResult, LocalTask, local_steps, rows_at_once
from fedspa.errors import PrivacyError
from fedspa.examples import Tree, count, in_float64, leaves, mapped, moved, single_examples, split, zero_examples
from fedspa.learning.flat import FlatModel, copied
from fedspa.learning.forward import Switches, evaluating, in_modes, modes, one_example_a_time, outputs
from fedspa.learning.tasks import Classification, PerPerson, Task
from fedspa.learning.tasks.base import Drawing, OutputTask, require_seeds


class PerExampleEngine(Engine):
    def __init__(
        self, module: nn.Module, task: Task | None = None, *, draws: bool = False, dtype: torch.dtype | None = None
    ) -> None:
        """`draws` says that a forward pass of the module may draw randomness; `dtype` is float64 for the reference."""
        self._dtype, self._draws = dtype, draws
        plain = FlatModel(module if dtype is None else copied(module).to("cpu", dtype), task)
        self._model = FlatModel(plain.module, Drawing(plain.task)) if draws else plain
        self._modes = modes(plain.module)  # a caller may change the module's modes between two rounds
        self._blank_outputs: Tensor | None = None

    @property
    def name(self) -> str:
        return "generic" if self._dtype is None else "reference"

    @property
    def draws(self) -> bool:
        return self._draws

    @property
    def separates_records(self) -> bool:
        """Return whether the module is on a CPU: some of torch's GPU kernels add in another order each time."""
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
                return self._model.per_example_gradients(theta, x, y)
            y = mapped(lambda leaf: leaf.masked_fill(invalid.view(-1, *[1] * (leaf.ndim - 1)), 0), y)
            return self._model.per_example_gradients(theta, x, y).masked_fill_(invalid.unsqueeze(1), torch.nan)

    def _invalid_targets(self, theta: Tensor, x: Tree, y: Tree) -> Tensor | None:
        if not isinstance(self._model.task, OutputTask):
            return None
        if self._blank_outputs is None:
            with torch.no_grad():
                self._blank_outputs = self._model.outputs(theta, zero_examples(x))
        return self._model.task.invalid_targets(self._blank_outputs, y)


def float64_reference(module: nn.Module, task: Task | None = None, *, draws: bool = False) -> PerExampleEngine:
    """Return the engine that the others are tested against."""
    return PerExampleEngine(module, task, draws=draws, dtype=torch.float64)


# What an agent's records say of several models, as an engine: the gradient of a record is replaced by its scores.
#
# There is a coordinate per model. A record adds 1 − 2s to each, s between 0 and 1: how well that model meets it. The
# loop of the local steps then samples, clips, adds up and noises this as it does a gradient, so that a private score
# has no code of its own that decides privacy, and costs what a training does.
#
# A record's scores are a function of that record and the models alone: each is taken by itself, as a gradient is where
# a site keeps records apart. Where a server chose a model that almost ties, the rounding of a batch could turn many
# answers at once.

_SEED = 0  # of a model that draws even where it is evaluated: each record meets the same draws


class Scores(Engine):
    """`model` is the module and what it learns; `parameters` has a θ per row."""

    name = "scores"
    separates_records = True

    def __init__(self, model: FlatModel, parameters: Tensor) -> None:
        self._model, self._parameters = model, parameters

    def train(self, theta: Tensor, tasks: Sequence[LocalTask]) -> list[LocalResult]:
        """Return for each task Δ, the noisy mean of 2s − 1 over the agent's records, a number per model, where θ is 0
        and the local rate is 1 over the steps."""
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
        for number, (one, target) in enumerate(zip(single_examples(x), single_examples(y))):
            torch.default_generator.manual_seed(_SEED)
            try:
                found[number] = score(self._model.task, module, one, target)
            except (Exception, SystemExit):  # an error that one record causes must not leave the agent
                continue
            finally:
                switches.put_back()
        return found


def score(task: Task, module: nn.Module, x: Tree, y: Tree) -> Tensor:
    """Return the score of one example, from 0 to 1: whether its class was found; for all other tasks e^(−loss). A
    person's is the mean over the records that count."""
    if isinstance(task, PerPerson):
        assert isinstance(x, dict)
        records, targets = (mapped(lambda leaf: leaf[0], tree) for tree in (x["records"], y))
        own = slice(int(next(leaves(x["count"]))[0]))
        each = zip(*(single_examples(mapped(lambda leaf: leaf[own], tree)) for tree in (records, targets)))
        return torch.stack([score(task.task, module, *one) for one in each]).mean()
    if isinstance(task, Classification):
        assert isinstance(y, Tensor)
        return (outputs(module, x).argmax(dim=1) == y).float().mean()
    return torch.exp(-task.loss(module, x, y).float()).clamp(0, 1)
