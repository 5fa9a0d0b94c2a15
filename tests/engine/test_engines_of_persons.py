"""Persons on the engines that take several at a time: the native one, record after record, and the traced one, which
fills each up to c records.

The law: what a person contributes is a function of that person, θ and public numbers (and on the traced engine its
slot), to the bit; neither of who else is there, nor of how many records they have, nor of what lies in slots that no
record has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hard_records import cancelling
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from native_nets import nets
from native_nets import records as away_from_kinks
from torch import Tensor, nn
from traced_nets import NETS, data, net

from fedspa.data.dataset import blank_person, grouped
from fedspa.engine import local
from fedspa.engine.choose import EngineRequest, decide
from fedspa.engine.local import LocalTask
from fedspa.engine.native import NativeEngine, library
from fedspa.engine.per_example import float64_reference
from fedspa.engine.traced import TracedEngine
from fedspa.engine.traced import engine as traced_engine
from fedspa.engine.traced.capture import Untraceable
from fedspa.errors import ConfigError, DataError
from fedspa.examples import MOST_SLOTS, Examples, blank, mapped, taken
from fedspa.learning.agreement import same_bits
from fedspa.learning.flat import FlatModel
from fedspa.learning.tasks import Classification, CustomLoss, MultiLabel, PerPerson, Regression, Task
from fedspa.mechanisms.base import NoPlan
from fedspa.mechanisms.gaussian.plan import GaussianPlan
from fedspa.randomness.streams import derive_key

SLOTS, COUNTS = 5, (2, 5, 1, 3, 4, 1, 5, 2, 3)
WHOLE = {-1.0: -1, 1.0: 1}  # what stands for a value among whole numbers
PERSONS = np.repeat(np.arange(len(COUNTS)), COUNTS)


def people(records: Examples, most: int = SLOTS) -> Examples:
    return grouped(*records, PERSONS, most, np.arange(len(PERSONS), dtype=np.uint64))


def engine_of(module: nn.Module, records: Examples, task: Task, most: int = SLOTS) -> TracedEngine:
    one = Examples(*(taken(tree, slice(0, 1)) for tree in records))
    return TracedEngine(module, blank_person(one, most), PerPerson(task))


def gradients(made: TracedEngine, theta: Tensor, examples: Examples) -> Tensor:
    return torch.cat(list(made.rows(theta, *examples, None)))


def near(found: Tensor, wanted: Tensor) -> bool:
    return bool(((found - wanted).norm(dim=1) <= 1e-4 * (wanted.norm(dim=1) + 1e-6)).all())


# Those of the reference count the words of all of a person's records together.
TOGETHER = "Embedding by frequency"


def test_a_layer_that_looks_at_several_records_is_refused() -> None:
    with pytest.raises(Untraceable, match="are not those of single ones"):
        engine_of(net(TOGETHER), data(TOGETHER, 1), Classification(3))


@pytest.mark.parametrize("name", sorted({*NETS} - {TOGETHER}))
def test_a_persons_gradient_is_that_of_the_reference(name: str) -> None:
    records, theta = data(name, len(PERSONS)), FlatModel(net(name)).flatten()
    task = Classification(3)
    found = gradients(engine_of(net(name), records, task), theta, people(records))
    wanted = torch.cat(list(float64_reference(net(name), PerPerson(task)).rows(theta, *people(records), None)))
    assert near(found.double(), wanted)


TASKS: list[tuple[Task, Callable[[int], Tensor]]] = [
    (Classification(3, weights=(0.2, 1.0, 3.0), label_smoothing=0.1), lambda n: torch.arange(n) % 3),
    (MultiLabel(3), lambda n: (torch.arange(3 * n).view(n, 3) % 4 == 0).float()),
    (Regression(3), lambda n: torch.randn(n, 3, generator=torch.Generator().manual_seed(2))),
]


@pytest.mark.parametrize(("task", "targets"), TASKS, ids=[task.name for task, _ in TASKS])
@pytest.mark.parametrize("clip", ["l2", "coordinate"])
def test_a_training_is_that_of_the_reference(task: Task, targets: Callable[[int], Tensor], clip) -> None:
    records = Examples(data("MLP", len(PERSONS)).x, targets(len(PERSONS)))
    module, persons = net("MLP"), people(records)
    theta = FlatModel(module).flatten()
    mask = torch.arange(0, len(theta), 3)
    plan = GaussianPlan(
        len(theta), len(mask), clip, 0.3, "poisson", 4, len(COUNTS), 6, 1, 1e-6, "add-remove", 1e-3
    )  # fmt: skip
    step = LocalTask(*persons, mask, 3.0, 0.1, plan, bytes(32))
    (found,) = engine_of(module, records, task).train(theta, [step])
    (wanted,) = float64_reference(module, PerPerson(task)).train(theta, [step])
    assert torch.allclose(found.delta.double(), wanted.delta, rtol=1e-3, atol=1e-6)


def with_records(persons: Examples, chosen: Tensor, value: float) -> Examples:
    """The same, but for the records at the chosen slots."""
    assert isinstance(persons.x, dict)

    def spoilt(leaf: Tensor) -> Tensor:
        if leaf.dtype == torch.bool:
            return leaf
        where = chosen.view(*chosen.shape, *[1] * (leaf.ndim - 2))
        return leaf.masked_fill(where, value if leaf.is_floating_point() else WHOLE.get(value, 2**62))

    return Examples({**persons.x, "records": mapped(spoilt, persons.x["records"])}, mapped(spoilt, persons.y))


def filled(persons: Examples, most: int) -> Examples:
    """With as many slots, of which the last ones hold no record."""

    def wider(leaf: Tensor) -> Tensor:
        return leaf[:, torch.arange(most).clamp(max=leaf.shape[1] - 1)].clone()

    assert isinstance(persons.x, dict)
    return Examples({**persons.x, "records": mapped(wider, persons.x["records"])}, mapped(wider, persons.y))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 3e38, -1.0])
@pytest.mark.parametrize("name", ["residual", "pooled", "transformer", "dict", "tied"])
def test_what_lies_in_a_slot_without_a_record_is_in_no_bit(name: str, value: float) -> None:
    records, theta = data(name, len(PERSONS)), FlatModel(net(name)).flatten()
    made = engine_of(net(name), records, Classification(3), SLOTS + 2)
    persons = people(records, SLOTS + 2)
    expected = gradients(made, theta, persons)
    assert expected.isfinite().all()
    wide = filled(persons, SLOTS + 2)
    assert same_bits(gradients(made, theta, wide), expected)
    empty = torch.arange(SLOTS + 2) >= torch.tensor(COUNTS).unsqueeze(1)
    assert same_bits(gradients(made, theta, with_records(wide, empty, value)), expected)


@pytest.mark.parametrize("name", ["residual", "pooled", "transformer", "dict", "tied"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, 3e38, -1.0])
def test_a_person_is_in_no_bit_of_another(name: str, value: float) -> None:
    """However its records look, and however many it has."""
    records, theta = data(name, len(PERSONS)), FlatModel(net(name)).flatten()
    made, persons = engine_of(net(name), records, Classification(3)), people(records)
    expected = gradients(made, theta, persons)
    for place in (0, 4, len(COUNTS) - 1):
        others = torch.arange(len(COUNTS)) != place
        found = gradients(made, theta, with_records(persons, ~others.unsqueeze(1).expand(-1, SLOTS), value))
        assert same_bits(found[others], expected[others])
        for number in (0, 1, SLOTS):  # 0: an empty slot under Poisson sampling
            assert isinstance(persons.x, dict)
            assert isinstance(persons.x["count"], Tensor)
            counts = persons.x["count"].clone()
            counts[place] = number
            found = gradients(made, theta, Examples({**persons.x, "count": counts}, persons.y))
            assert same_bits(found[others], expected[others])


def rounding_only() -> tuple[nn.Module, Tensor, Examples]:
    """A θ under which logits are nothing but the order of a sum: features stand in it twice, with opposite weights."""
    generator = torch.Generator().manual_seed(0)
    module = nn.Sequential(nn.Linear(20, 200), nn.Tanh(), nn.Linear(200, 3))
    first, half = (torch.randn(*shape, generator=generator) for shape in ((100, 20), (3, 100)))
    parts = (first, first, torch.zeros(200), 1e9 * torch.cat([half, -half], 1), torch.zeros(3))
    x = torch.randn(len(PERSONS), 20, generator=generator)
    return module, torch.cat([part.flatten() for part in parts]), Examples(x, torch.arange(len(PERSONS)) % 3)


@pytest.mark.parametrize("most", [SLOTS, SLOTS + 3])
def test_under_a_cancelling_theta_too(most: int) -> None:
    module, theta, records = rounding_only()
    made, persons = engine_of(module, records, Classification(3), most), people(records, most)
    expected = gradients(made, theta, persons)
    assert float(expected.abs().max()) > 1e6  # nothing but rounding, and large
    for place in range(len(COUNTS)):
        others = torch.arange(len(COUNTS)) != place
        for value in (torch.nan, 1.0, 1e30):
            chosen = ~others.unsqueeze(1).expand(-1, SLOTS)
            assert same_bits(gradients(made, theta, with_records(persons, chosen, value))[others], expected[others])
        gone = Examples(*(mapped(lambda leaf: zero_at(leaf, place), tree) for tree in persons))  # noqa: B023
        assert same_bits(gradients(made, theta, gone)[others], expected[others])


def zero_at(leaf: Tensor, place: int) -> Tensor:
    leaf = leaf.clone()
    leaf[place] = 0
    return leaf


def test_without_a_person_the_others_keep_their_slots_and_every_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a site that names `max_records`, under a cancelling θ; fewer persons may need fewer slots for records."""
    module, theta, records = rounding_only()
    made, persons = engine_of(module, records, Classification(3)), len(COUNTS)
    d, length, deal, found = len(theta), 2.0**24 * float(theta.abs().max()), local.assign_slots, []
    plan = GaussianPlan(d, d, "l2", 1.0, "poisson", 4, persons, 1, 1, 1e-9, "add-remove", 1e-3)

    def step(missing: int | None, key: bytes) -> Tensor:
        def dealt(_: int, count: int, key: bytes) -> Any:
            return deal(persons, count, key) if missing is None else np.delete(deal(persons, count, key), missing)

        monkeypatch.setattr(local, "assign_slots", dealt)
        kept = missing != PERSONS
        held = [taken(tree, torch.from_numpy(kept)) for tree in records]
        own = grouped(*held, PERSONS[kept], SLOTS, np.arange(len(PERSONS), dtype=np.uint64)[kept])
        task = LocalTask(*own, None, 1.0, length, plan, key, max_records=16)
        return made.train(theta, [task])[0].delta.double() * -plan.batch / length

    for number in range(40):
        key = derive_key(bytes(32), f"step {number}")
        found.append(float((step(None, key) - step(number % persons, key)).norm()))
    assert min(found) == 0  # was not drawn
    assert 0.999 < max(found) <= 1


