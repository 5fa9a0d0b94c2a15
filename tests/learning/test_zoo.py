"""A zoo of models held against every engine: what would let one example into another's gradient is refused, or runs so
that what each example adds is its own to the bit."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator

import pytest
import torch
import unsound_modules as zoo
from torch import Tensor, nn

from fedspa.engine import EngineName
from fedspa.engine.choose import EngineRequest, choose
from fedspa.engine.local import Engine
from fedspa.engine.per_example import PerExampleEngine
from fedspa.engine.traced import TracedEngine
from fedspa.errors import ConfigError, MixingWarning
from fedspa.examples import Examples, Tree, taken
from fedspa.learning import forward
from fedspa.learning.flat import FlatModel

ENGINES: list[EngineName] = ["generic", "reference"]
RECORDS = 7
REFUSED = {**zoo.KEEPING, **zoo.SHARING}
EVERY = {**zoo.MIXING, **REFUSED, **zoo.FIRST_OUTSIDE, **zoo.DRAWING}
# Refused by their kind, or for what they write and no gradient of the next examples shows.
QUIET = {"counter", "hidden BatchNorm", "BatchNorm", "InstanceNorm", "max_norm", "spectral_norm"}


@pytest.fixture(autouse=True)
def _nothing_kept() -> Iterator[None]:
    yield
    forget()


def forget() -> None:
    """What models of the zoo keep outside of themselves."""
    zoo.GLOBAL.clear()
    zoo.NUMBER, zoo.ByClass.seen = 0.0, 0
    zoo.by_default.__defaults__[0].clear()
    os.environ.pop("FEDSPA_TEST_ZOO", None)


def records(name: str) -> Examples:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(RECORDS, 6, 4, generator=generator)
    return Examples(x if name != "max_norm" else (x.abs().sum(2) * 2).long() % 9, torch.arange(RECORDS) % 3)


def made(name: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return EVERY[name]()


def chosen(engine: EngineName, name: str) -> Engine:
    x, y = records(name)
    return choose(
        EngineRequest(
            engine, made(name), Examples(torch.zeros_like(x[:1]), torch.zeros_like(y[:1])), "cpu", 1, exact=False
        )
    )


def rows(engine: Engine, theta: Tensor, x: Tree, y: Tensor) -> Tensor:
    assert isinstance(engine, PerExampleEngine)
    theta = theta.double() if engine.name == "reference" else theta
    return torch.cat(list(engine.rows(theta, x, y, None)))


def keeps_apart(engine: Engine, name: str, x: Tree, y: Tensor) -> bool:
    """Each record alone, and among others: in another order, in another number, twice."""
    theta = FlatModel(made(name)).flatten() + 0.1
    alone = torch.cat([rows(engine, theta, taken(x, slice(i, i + 1)), y[i : i + 1]) for i in range(RECORDS)])
    assert alone.isfinite().all()
    assert alone.abs().max() > 0
    for order in ([*range(RECORDS)], [*range(RECORDS)][::-1], [2, 5], [3, 1, 3, 3], [6]):
        company = torch.tensor(order)
        together = rows(engine, theta, taken(x, company), y[company])
        if not torch.equal(together.view(torch.uint8), alone[company].view(torch.uint8)):
            return False
    return True


@pytest.mark.filterwarnings("ignore:.*spectral_norm")
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_what_keeps_or_shares_is_refused_with_its_layer_and_a_fix(
    name: str, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if large:  # three synthetic examples then
        monkeypatch.setattr(forward, "_LARGE_MODULE", 0)
    for engine in ("generic", "traced"):
        with pytest.raises(ConfigError, match=r"the module('s layer '[\w.]+'| itself) \(\w+\) .+; .+"):
            chosen(engine, name)  # type: ignore[arg-type]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", zoo.FIRST_OUTSIDE)
def test_what_keeps_only_the_first_example_outside_has_kept_a_synthetic_one(name: str, engine: EngineName) -> None:
    """Only walking closures and globals would find it. But no record can then be the first."""
    module, (x, y) = made(name), records(name)
    like = Examples(torch.zeros_like(x[:1]), torch.zeros_like(y[:1]))
    runs = choose(EngineRequest(engine, module, like, "cpu", 1, exact=False))
    assert keeps_apart(runs, name, (x, torch.arange(RECORDS)), y)


@pytest.mark.parametrize("name", [name for name in {**REFUSED, **zoo.FIRST_OUTSIDE} if name not in QUIET])
def test_the_refused_would_have_been_unsound(name: str) -> None:
    """Without a trial, one example's gradient depends on another's having been there, or on the time: no false
    alarms."""
    x, y = records(name)
    theta = FlatModel(made(name)).flatten() + 0.1
    found = []
    for company in ([1], [0, 1], [6, 5, 4, 3, 2, 0, 1]):
        forget()
        found.append(rows(PerExampleEngine(made(name)), theta, x[company], y[company])[-1])
    assert any(not torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", zoo.MIXING)
def test_what_mixes_by_hand_is_run_one_by_one_and_named_in_a_warning(
    name: str, engine: EngineName, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if large:
        monkeypatch.setattr(forward, "_LARGE_MODULE", 0)
    with pytest.warns(MixingWarning, match=r"^the module('s layer|\s).*trains otherwise than it evaluates"):
        runs = chosen(engine, name)
    assert runs.separates_records
    x, y = records(name)
    assert keeps_apart(runs, name, (x, torch.arange(RECORDS)), y)


# What torch cannot map over examples, or draws by other means than Bernoulli variables.
UNTRACED = {"functional batch_norm", "batch_norm in training"}
UNTRACED |= {"stochastic depth", "RReLU", "FractionalMaxPool"}


@pytest.mark.filterwarnings("ignore::fedspa.MixingWarning")
@pytest.mark.parametrize("name", [*zoo.MIXING, *zoo.DRAWING])
def test_the_traced_engine_shows_a_module_one_example_at_a_time_or_does_not_take_it(name: str) -> None:
    if name in UNTRACED:
        with pytest.raises(ConfigError, match="torch cannot trace this model"):
            chosen("traced", name)
        return
    runs, (x, y) = chosen("traced", name), records(name)
    assert isinstance(runs, TracedEngine)
    assert runs.draws == (name in zoo.DRAWING)
    theta, given = FlatModel(made(name)).flatten() + 0.1, (x, torch.arange(RECORDS)) if runs.draws else x
    found = torch.cat(list(runs.rows(theta, given, y, None)))
    if runs.draws:
        same = (x[:1].expand(64, -1, -1), torch.arange(64)), y[:1].expand(64)
        assert len(torch.cat(list(runs.rows(theta, *same, None))).unique(dim=0)) > 1  # each place draws its own
    else:
        # One value by its own size is ±1: where small ones are divided, derivatives of 0 are 4e-6 by rounding.
        assert torch.allclose(found, FlatModel(made(name)).per_example_gradients(theta, x, y), atol=1e-5)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", zoo.DRAWING)
def test_what_draws_from_torch_has_randomness_of_its_own_for_each_example(name: str, engine: EngineName) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", MixingWarning)
        runs = chosen(engine, name)
    assert isinstance(runs, PerExampleEngine)
    assert runs.draws
    x, y = records(name)
    seeds = torch.arange(RECORDS) * 1_000_003
    assert keeps_apart(runs, name, (x, seeds), y)
    theta = FlatModel(made(name)).flatten()
    same = x[:1].expand(64, -1, -1), y[:1].expand(64)
    drawn = rows(runs, theta, (same[0], torch.arange(64)), same[1])
    assert len(drawn.unique(dim=0)) > 1  # other seeds, other numbers
