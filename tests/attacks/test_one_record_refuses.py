"""Attack: a record whose content makes the model raise turns a payload into a refusal, which says that it is there.

An Embedding of 10 words and one record with token 10 turned 20 of 20 payloads into `internal`; a label outside the
classes did the same in every engine. Now such a record counts as zero, in the agent's own log too, and no bit of what
the others add is another.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from plain import unprotected
from torch import Tensor, nn

from fedspa.engine.choose import EngineRequest, choose
from fedspa.engine.local import Engine, LocalTask
from fedspa.engine.native import NativeEngine, library
from fedspa.engine.per_example import PerExampleEngine, Scores, float64_reference
from fedspa.engine.traced import TracedEngine
from fedspa.errors import ConfigError, DataError
from fedspa.examples import Examples, blank
from fedspa.learning.flat import FlatModel
from fedspa.mechanisms.base import Clipping
from fedspa.mechanisms.gaussian.plan import GaussianPlan

RECORDS, STEPS = 12, 3


class Words(nn.Module):
    """Ten words; `guard` raises an error of its own kind for what it does not know."""

    def __init__(self, guard: type[BaseException] | None = None) -> None:
        super().__init__()
        self.embedding, self.head, self.guard = nn.Embedding(10, 4), nn.Linear(12, 3), guard

    def forward(self, x: Tensor) -> Tensor:
        if self.guard is not None and bool((x > 9).any()):
            raise self.guard("a word that nobody knows")
        logits: Tensor = self.head(self.embedding(x.long()).flatten(1))
        return logits


def words() -> tuple[nn.Module, Tensor]:
    net = nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(12, 3))
    return net, torch.randint(10, (RECORDS, 3), generator=torch.Generator().manual_seed(0))


def values() -> tuple[nn.Module, Tensor]:
    net = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    return net, torch.randn(RECORDS, 5, generator=torch.Generator().manual_seed(0))


def task(theta: Tensor, x: Tensor, y: Tensor, clip: Clipping, rows: Tensor | None = None) -> LocalTask:
    n = RECORDS if rows is None else len(rows)
    plan = GaussianPlan(len(theta), len(theta), clip, 0.5, "fixed", n, n, STEPS, 1, 1e-9, "replace-one", 1e-3)
    return LocalTask(x, y, None, 1.0, 0.1, plan, bytes(range(32)), rows=rows)


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def engines(net: nn.Module, x: Tensor, device: str) -> Iterator[Engine]:
    yield TracedEngine(net.to(device), Examples(x[:1], torch.zeros(1, dtype=torch.int64)), device=device)
    if device == "cpu":
        yield PerExampleEngine(net)
        yield float64_reference(net)


@pytest.mark.parametrize("clip", ["l2", "coordinate"])
@pytest.mark.parametrize("token", [10, -1, 10**6])
@pytest.mark.parametrize("device", DEVICES)
def test_a_token_that_is_no_word_costs_its_record(clip: Clipping, token: int, device: str) -> None:
    """In generic and reference -1 and others raise in torch; what it costs is what a label outside the classes does."""
    net, x = words()
    theta, y = FlatModel(net).flatten(), torch.arange(RECORDS) % 3
    bad_token, bad_label = x.clone(), y.clone()
    bad_token[4, 1], bad_label[4] = token, 3
    for engine in engines(net, x, device):
        by_token, by_label = engine.train(theta, [task(theta, bad_token, y, clip), task(theta, x, bad_label, clip)])
        assert by_token.zeroed == by_label.zeroed == STEPS, engine.name
        assert torch.equal(by_token.delta, by_label.delta), engine.name
        assert by_token.delta.isfinite().all()
        assert by_token.delta.abs().max() > 0


@pytest.mark.parametrize("clip", ["l2", "coordinate"])
@pytest.mark.parametrize("label", [3, -1, -100, 2**40, -(2**63)])
@pytest.mark.parametrize("device", DEVICES)
def test_a_label_that_is_no_class_costs_its_record(clip: Clipping, label: int, device: str) -> None:
    """What it costs is what a NaN among its features does."""
    net, x = values()
    theta, y = FlatModel(net).flatten(), torch.arange(RECORDS) % 3
    bad_x, bad_y = x.clone(), y.clone()
    bad_x[4, 1], bad_y[4] = math.nan, label
    compiled = device == "cpu" and library.library() is not None
    native = [NativeEngine(net, 1, level) for level in library.LEVELS] if compiled else []
    for engine in [*engines(net, x, device), *native]:
        by_label, by_nan = engine.train(theta, [task(theta, x, bad_y, clip), task(theta, bad_x, y, clip)])
        assert by_label.zeroed == by_nan.zeroed == STEPS, engine.name
        assert torch.equal(by_label.delta, by_nan.delta), engine.name
        # Among the records of others, and in cpSGD's sums.
        rows = torch.arange(RECORDS).flip(0)
        [result] = engine.train(theta, [task(theta, x, bad_y, clip, rows)])
        assert result.zeroed == STEPS
        if isinstance(engine, NativeEngine):
            sums = [engine.clipped_sum(theta, *records, clip, 0.5) for records in ((x, bad_y), (bad_x, y))]
            assert torch.equal(sums[0][0], sums[1][0])
            assert sums[0][1] == sums[1][1] == 1


@pytest.mark.parametrize(
    "guard", [ValueError, IndexError, AssertionError, ZeroDivisionError, DataError, MemoryError, SystemExit]
)
def test_an_error_of_the_models_own_costs_its_record(guard: type[BaseException]) -> None:
    x, y = (
        torch.randint(10, (RECORDS, 3), generator=torch.Generator().manual_seed(0)).float(),
        torch.arange(RECORDS) % 3,
    )
    bad = x.clone()
    bad[7] = 11
    for make in (PerExampleEngine, float64_reference):
        torch.manual_seed(0)
        net = Words(guard)
        theta = FlatModel(net).flatten()
        [raised] = make(net).train(theta, [task(theta, bad, y, "l2")])
        left = y.clone()
        left[7] = 3
        [wanted] = make(net).train(theta, [task(theta, x, left, "l2")])
        assert raised.zeroed == wanted.zeroed == STEPS
        assert torch.equal(raised.delta, wanted.delta)
        (scores,) = Scores(FlatModel(net), theta[None]).rows(torch.zeros(1), bad, y, None)
        assert scores.isnan().flatten().nonzero().tolist() == [[7]]


def test_without_privacy_it_is_an_error_of_one_line() -> None:
    """FedAvg clips nothing and hides nothing."""
    net, x = words()
    theta, y = FlatModel(net).flatten(), torch.arange(RECORDS) % 3
    x[4, 1] = 10
    for engine in (PerExampleEngine(net), float64_reference(net)):
        with pytest.raises(DataError) as caught:
            engine.train(theta, [unprotected(task(theta, x, y, "l2"))])
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("engine", ["generic", "reference"])
def test_a_model_that_fails_for_every_record_is_refused_before_any(engine: Any) -> None:
    """Zeros for ever would be the other way to notice."""
    with pytest.raises(ConfigError, match=r"has no gradient for an example made like \(7,\)"):
        choose(EngineRequest(engine, nn.Sequential(nn.Linear(6, 3), nn.Sigmoid()), blank((7,)), "cpu", 1, exact=False))