@pytest.mark.parametrize("name", ["residual", "transformer"])
def test_one_record_that_cannot_be_taken_costs_its_person_and_nobody_else(name: str) -> None:
    records, theta = data(name, len(PERSONS)), FlatModel(net(name)).flatten()
    made, persons = engine_of(net(name), records, Classification(3)), people(records)
    for value, target in ((torch.nan, None), (None, -1), (None, 3)):
        spoilt = people(broken(records, row=4, value=value, target=target))
        blocks = list(made.parts(theta, *spoilt, None, None))
        assert sum(block.count_not_finite() for block in blocks) == 1
        assert same_bits(torch.cat([block.rows() for block in blocks])[2:], gradients(made, theta, persons)[2:])


def broken(records: Examples, row: int, value: float | None, target: int | None) -> Examples:
    assert isinstance(records.x, Tensor)
    assert isinstance(records.y, Tensor)
    x, y = records.x.clone(), records.y.clone()
    if value is not None:
        x[row] = value if x.is_floating_point() else -1
    if target is not None:
        y[row] = target
    return Examples(x, y)


def test_blocks_follow_from_public_numbers_and_hold_all_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor of the program holds the values of c records: with more of them fewer persons are taken together."""
    records, theta = data("residual", len(PERSONS)), FlatModel(net("residual")).flatten()
    few, many = (engine_of(net("residual"), records, Classification(3), most) for most in (1, 50))
    assert many._program.largest == 50 * few._program.largest
    monkeypatch.setattr(traced_engine, "BLOCK_BUDGET", 4 * 50 * few._program.largest * 5)
    sizes = [len(index) for index, _ in many._blocks(9, len(theta))]
    assert sizes == [8, 8] or max(sizes) <= 5
    assert near(
        gradients(many, theta, people(records, 50)).double(),
        torch.cat(
            list(float64_reference(net("residual"), PerPerson(Classification(3))).rows(theta, *people(records), None))
        ),
    )


# The native engine adds whole numbers, of which the law can be read off.
native = pytest.mark.skipif(library.library() is None, reason="the compiled part is not built")
LEVELS = [pytest.param(level, marks=native) for level in library.LEVELS]


def chain(kind: str) -> tuple[nn.Sequential, Examples]:
    """Nets by each way that the engine adds gradients up, and a θ of which one makes sums cancel."""
    generator = torch.Generator().manual_seed(0)
    if kind == "cancelling":
        module, theta, records = rounding_only()
        FlatModel(module).load(theta)
        return module, records
    layers: dict[str, tuple[tuple[int, ...], list[nn.Module]]] = {
        "linear": ((9,), [nn.Linear(9, 12), nn.ReLU(), nn.Linear(12, 3)]),
        "conv": ((2, 8, 8), [nn.Conv2d(2, 18, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(162, 3)]),
        "five wide": ((1, 12, 12), [nn.Conv2d(1, 6, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(96, 3)]),
    }
    shape, made = layers[kind]
    module = nn.Sequential(*made)
    with torch.no_grad():
        for values in module.parameters():
            values.copy_(torch.randn(values.shape, generator=generator) / values[0].numel() ** 0.5)
    x = torch.randn(len(PERSONS), *shape, generator=generator)
    return module, Examples(x, torch.randint(3, (len(PERSONS),), generator=generator))


CHAINS = ["linear", "conv", "five wide", "cancelling"]
MASKS = {"all": lambda d: None, "some": lambda d: torch.arange(0, d, 3)}


@pytest.mark.parametrize("kind", CHAINS)
@pytest.mark.parametrize("clip", ["l2", "coordinate"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("level", LEVELS)
def test_in_whole_units_a_person_adds_the_same_in_any_company(level, mask: str, clip, kind: str) -> None:
    """Also behind others without bounds, who count as zero, and with anything in the slots that no record has."""
    module, records = chain(kind)
    theta, persons = FlatModel(module).flatten(), people(records)
    engine, chosen = NativeEngine(module, 1, level), MASKS[mask](len(theta))

    def units(examples: Examples, rows: Tensor) -> tuple[Tensor, int]:
        return engine.clipped_sum(theta, *examples, clip, 0.3, chosen, rows)

    everyone = torch.arange(len(COUNTS))
    whole, zeroed = units(persons, everyone)
    assert zeroed == 0
    empty = torch.arange(SLOTS) >= torch.tensor(COUNTS).unsqueeze(1)
    for value in (torch.nan, torch.inf, -1.0):
        assert torch.equal(units(with_records(persons, empty, value), everyone)[0], whole)
    assert torch.equal(units(filled(persons, SLOTS + 3), everyone)[0], whole)
    for place in range(len(COUNTS)):
        others, own = everyone[everyone != place], everyone[place : place + 1]
        added = units(persons, own)[0]
        assert torch.equal(whole - units(persons, others)[0], added)
        assert torch.equal(units(Examples(*(taken(tree, own) for tree in persons)), torch.zeros(1).long())[0], added)
        for value in (torch.nan, torch.inf):
            one_record = torch.zeros(len(COUNTS), SLOTS, dtype=torch.bool)
            one_record[place, COUNTS[place] - 1] = True
            spoilt, zeroed = units(with_records(persons, one_record, value), everyone)
            assert (zeroed, torch.equal(spoilt, whole - added)) == (1, True)


@pytest.mark.parametrize("kind", CHAINS[:3])
@pytest.mark.parametrize("clip", ["l2", "coordinate", None])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("level", LEVELS)
def test_a_native_training_is_that_of_the_reference(level, mask: str, clip, kind: str) -> None:
    module, records = chain(kind)
    theta, persons, task = FlatModel(module).flatten(), people(records), PerPerson(Classification(3))
    d, chosen = len(theta), MASKS[mask](len(theta))
    k = d if chosen is None else len(chosen)
    plan = (
        GaussianPlan(d, k, clip, 0.2, "poisson", 4, len(COUNTS), 6, 1, 1e-6, "add-remove", 1e-3)
        if clip
        else NoPlan(d, k, "poisson", 4, 6)
    )
    rows = torch.tensor([8, 0, 3, 4, 1, 7, 5, 2, 6])
    step = LocalTask(*persons, chosen, 3.0, 0.1, plan, bytes(32), rows=rows)
    (found,), (wanted,) = (
        made.train(theta, [step]) for made in (NativeEngine(module, 1, level), float64_reference(module, task))
    )
    assert torch.allclose(found.delta.double(), wanted.delta, rtol=1e-3, atol=1e-6)


@native
@settings(max_examples=60, deadline=None)
@given(net=nets(), most=st.sampled_from([1, 3, 20, 64]), seed=st.integers(0, 2**20))
def test_persons_of_any_net_are_those_of_the_reference(net, most: int, seed: int) -> None:
    """Some of them with more records than the engine would take at a time."""
    module, shape = net
    generator = np.random.default_rng(seed)
    x, y = away_from_kinks(module, shape, 3 * most + 8, seed)
    whose = np.sort(generator.integers(0, 5, len(y)))
    whose[:most] = 0
    persons = grouped(x, y, np.sort(whose), most, generator.integers(0, 2**60, len(y)).astype(np.uint64))
    reference, theta = float64_reference(module, PerPerson(Classification())), FlatModel(module).flatten()
    rows = torch.cat(list(reference.rows(theta, *persons, None)))
    bound = 0.5 * float(rows.norm(dim=1).max())
    assume(bound > 1e-4)
    units, zeroed = NativeEngine(module, 1).clipped_sum(theta, *persons, "l2", bound)
    wanted = (rows * (bound / rows.norm(dim=1, keepdim=True)).clamp(max=1)).sum(0)
    assert zeroed == 0
    assert float((units.double() / 2**24 * bound - wanted).norm()) <= 1e-3 * bound


@native
def test_a_person_without_records_is_an_error() -> None:
    module, records = chain("linear")
    x, y = people(records)
    assert isinstance(x, dict)
    for number in (0, -1, SLOTS + 1):
        counts = torch.full((len(COUNTS),), number)
        with pytest.raises(DataError, match="a person has no record, or more than there are slots"):
            NativeEngine(module, 1).clipped_sum(FlatModel(module).flatten(), {**x, "count": counts}, y, "l2", 1.0)


@native
@pytest.mark.parametrize("size", [1.0, 1e6])
@pytest.mark.parametrize("level", library.LEVELS)
def test_records_that_cancel_each_other_are_clipped(level, size: float) -> None:
    """A person whose records' gradients add up to rounding: what is added has the norm that was measured."""
    module, theta, record, _ = cancelling(12, 3, 2, size, seed=1)
    records = torch.cat([record * scale for scale in (1.0, -1.0, 1.0)])
    x = {"records": records.unsqueeze(0), "count": torch.tensor([3])}
    y = torch.tensor([[0, 0, 1]])
    units, zeroed = NativeEngine(module, 1, level).clipped_sum(theta, x, y, "l2", 1e-6)
    assert zeroed == 0
    assert 0 < float(units.double().norm()) <= 2**24


