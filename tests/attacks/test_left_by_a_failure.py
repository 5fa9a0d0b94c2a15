"""Attack: a record for which the model raises an error half-way, and what the model leaves behind then.

The record itself counts as zero. But a forward pass that had switched gradients off, and did not come to switch them on
again, cost every later record its gradient, in all later rounds too; what hooks had gathered of the record was taken
for the next one's. Both move a sum by far more than one record may.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedspa.engine import EngineName
from fedspa.engine.choose import EngineRequest, choose
from fedspa.engine.per_example import PerExampleEngine, Scores
from fedspa.engine.traced import TracedEngine
from fedspa.errors import ConfigError
from fedspa.examples import Examples, blank
from fedspa.learning.flat import FlatModel
from fedspa.learning.tasks import Classification
from fedspa.learning.validate import try_failures, try_gradients, try_scores

RECORDS, BAD = 9, 3
LIKE = Examples(torch.zeros(1, 3, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))


class Words(nn.Module):
    """Raises for a word that it does not know."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(10, 4), nn.Linear(12, 3)
        self.read = nn.Flatten()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))  # type: ignore[no-any-return]

    def features(self, x: Tensor) -> Tensor:
        return self.read(self.words(x))  # type: ignore[no-any-return]


class WithoutGradients(Words):
    def features(self, x: Tensor) -> Tensor:
        before = torch.is_grad_enabled()
        torch.set_grad_enabled(False)
        found = super().features(x)
        torch.set_grad_enabled(before)
        return found


class InHalf(Words):
    def features(self, x: Tensor) -> Tensor:
        before = torch.is_autocast_enabled("cpu")
        torch.set_autocast_enabled("cpu", True)
        found = super().features(x)
        torch.set_autocast_enabled("cpu", before)
        return found


class InDouble(Words):
    def features(self, x: Tensor) -> Tensor:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        found = super().features(x)
        torch.set_default_dtype(before)
        return found * torch.ones(12)


class InThreads(Words):
    def features(self, x: Tensor) -> Tensor:
        before = torch.get_num_threads()
        torch.set_num_threads(before + 1)
        found = super().features(x)
        torch.set_num_threads(before)
        return found * torch.get_num_threads()


SWITCHING = [WithoutGradients, InHalf, InDouble, InThreads]


class Gathering(Words):
    """A hook gathers what a layer gave, which the end of a forward pass forgets."""

    def __init__(self) -> None:
        super().__init__()
        self.words.gathered = []
        self.words.register_forward_pre_hook(lambda layer, given: layer.gathered.append(given[0].float().repeat(1, 4)))

    def features(self, x: Tensor) -> Tensor:
        found = super().features(x) + self.words.gathered[0]
        self.words.gathered.clear()
        return found


class Closure(Words):
    """The same in a list that no layer holds."""

    def __init__(self) -> None:
        super().__init__()
        gathered: list[Tensor] = []

        def gather(layer: nn.Module, given: Any) -> None:
            gathered.append(given[0].float().repeat(1, 4))

        def used(layer: nn.Module, given: Any, found: Tensor) -> Tensor:
            both = found + gathered[0]
            gathered.clear()
            return both

        self.words.register_forward_pre_hook(gather)
        self.read.register_forward_hook(used)


class Turned(Words):
    """Weights that are turned round for a part of the pass."""

    def features(self, x: Tensor) -> Tensor:
        self.head.weight.data.neg_()
        found = super().features(x)
        self.head.weight.data.neg_()
        return found


class Deeper(Words):
    depth = 0

    def features(self, x: Tensor) -> Tensor:
        self.depth += 1
        found = super().features(x) * self.depth
        self.depth -= 1
        return found


LEAVING = [Gathering, Closure, Turned, Deeper]


class Overwritten(Words):
    """What is left behind is made anew before it is read."""

    given: Tensor | None = None

    def features(self, x: Tensor) -> Tensor:
        self.given = x
        found = super().features(x) + self.given.repeat(1, 4)
        self.given = None
        return found


class Careful(Gathering):
    def features(self, x: Tensor) -> Tensor:
        try:
            return super().features(x)
        finally:
            self.words.gathered.clear()


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_grad_enabled(True)
    torch.set_autocast_enabled("cpu", False)
    torch.set_default_dtype(torch.float32)
    torch.set_num_threads(threads)


