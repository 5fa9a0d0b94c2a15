"""Attack: a person with fifty records, whose gradients all point the same way, pulls fifty times as hard as the clip.

Under the unit "record" that is what happens, and the ε that is stated is no promise to such a person. Under the unit
"person" all their records are one example: they move a release by no more than the bound on one, with every engine.
"""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedspa.data.dataset import blank_person, grouped
from fedspa.engine import EngineName
from fedspa.engine.choose import EngineRequest, choose
from fedspa.engine.local import Engine, LocalTask
from fedspa.examples import Examples, Tree, blank, count, leaves, taken
from fedspa.learning.flat import FlatModel
from fedspa.learning.tasks import Classification, PerPerson
from fedspa.mechanisms.base import Clipping
from fedspa.mechanisms.gaussian.plan import GaussianPlan
from fedspa.randomness.streams import Stream, derive_key

OTHERS, RECORDS, CLIP, RATE, MOST = 20, 50, 0.5, 0.1, 8
MANY = 60  # more than anyone has
ATTACKER = 7  # among the others' numbers, so that it stands in the middle
ENGINES = [name for name in get_args(EngineName) if name != "auto"]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))


def records() -> tuple[Tensor, Tensor, NDArray[np.int64]]:
    """Twenty people with one to five records each, and one with fifty that are all the same, huge and mislabelled."""
    rng = np.random.default_rng(0)
    people = np.array([person for person in range(OTHERS + 1) if person != ATTACKER])
    persons = np.concatenate([np.repeat(people, rng.integers(1, 6, OTHERS)), np.full(RECORDS, ATTACKER)])
    x, y = rng.normal(size=(len(persons), 5)), rng.integers(0, 3, len(persons))
    x[persons == ATTACKER], y[persons == ATTACKER] = 100.0, 2
    mixed = rng.permutation(len(persons))
    return torch.from_numpy(x[mixed]).float(), torch.from_numpy(y[mixed]), persons[mixed]


X, Y, PERSONS = records()
DRAWS = Stream(derive_key(bytes(32), "test")).uint64(len(PERSONS))


def released(engine: Engine, theta: Tensor, x: Tree, y: Tree, clip: Clipping, m: int) -> Tensor:
    """One step on everyone, with noise too small to see: Δ."""
    plan = GaussianPlan(len(theta), len(theta), clip, CLIP, "poisson", m, m, 1, 1, 1e-9, "add-remove", 1e-3)
    task = LocalTask(x, y, None, 1.0, RATE, plan, derive_key(bytes(32), "agent"))
    return engine.train(theta, [task])[0].delta.double()


def bound(clip: Clipping, dimension: int, m: int) -> float:
    """By how much one example moves Δ in L2."""
    return RATE * CLIP / m * (1 if clip == "l2" else dimension**0.5)


@pytest.mark.parametrize("clip", ["l2", "coordinate"])
@pytest.mark.parametrize("name", ENGINES)
def test_fifty_records_move_a_release_by_no_more_than_one_example(name: EngineName, clip: Clipping) -> None:
    module, like = net(), blank((5,))
    engine = choose(
        EngineRequest(name, module, blank_person(like, MOST), "cpu", 1, False, task=PerPerson(Classification(3)))
    )
    theta = FlatModel(module).flatten()
    rest = torch.from_numpy(PERSONS != ATTACKER)
    everyone = grouped(X, Y, PERSONS, MOST, DRAWS)
    others = grouped(X[rest], Y[rest], PERSONS[rest.numpy()], MOST, DRAWS[rest.numpy()])
    moved = released(engine, theta, *everyone, clip, OTHERS) - released(engine, theta, *others, clip, OTHERS)
    limit = bound(clip, len(theta), OTHERS)
    assert 0.2 * limit < float(moved.norm()) <= limit * (1 + 1e-5)


@pytest.mark.parametrize("clip", ["l2", "coordinate"])
@pytest.mark.parametrize("name", ENGINES)
def test_as_records_they_move_it_by_far_more(name: EngineName, clip: Clipping) -> None:
    """The attack is real: without it the test above would pass for any code."""
    module = net()
    engine, theta = choose(EngineRequest(name, module, blank((5,)), "cpu", 1, False)), FlatModel(module).flatten()
    rest, m = torch.from_numpy(PERSONS != ATTACKER), int((PERSONS != ATTACKER).sum())
    moved = released(engine, theta, X, Y, clip, m) - released(engine, theta, X[rest], Y[rest], clip, m)
    one = taken(X, torch.from_numpy(np.flatnonzero(PERSONS == ATTACKER)[:1]))
    alone = released(engine, theta, torch.cat([X[rest], leaf_of(one)]), torch.cat([Y[rest], Y[~rest][:1]]), clip, m)
    single = float((alone - released(engine, theta, X[rest], Y[rest], clip, m)).norm())
    assert single <= bound(clip, len(theta), m) * (1 + 1e-5)
    assert float(moved.norm()) > 0.99 * RECORDS * single > 0


def leaf_of(tree: Tree) -> Tensor:
    (leaf,) = leaves(tree)
    return leaf


@pytest.mark.parametrize("most", [1, 3, MOST, 100])
def test_without_a_person_exactly_one_example_is_gone(most: int) -> None:
    """Whoever else there is keeps their own records, to the bit: neighbours differ in one example."""
    rest = PERSONS != ATTACKER
    everyone = grouped(X, Y, PERSONS, most, DRAWS)
    others = grouped(X[rest], Y[rest], PERSONS[rest], most, DRAWS[rest])
    assert count(everyone.y) == count(others.y) + 1 == OTHERS + 1
    left = torch.tensor([person for person in range(OTHERS + 1) if person != ATTACKER])
    for place, person in enumerate(left.tolist()):
        assert same(one_of(everyone, person), one_of(others, place))


def one_of(people: Examples, person: int) -> list[Tensor]:
    """What counts of a person: neither how wide the tensors are, nor what fills them up."""
    assert isinstance(people.x, dict)
    number = int(leaf_of(people.x["count"])[person])
    return [leaf[person, :number] for tree in (people.x["records"], people.y) for leaf in leaves(tree)]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.parametrize("name", ENGINES)
def test_a_record_that_breaks_the_model_costs_its_person_and_tells_nothing(name: EngineName) -> None:
    """One record of the fifty is not finite: the release is the one without that person."""
    module = net()
    engine = choose(
        EngineRequest(name, module, blank_person(blank((5,)), MANY), "cpu", 1, False, task=PerPerson(Classification(3)))
    )
    theta, x = FlatModel(module).flatten(), X.clone()
    x[np.flatnonzero(PERSONS == ATTACKER)[3]] = torch.nan
    rest = PERSONS != ATTACKER
    broken = released(engine, theta, *grouped(x, Y, PERSONS, MANY, DRAWS), "l2", OTHERS)
    without = released(engine, theta, *grouped(X[rest], Y[rest], PERSONS[rest], MANY, DRAWS[rest]), "l2", OTHERS)
    assert torch.equal(broken, without)
