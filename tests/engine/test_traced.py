"""The traced back end agrees with plain autograd on what people bring, in any number of examples and every setting."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from plain import plain
from torch import Tensor, nn
from traced_nets import NETS, data, engine, net, rows, traced, transformer

from fedspa.engine.local import LocalTask, example_rows
from fedspa.engine.per_example import PerExampleEngine
from fedspa.engine.traced import engine as module_of_engine
from fedspa.errors import DataError
from fedspa.examples import Examples, taken
from fedspa.learning.flat import FlatModel
from fedspa.mechanisms.clipping import GradientBlock
from fedspa.mechanisms.gaussian.plan import GaussianPlan
from fedspa.randomness.mask import active_coordinates
from fedspa.randomness.streams import derive_key

RECORDS = 70


def task(name: str, share: float, **changes: Any) -> LocalTask:
    """Poisson batches of 9 in the mean, 3 steps; `plan` has what a GaussianPlan may differ in."""
    x, y = data(name, RECORDS)
    d = FlatModel(net(name)).dimension
    k = max(1, round(share * d))
    plan = {"clip": "l2", "sampling": "poisson", **changes.pop("plan", {})}
    neighbours = "add-remove" if plan["sampling"] == "poisson" else "replace-one"
    steps = GaussianPlan(d, k, plan["clip"], 0.2, plan["sampling"], 9, RECORDS, 3, 1, 0.1, neighbours, 1e-3)
    omega = torch.from_numpy(active_coordinates(bytes(16), d, k)) if k < d else None
    fields: dict[str, Any] = {"steps": steps, "key": derive_key(bytes(32), "traced"), **changes}
    return LocalTask(x, y, omega, d / k, 0.1, **fields)


def agree(name: str, given: LocalTask) -> None:
    theta = FlatModel(net(name)).flatten()
    (found,) = engine(name).train(theta, [given])
    (wanted,) = PerExampleEngine(net(name)).train(theta, [given])
    assert found.zeroed == wanted.zeroed
    assert torch.allclose(found.delta, wanted.delta, rtol=0, atol=2e-5 * float(wanted.delta.abs().max()))
    assert float(wanted.delta.abs().max()) > 0


@pytest.mark.parametrize("name", NETS)
def test_a_training_is_that_of_single_examples(name: str) -> None:
    agree(name, task(name, 0.1))
    agree(name, task(name, 1.0, plan={"clip": "coordinate"}))


@pytest.mark.parametrize("share", [0.1, 1.0])
@pytest.mark.parametrize("clip", ["l2", "coordinate"])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("sampling", ["poisson", "fixed"])
def test_in_every_setting(share: float, clip: str, exact: bool, sampling: str) -> None:
    agree("dict", task("dict", share, exact=exact, plan={"clip": clip, "sampling": sampling}))


@pytest.mark.parametrize("room", [RECORDS, RECORDS + 1, 4 * RECORDS])
def test_with_empty_places(room: int) -> None:
    """The generic engine leaves them out, and here they are computed and count for nothing."""
    for exact in (False, True):
        agree("dict", task("dict", 0.5, exact=exact, max_records=room))


@pytest.mark.parametrize("name", ["residual", "Embedding", "frozen"])
@pytest.mark.parametrize("blocks", [1, 5, 8])
def test_any_number_of_examples_in_blocks_of_any_size(name: str, blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, made = FlatModel(net(name)), engine(name)
    theta, (x, y) = model.flatten(), data(name, 70)
    wanted = model.per_example_gradients(theta, x, y)
    coordinates = torch.arange(1, len(theta), 3)
    largest = max((len(layer.order) for layer in made._program.layers if layer.words is None), default=0)
    monkeypatch.setattr(module_of_engine, "BLOCK_BUDGET", blocks * 4 * (largest + len(coordinates)))
    assert list(made.rows(theta, taken(x, slice(0)), y[:0], None)) == []
    for count in (1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 31, 33, 64, 70):
        found = torch.cat(list(made.rows(theta, taken(x, slice(count)), y[:count], coordinates)))
        assert torch.allclose(found, wanted[:count, coordinates], rtol=0, atol=1e-5 * float(wanted.abs().max()))


@pytest.mark.parametrize("overwrite", [lambda b: torch.add(b, 100.0, out=b), lambda b: b.add_(100.0)])
def test_what_is_copied_stays_when_its_source_is_overwritten(overwrite: Any) -> None:
    """Copies that only put values in order are left out of a program, unless it overwrites anything, by `out=` too."""

    class Overwrites(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            b = torch.empty(4)
            torch.arange(4.0, out=b)
            copied = b.clone(memory_format=torch.contiguous_format)
            overwrite(b)
            return self.head(x * copied)  # type: ignore[no-any-return]

    torch.manual_seed(0)
    module, like = Overwrites(), Examples(torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2]))
    theta = FlatModel(module).flatten()
    (block,) = traced(module, like).parts(theta, like.x, like.y, None, None)
    wanted = FlatModel(module).per_example_gradients(theta, like.x, like.y)
    assert torch.allclose(block.rows(), wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["residual", "transformer", "dict"])
def test_the_mean_of_a_batch_as_fedavg_takes_it(name: str) -> None:
    agree(name, task(name, 1.0, steps=plain("fixed", 9, 3)))
    agree(name, task(name, 1.0, steps=plain("poisson", 9, 3), max_records=2 * RECORDS))


def test_rows_as_cpsgd_takes_them() -> None:
    (x, y), theta = data("dict", 9), FlatModel(net("dict")).flatten()
    blocks = example_rows(engine("dict"), theta, x, y, None, one_by_one=True)
    found = torch.cat([block.rows() if isinstance(block, GradientBlock) else block for block in blocks])
    wanted = FlatModel(net("dict")).per_example_gradients(theta, x, y)
    assert torch.allclose(found, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["residual", "transformer"])
def test_threads_and_the_order_of_agents_change_no_bit(name: str) -> None:
    theta = FlatModel(net(name)).flatten()
    tasks = [task(name, 0.3, key=derive_key(bytes(32), f"agent {n}"), max_records=100) for n in range(9)]
    wanted = [result.delta for result in engine(name).train(theta, tasks)]
    for threads in (2, 7):
        again = engine(name, threads).train(theta, tasks[::-1])[::-1]
        assert all(torch.equal(one, other.delta) for one, other in zip(wanted, again))


class ByLength(nn.Module):
    """In a batch of more than four it does something else."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x)
        return found if len(x) <= 4 else 2 * found


