"""Attack: a server sends a θ whose logits are pure rounding error, so that one more record changes the *others*.

Features stand in θ twice, with opposite weights of 10⁹ behind them: in exact arithmetic all logits are 0, in floating
point they are what the order of a sum left over, some hundreds, and decide a gradient's direction. torch chooses that
order by the size of the batch. From 3 to 4 records the sum of clipped gradients moved by up to 4.0 C in the generic
engine, where the noise is made for 1.0 C.

The law that holds now: what a record adds is a function of that record, θ and public numbers alone, to the bit; in the
traced engine, of its place among them, too, which others have no part in. It holds on a CPU and on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from fedspa.engine.local import Engine, LocalTask
from fedspa.engine.native import NativeEngine, library
from fedspa.engine.native import supports as native_supports
from fedspa.engine.per_example import PerExampleEngine, float64_reference
from fedspa.engine.traced import TracedEngine, trace_engine
from fedspa.engine.traced.engine import repeatable
from fedspa.engine.traced.gpu_rounds import Draws, Rounds, _advance
from fedspa.engine.traced.gpu_stack import Columns, Stack
from fedspa.errors import ConfigError
from fedspa.examples import Examples, blank
from fedspa.learning.flat import FlatModel
from fedspa.learning.tasks import Classification
from fedspa.mechanisms.base import Clipping
from fedspa.mechanisms.clipping import clip_rows
from fedspa.mechanisms.gaussian.plan import GaussianPlan

CLASSES, RECORDS = 3, 70
Case = tuple[nn.Module, Tensor]  # the model with its cancelling θ inside, and records


def opposite(head: nn.Linear, generator: torch.Generator) -> None:
    """The head's weights for features that come twice, first half and second."""
    half = 1e9 * torch.randn(CLASSES, head.in_features // 2, generator=generator)
    head.weight.data, head.bias.data = torch.cat([half, -half], 1), torch.zeros(CLASSES)


def twice(*parameters: Tensor) -> None:
    """The second half of each along its first dimension becomes the first."""
    for values in parameters:
        values.data[len(values) // 2 :] = values.data[: len(values) // 2]


def linear(g: torch.Generator) -> Case:
    net, half = nn.Sequential(nn.Linear(200, CLASSES)), torch.randn(RECORDS, 100, generator=g)
    opposite(net[0], g)
    return net, torch.cat([half, half], 1)


def mlp(width: int, hidden: int) -> Callable[[torch.Generator], Case]:
    def make(g: torch.Generator) -> Case:
        net = nn.Sequential(nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, CLASSES))
        twice(net[0].weight, net[0].bias)
        opposite(net[2], g)
        return net, torch.randn(RECORDS, width, generator=g)

    return make


def cnn(g: torch.Generator) -> Case:
    net = nn.Sequential(
        nn.Conv2d(1, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * 36, CLASSES)
    )  # fmt: skip
    twice(net[0].weight, net[0].bias)
    opposite(net[4], g)
    return net, torch.randn(RECORDS, 1, 16, 16, generator=g)


def group_norm(g: torch.Generator) -> Case:
    net = nn.Sequential(nn.Conv2d(2, 12, 3), nn.GroupNorm(4, 12), nn.ReLU(), nn.Flatten(), nn.Linear(12 * 36, CLASSES))
    twice(net[0].weight, net[0].bias)
    opposite(net[4], g)
    return net, torch.randn(RECORDS, 2, 8, 8, generator=g)


class Twice(nn.Module):
    """A body whose features the head sees twice."""

    def __init__(self, features: int, *layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(layers), nn.Linear(2 * features, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        f = self.features(x)
        logits: Tensor = self.head(torch.cat([f, f], 1))
        return logits

    def features(self, x: Tensor) -> Tensor:
        words, mixed = self.layers
        x = words(x.long())
        if isinstance(mixed, nn.RNNBase):
            return mixed(x)[0].flatten(1)  # type: ignore[no-any-return]
        return (x + mixed(x, x, x, need_weights=False)[0]).flatten(1)


def embedding(g: torch.Generator) -> Case:
    net = nn.Sequential(nn.Embedding(20, 12), nn.Flatten(), nn.Linear(12 * 16, CLASSES))
    opposite(net[2], g)
    tokens = torch.randint(20, (RECORDS, 8), generator=g)
    return net, torch.cat([tokens, tokens], 1)


def attention(g: torch.Generator) -> Case:
    net = Twice(96, nn.Embedding(20, 12), nn.MultiheadAttention(12, 3, batch_first=True))
    opposite(net.head, g)
    return net, torch.randint(20, (RECORDS, 8), generator=g).float()


def lstm(g: torch.Generator) -> Case:
    net = Twice(96, nn.Embedding(20, 12), nn.LSTM(12, 12, batch_first=True))
    opposite(net.head, g)
    return net, torch.randint(20, (RECORDS, 8), generator=g).float()


def gru(g: torch.Generator) -> Case:
    net = Twice(192, nn.Embedding(20, 12), nn.GRU(12, 12, num_layers=2, bidirectional=True, batch_first=True))
    opposite(net.head, g)
    return net, torch.randint(20, (RECORDS, 8), generator=g).float()


CASES: dict[str, Callable[[torch.Generator], Case]] = {
    "linear": linear,
    "mlp 20-200": mlp(20, 200),
    "mlp 784-32": mlp(784, 32),
    "mlp 64-512": mlp(64, 512),
    "cnn": cnn,
    "GroupNorm": group_norm,
    "Embedding": embedding,
    "attention": attention,
    "LSTM": lstm,
    "GRU": gru,
}


def case(name: str, seed: int = 0) -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    """Model, θ, records, labels."""
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net, x = CASES[name](generator)
    return net, FlatModel(net).flatten(), x, torch.randint(CLASSES, (RECORDS,), generator=generator)


def separating(net: nn.Module, x: Tensor) -> Iterator[Engine]:
    """The engines that can run this here."""
    shape = tuple(x.shape[1:])
    yield PerExampleEngine(net)
    yield float64_reference(net)
    if library.library() is not None and native_supports(net, shape) is None:
        for level in library.LEVELS:
            yield NativeEngine(net, 1, level)


def clipped(engine: Engine, theta: Tensor, x: Tensor, y: Tensor, clip: Clipping) -> Tensor:
    """What the records add, a row each; the native engine has no rows: there, the sum of all."""
    if isinstance(engine, NativeEngine):
        return engine.clipped_sum(theta, x, y, clip, 1.0)[0]
    assert engine.gives_rows
    theta = theta.double() if engine.name == "reference" else theta
    return torch.cat([clip_rows(rows, clip, 1.0) for rows in engine.rows(theta, x, y, None)])


def bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("clip", ["l2", "coordinate"])
def test_what_a_record_adds_is_its_own_to_the_bit(name: str, clip: Clipping) -> None:
    net, theta, x, y = case(name)
    records, (all_x, all_y) = 40, (x, y)
    x, y = x[:records], y[:records]
    generator = torch.Generator().manual_seed(1)
    shuffled = torch.randperm(records, generator=generator)
    companies = [torch.arange(n) for n in (2, 3, 4, 5, 8, 16, 17, 33, records)]
    companies += [shuffled, shuffled.flip(0), torch.tensor([7] * 9), torch.tensor([3, 7, 3, 7, 5])]
    broken = x.clone()
    broken[:: records // 5] = math.nan if name not in ("Embedding", "attention", "LSTM", "GRU") else 19
    for engine in separating(net, x):
        assert engine.separates_records
        alone = torch.stack(
            [clipped(engine, theta, x[i : i + 1], y[i : i + 1], clip).flatten() for i in range(records)]
        )
        for company in companies:
            together = clipped(engine, theta, x[company], y[company], clip)
            wanted = alone[company].sum(0) if isinstance(engine, NativeEngine) else alone[company]
            assert torch.equal(bits(together), bits(wanted)), (engine.name, len(company))
        with threads(2):
            assert torch.equal(bits(clipped(engine, theta, x, y, clip)), bits(together_of(engine, alone))), engine.name
        # Whatever the others are: others that count as zero, or others altogether, in a company of more than 64.
        mixed = clipped(engine, theta, broken, y, clip)
        if not isinstance(engine, NativeEngine):
            assert torch.equal(bits(clipped(engine, theta, all_x, all_y, clip)[:records]), bits(alone)), engine.name
            kept = torch.arange(records) % (records // 5) != 0
            assert torch.equal(bits(mixed[kept]), bits(alone[kept])), engine.name


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("clip", ["l2", "coordinate"])
def test_what_a_record_adds_at_its_place_is_its_own_to_the_bit(name: str, clip: Clipping) -> None:
    """In the traced engine, in batches of one size: whoever has the other places, and whether anybody has."""
    net, theta, x, y = case(name)
    engine = trace_engine(net, Examples(x[:1], y[:1]), None, 1)
    assert isinstance(engine, TracedEngine)
    assert engine.separates_records
    generator = torch.Generator().manual_seed(1)
    for size in (1, 2, 3, 4, 9, 33):
        places = torch.randperm(size, generator=generator)
        rows = clipped(engine, theta, x[places], y[places], clip)
        for turn in range(3):
            kept = torch.rand(size, generator=generator) < 0.5
            others = torch.where(kept, places, torch.randint(RECORDS, (size,), generator=generator))
            company = x[others].clone()
            if turn == 2:
                company[~kept] = math.nan if x.is_floating_point() else 10**9
            with threads(1 + turn):
                (block,) = engine.parts(theta, company, y[others], None, kept)
                found = clip_rows(block.rows(), clip, 1.0)
            assert torch.equal(bits(found), bits(rows[kept])), size


def together_of(engine: Engine, alone: Tensor) -> Tensor:
    return alone.sum(0) if isinstance(engine, NativeEngine) else alone


def moved(engine: Engine, theta: Tensor, x: Tensor, y: Tensor, clip: Clipping) -> Tensor:
    """The sum of clipped gradients (bound 1) behind one noiseless step of the engine, through `train` itself."""
    d, n = len(theta), len(y)
    plan = GaussianPlan(d, d, clip, 1.0, "fixed", n, n, 1, 1, 1e-9, "replace-one", 1e-3)
    step = 2.0**24 * max(float(theta.abs().max()), 1.0)  # so long that θ's rounding is nothing beside it
    task = LocalTask(x, y, None, 1.0, step, plan, bytes(32))
    [result] = engine.train(theta, [task])
    return result.delta.double().cpu() * -n / step


def bound_holds(engine: Engine, theta: Tensor, x: Tensor, y: Tensor, clip: Clipping, sizes: list[int]) -> None:
    for n in sizes:
        difference = moved(engine, theta, x[: n + 1], y[: n + 1], clip) - moved(engine, theta, x[:n], y[:n], clip)
        size = float(difference.norm() if clip == "l2" else difference.abs().max())
        assert size <= 1.001, (engine.name, n, size)


@pytest.mark.parametrize("name", ["mlp 20-200", "mlp 784-32", "cnn", "Embedding"])
@pytest.mark.parametrize("clip", ["l2", "coordinate"])
def test_one_more_record_moves_a_step_by_no_more_than_the_bound(name: str, clip: Clipping) -> None:
    net, theta, x, y = case(name)
    for engine in separating(net, x):
        bound_holds(engine, theta, x, y, clip, [1, 2, 3, 4, 7, 15, 16])


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", range(5))
def test_many_sizes_and_seeds(name: str, seed: int) -> None:
    net, theta, x, y = case(name, seed)
    for engine in separating(net, x):
        bound_holds(engine, theta, x, y, "l2", list(range(1, RECORDS)))


WORDS = ("Embedding", "attention", "LSTM", "GRU")


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("clip", ["l2", "coordinate"])
@pytest.mark.parametrize("tf32", [False, True])
def test_on_a_gpu_what_a_record_adds_at_its_place_is_its_own_to_the_bit(name: str, clip: Clipping, tf32: bool) -> None:
    """The rows that the kernels make and the factors that they clip with, in batches of one size, whoever has the
    other places: nobody, records without a finite gradient, or with labels and tokens that are none."""
    net, theta, x, y = case(name)
    device = torch.device("cuda")
    engine = trace_engine(net.to(device), Examples(x[:1], y[:1]), None, 1, device, tf32=tf32)
    assert isinstance(engine, TracedEngine)
    assert engine.separates_records
    d, generator = len(theta), torch.Generator().manual_seed(1)
    for size in (4, 12, 36):
        chosen = torch.randperm(size, generator=generator)
        mask = torch.randperm(d, generator=generator)[: d // 3].sort().values
        plan = GaussianPlan(d, len(mask), clip, 1.0, "fixed", size, size, 1, 1, 1e-9, "replace-one", 1e-3)
        for turn in range(4):
            own, labels = x[chosen].clone(), y[chosen].clone()
            kept = torch.ones(size, dtype=torch.bool) if not turn else torch.rand(size, generator=generator) < 0.5
            if turn == 1:
                own[~kept] = x[torch.randint(RECORDS, (int((~kept).sum()),), generator=generator)]
            elif turn == 2:
                own[~kept] = 10.0**6 if name in WORDS else math.nan
            elif turn == 3:
                own[~kept] = -1 if name in WORDS else math.inf
                labels[~kept] = 77
            task = LocalTask(own, labels, mask, 1.0, 1.0, plan, bytes(32))
            rows, factors = watched(engine, theta.to(device), task)
            places = torch.as_tensor(Draws(task).whole().records)
            there = kept[places]
            if not turn:
                first = rows, factors
            for found, wanted in zip((rows, factors), first):
                assert torch.equal(bits(found[there]), bits(wanted[there])), (size, turn)
            if turn > 1:
                assert (factors[~there] == 0).all()


def watched(engine: TracedEngine, theta: Tensor, task: LocalTask) -> tuple[Tensor, Tensor]:
    """The rows of a step's places, and their factors, as the kernels made them."""
    found: list[Tensor] = []
    rounds = Rounds(engine._trace_agents, engine._like, len(theta), theta.device)
    with repeatable(theta.device, engine.tf32):
        stack = rounds._new(("kept",), [task], 1, len(task.y))
        add = stack._work.add

        def keeping(columns: Columns, rows: Tensor, factors: Tensor, more: bool) -> None:
            used = int(columns.ends[0])
            found.extend([rows[0, :, :used].clone(), factors[0].clone()])
            found.extend(each.values[0].flatten(1).clone() for each in stack._tokens.values())
            add(columns, rows, factors, more)

        stack._work.add = keeping
        stack.load(theta, [engine._moved(task)])
        stack._graph = lambda places: NoGraph(stack, places)
        _advance(stack, 0, [Draws(task).whole()])
    rows, factors, *tokens = (each.cpu() for each in found)
    return torch.cat([rows, *tokens], 1), factors


class NoGraph:
    def __init__(self, stack: Stack, places: int) -> None:
        self._stack, self._places = stack, places

    def replay(self) -> None:
        self._stack._one_step(self._places)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("clip", ["l2", "coordinate"])
def test_on_a_gpu_one_record_moves_a_step_by_no_more_than_the_bound(name: str, clip: Clipping) -> None:
    """Poisson sampling, in which a record's neighbour is an empty place: of one record less, and of one that is NaN."""
    net, theta, x, y = case(name)
    device = torch.device("cuda")
    engine = trace_engine(net.to(device), Examples(x[:1], y[:1]), None, 1, device)
    assert isinstance(engine, TracedEngine)
    for n in (3, 8, 33):
        whole = moved(engine, theta.to(device), x[:n], y[:n], clip)
        broken = y[:n].clone()
        broken[1] = 77
        difference = whole - moved(engine, theta.to(device), x[:n], broken, clip)
        assert float(difference.norm() if clip == "l2" else difference.abs().max()) <= 1.001, n


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mlp 20-200", "cnn", "attention", "LSTM"])
def test_the_generic_engine_on_a_gpu_promises_nothing_of_the_kind(name: str) -> None:
    net, theta, x, y = case(name)
    engine = PerExampleEngine(net.cuda())
    assert not engine.separates_records
    assert torch.cat(list(engine.rows(theta.cuda(), x.cuda(), y.cuda(), None))).shape == (RECORDS, len(theta))


def test_a_site_takes_no_engine_that_does_not_keep_records_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = pytest.importorskip("fedspa.flower.trainer")
    asked = ("logistic", blank((4,)), Classification(2), None, "generic", 1, False)
    trainer._TRAINERS.clear()
    assert trainer.trainer_for(*asked).engine.name == "generic"
    trainer._TRAINERS.clear()
    monkeypatch.setattr(PerExampleEngine, "separates_records", False)
    with pytest.raises(ConfigError, match=r"'generic' does not keep records apart"):
        trainer.trainer_for(*asked)
    trainer._TRAINERS.clear()