def own(module: nn.Module, example: tuple[Tensor, Tensor]) -> Tensor:
    loss: Tensor = nn.functional.cross_entropy(module(example[0]), example[1])
    return loss


def test_which_persons_it_takes() -> None:
    module = nn.Sequential(nn.Linear(4, 3))

    def why(most: int, task: Task = Classification(3), *, forced: bool = False) -> str:  # noqa: B008
        like = blank_person(blank((4,)), most)
        return decide(
            EngineRequest("traced" if forced else "auto", module, like, "cpu", 1, False, task=PerPerson(task))
        ).why

    too_many = "it takes up to 64 records of a person, and data.person_records is higher"
    assert why(MOST_SLOTS) == "the fastest that can run this model here"
    assert why(MOST_SLOTS + 1) == f"not native: {too_many}; not traced: {too_many}"
    assert "the task's own loss may see them together" in why(2, CustomLoss(own))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="'traced' is not possible here: it takes up to 64 records of a person"):
        why(100, forced=True)


class _Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(dim=0)


@pytest.mark.filterwarnings("ignore::fedspa.errors.MixingWarning")
def test_a_model_that_mixes_a_persons_records_is_left_to_the_engine_that_takes_them_together() -> None:
    like = blank_person(blank((4,)), 3)
    module, task = nn.Sequential(_Centred(), nn.Linear(4, 3)), PerPerson(Classification(3))
    choice = decide(EngineRequest("auto", module, like, "cpu", 1, False, task=task))
    assert choice.engine == "generic"