class Loop(ByLength):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.layer(row) for row in x])


@pytest.mark.parametrize("kind", [ByLength, Loop])
def test_a_module_never_sees_more_than_one_example_in_a_private_step(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    module, y = kind(), torch.arange(12) % 3
    x = rows(12, torch.Generator().manual_seed(0))
    made, model = traced(module, Examples(x, y)), FlatModel(module)
    theta = model.flatten()
    assert torch.allclose(
        torch.cat(list(made.rows(theta, x, y, None))), model.per_example_gradients(theta, x, y), atol=1e-6
    )
    # Where nothing is private it sees the batch, and what it does there has no graph for every size.
    assert torch.allclose(made.mean(theta, x, y), model.gradient(theta, x, y), atol=1e-6)


def test_modes_are_those_of_when_it_was_made() -> None:
    module, like = transformer(dropout=0.5), data("transformer", 3)
    theta, seeds = FlatModel(module).flatten(), torch.arange(3)
    module.eval()
    quiet = traced(module, like)
    module.train()
    drawing = traced(module, like)
    assert not quiet.draws
    assert drawing.draws
    wanted = FlatModel(module.eval()).per_example_gradients(theta, *like)
    module.train()
    assert torch.allclose(torch.cat(list(quiet.rows(theta, *like, None))), wanted, atol=1e-5)
    assert torch.allclose(quiet.mean(theta, *like), wanted.mean(0), atol=1e-5)
    module.eval()
    drawn = torch.cat(list(drawing.rows(theta, (like.x, seeds), like.y, None)))
    assert not torch.allclose(drawn, wanted, atol=1e-3)


def test_what_is_drawn_is_of_the_seed_and_differs_between_examples() -> None:
    module = nn.Sequential(nn.Linear(8, 40), nn.Dropout(0.25), nn.Linear(40, 3))
    x, y = torch.ones(300, 8), torch.zeros(300, dtype=torch.int64)
    made, theta = traced(module, Examples(x, y)), FlatModel(module).flatten()
    coordinates = torch.arange(320, 360)  # the first layer's biases: zero where their unit is dropped
    first, again, other = (
        torch.cat(list(made.rows(theta, (x, torch.full((300,), seed)), y, coordinates))) for seed in (5, 5, 6)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    dropped = first == 0
    assert len(dropped.unique(dim=0)) > 290
    assert float(dropped.double().mean()) == pytest.approx(0.25, abs=0.02)
    kept = FlatModel(module.eval()).per_example_gradients(theta, x[:1], y[:1])[0, coordinates]
    assert kept.abs().min() > 0
    with pytest.raises(TypeError, match="inputs and seeds"):
        list(made.rows(theta, x, y, None))


def test_frozen_parameters_are_read_where_they_lie() -> None:
    """They are no copies: whoever loads others into the module trains with those."""
    module, (x, y) = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3)), data("MLP", 6)
    module[0].requires_grad_(False)
    made = traced(module, Examples(x, y))
    theta = FlatModel(module).flatten()
    with torch.no_grad():
        module[0].weight.mul_(-3)
    found = torch.cat(list(made.rows(theta, x, y, None)))
    assert torch.allclose(found, FlatModel(module).per_example_gradients(theta, x, y), atol=1e-6)


def test_what_fails_where_nothing_is_private_says_what_it_was() -> None:
    given = task("MLP", 1.0, steps=plain("fixed", 9, 3))
    bad = LocalTask(given.x, torch.full((RECORDS,), 7), None, 1.0, 0.1, given.steps, given.key)
    with pytest.raises(DataError, match="the model fails on these records"):
        engine("MLP").train(FlatModel(net("MLP")).flatten(), [bad])
