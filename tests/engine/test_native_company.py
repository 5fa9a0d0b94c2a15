"""What one record adds is its own: no other record, and no order of the parameters, changes a unit of it."""

from __future__ import annotations

import pytest
import torch
from plain import plain
from torch import Tensor, nn

from fedspa.engine.local import LocalTask
from fedspa.engine.native import NativeEngine, library
from fedspa.engine.per_example import PerExampleEngine
from fedspa.errors import DataError
from fedspa.learning.flat import FlatModel
from fedspa.mechanisms.base import Clipping
from fedspa.mechanisms.gaussian.plan import GaussianPlan

pytestmark = pytest.mark.skipif(library.library() is None, reason="the compiled part is not built")


@pytest.mark.parametrize("level", library.LEVELS)
@pytest.mark.parametrize(("clip", "channels", "out", "count"), [("coordinate", 1, 8, 40), ("l2", 400, 256, 5)])
def test_a_records_part_is_the_same_in_any_company(
    level: library.Level, clip: Clipping, channels: int, out: int, count: int
) -> None:
    """In whole units. Of two pixels behind a ReLU one is alive in many records, which makes a product of a sum. Under
    l2 the convolution is too large for its gradients to be kept."""
    generator = torch.Generator().manual_seed(0)
    net = nn.Sequential(nn.Conv2d(channels, out, 3), nn.ReLU(), nn.Flatten(), nn.Linear(2 * out, 4))
    theta = torch.randn(FlatModel(net).dimension, generator=generator) / (9 * channels) ** 0.5
    x = torch.randn(count, channels, 4, 3, generator=generator)
    y = torch.randint(0, 4, (count,), generator=generator)
    engine = NativeEngine(net, 1, level)

    def units(index: Tensor) -> Tensor:
        return engine.clipped_sum(theta, x[index], y[index], clip, 0.3)[0]

    everyone = torch.arange(count)
    whole = units(everyone)
    for i in range(count):
        assert torch.equal(whole - units(everyone[everyone != i]), units(everyone[i : i + 1])), i


class HeadFirst(nn.Module):
    """Its parameters stand in another order than data passes them."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(12, classes)
        self.conv = nn.Conv2d(1, 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.flatten(torch.relu(self.conv(x)), 1))
        return logits


@pytest.mark.parametrize("level", library.LEVELS)
@pytest.mark.parametrize("clip", ["coordinate", "l2"])
@pytest.mark.parametrize("classes", [2, 7, 8, 16])
def test_parameters_in_another_order_move_once(level: library.Level, clip: Clipping, classes: int) -> None:
    """The convolution's first coordinate lies right behind the head's, which move in eights."""
    generator = torch.Generator().manual_seed(0)
    net = HeadFirst(classes)
    d = FlatModel(net).dimension
    theta = 0.3 * torch.randn(d, generator=generator)
    x, y = torch.randn(4, 1, 4, 4, generator=generator), torch.randint(0, classes, (4,), generator=generator)
    plan = GaussianPlan(d, d, clip, 0.1, "fixed", 4, 4, 1, 1, 1.0, "replace-one", 1e-3)
    task = LocalTask(x, y, None, 1.0, 1.0, plan, bytes(32))
    ours, theirs = (
        engine.train(theta, [task])[0].delta for engine in (NativeEngine(net, 1, level), PerExampleEngine(net))
    )
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("level", library.LEVELS)
@pytest.mark.parametrize("padding", [(0, 1), (1, 0)])
def test_pooling_that_is_padded_on_one_axis(level: library.Level, padding: tuple[int, int]) -> None:
    """Against autograd in float64; what it must not touch, the sanitizers see."""
    generator = torch.Generator().manual_seed(0)
    pool = nn.MaxPool2d((2, 2), (2, 2), padding)
    net = nn.Sequential(nn.Conv2d(1, 12, 3), nn.ReLU(), nn.Conv2d(12, 8, 3), pool, nn.ReLU(), nn.Flatten())
    net.append(nn.Linear(net(torch.zeros(1, 1, 12, 12)).shape[1], 4))
    model = FlatModel(net)
    theta = 0.3 * torch.randn(model.dimension, generator=generator)
    x, y = torch.randn(5, 1, 12, 12, generator=generator), torch.randint(0, 4, (5,), generator=generator)
    # A bound beyond every coordinate: the sum is the plain one.
    rows = torch.cat(list(PerExampleEngine(net).rows(theta, x, y, None)))
    bound = 2 * float(rows.abs().max())
    units, zeroed = NativeEngine(net, 1, level).clipped_sum(theta, x, y, "coordinate", bound)
    assert zeroed == 0
    assert torch.allclose(units.double() * bound / 2**24, rows.double().sum(dim=0), rtol=0, atol=1e-5 * bound)


@pytest.mark.parametrize("rows", [torch.tensor([True, False, True]), torch.tensor([0.0, 1.0]), torch.tensor([[0, 1]])])
def test_records_are_named_by_whole_numbers_in_one_line(rows: Tensor) -> None:
    net, records = nn.Sequential(nn.Linear(3, 2)), (torch.zeros(3, 3), torch.zeros(3, dtype=torch.int64))
    task = LocalTask(*records, None, 1.0, 0.1, plain("poisson", 1, 1), bytes(32), rows=rows)
    with pytest.raises(DataError, match="numbers"):
        NativeEngine(net, 1).train(torch.zeros(8), [task])