def records() -> tuple[Tensor, Tensor, Tensor]:
    """Records, the same with one that is bad, and labels."""
    x = torch.randint(10, (RECORDS, 3), generator=torch.Generator().manual_seed(0))
    bad = x.clone()
    bad[BAD, 1] = 10
    return x, bad, torch.arange(RECORDS) % 3


def rows(engine: PerExampleEngine, theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
    given: Any = (x, torch.arange(len(y))) if engine.draws else x
    return torch.cat(list(engine.rows(theta.double() if engine.name == "reference" else theta, given, y, None)))


def others_move(engine: PerExampleEngine, module: nn.Module) -> bool:
    """Whether a bad record changes the gradient of any other."""
    (x, bad, y), theta = records(), FlatModel(module).flatten()
    before, after = rows(engine, theta, x, y), rows(engine, theta, bad, y)
    assert after[BAD].isnan().all()
    others = torch.arange(RECORDS) != BAD
    return not torch.equal(before[others], after[others])


@pytest.mark.filterwarnings("ignore::fedspa.MixingWarning")
@pytest.mark.parametrize("engine", ["generic", "reference"])
@pytest.mark.parametrize("make", [Words, *SWITCHING, Overwritten, Careful])
def test_a_record_that_fails_costs_no_other_its_gradient(make: Callable[[], Words], engine: EngineName) -> None:
    module = make()
    made = choose(EngineRequest(engine, module, LIKE, "cpu", 1, exact=False))
    assert isinstance(made, PerExampleEngine)
    assert not others_move(made, module)


@pytest.mark.parametrize("make", LEAVING)
def test_what_is_left_behind_would_be_in_the_gradients_of_others(make: Callable[[], Words]) -> None:
    module = make()
    assert others_move(PerExampleEngine(module), module)


@pytest.mark.filterwarnings("ignore::fedspa.MixingWarning")
@pytest.mark.parametrize("make", LEAVING)
def test_who_leaves_something_behind_is_refused_where_it_is_called(make: Callable[[], Words]) -> None:
    module = make()
    try_gradients(module, LIKE)  # where nothing fails, nothing is left
    for engine in ("generic", "reference"):
        with pytest.raises(ConfigError, match=r"^the module.+ \(\w+\) .+ for (it|one before it|the next).*; .+"):
            choose(EngineRequest(engine, module, LIKE, "cpu", 1, exact=False))
    with pytest.raises(ConfigError, match=r"^in eval mode, in which agents score, the module"):
        try_scores(module, LIKE, Classification(3))


@pytest.mark.filterwarnings("ignore::fedspa.MixingWarning")
def test_a_program_calls_no_module() -> None:
    made = choose(EngineRequest("auto", Gathering(), LIKE, "cpu", 1, exact=False))
    assert isinstance(made, TracedEngine)
    (x, bad, y), theta = records(), FlatModel(Gathering()).flatten()
    before, after = (torch.cat(list(made.rows(theta, given, y, None))) for given in (x, bad))
    assert after[BAD].isnan().all()
    others = torch.arange(RECORDS) != BAD
    assert torch.equal(before[others], after[others])


@pytest.mark.parametrize("make", SWITCHING)
def test_a_record_that_fails_costs_no_other_its_score(make: Callable[[], Words]) -> None:
    model, (x, bad, y) = FlatModel(make(), Classification(3)), records()
    try_scores(model.module, LIKE, Classification(3))
    engine = Scores(model, model.flatten()[None])
    (before,), (after,) = (engine.rows(torch.zeros(1), given, y, None) for given in (x, bad))
    assert after.isnan().flatten().nonzero().tolist() == [[BAD]]
    others = torch.arange(RECORDS) != BAD
    assert torch.equal(before[others], after[others])
    assert torch.is_grad_enabled()


def test_a_trial_leaves_the_module_alone() -> None:
    module = Gathering()
    with pytest.raises(ConfigError, match="once it has raised an error for one before it"):
        try_failures(module, LIKE)
    assert not module.words.gathered
    assert not module._forward_hooks


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_layer_that_takes_no_hooks_is_passed_over() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 5), nn.Tanh()))
    try_failures(nn.Sequential(scripted, nn.Linear(5, 3)), blank((4,)))
