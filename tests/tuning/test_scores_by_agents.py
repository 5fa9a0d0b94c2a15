"""Scores by agents: a participation in the run's own event, in which a count per model takes the gradient's place."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedspa.agent.participate import Request, payloads
from fedspa.algorithms import ALGORITHMS, Agent, Terms
from fedspa.algorithms.base import deviation, score_plan, score_terms, share
from fedspa.algorithms.fedspa import respond
from fedspa.audit.statistics import columns, mu_lower, noise_size, threshold_attack
from fedspa.engine.optimizer import LocalOptimizer
from fedspa.engine.per_example import Scores, score
from fedspa.errors import PrivacyError
from fedspa.learning.flat import FlatModel
from fedspa.learning.tasks import Classification, PerPerson
from fedspa.learning.tasks.outputs import Regression
from fedspa.mechanisms.gaussian.plan import GaussianPlan
from fedspa.randomness.streams import derive_key
from fedspa.server.intake import Intake
from fedspa.wire.payload import Update

SEED = bytes(16)


def plan_of(**changes: Any) -> GaussianPlan:
    """Every record in one step: a plain Gaussian, by which an attack shows most."""
    given: dict[str, Any] = {
        "dimension": 6,
        "active": 3,
        "clip": "l2",
        "clip_value": 0.1,
        "sampling": "poisson",
        "batch": 1,
        "records": 1,
        "local_steps": 1,
        "participations": 5,
        "noise_multiplier": 1.0,
        "neighbours": "add-remove",
        "delta": 1e-3,
    }
    return GaussianPlan(**given | changes)


def terms_of(plan: GaussianPlan) -> Terms:
    return Terms(round=4, mask="shared", mask_seed=SEED, local_lr=0.5, steps=plan)


def linear(classes: int = 2) -> FlatModel:
    return FlatModel(nn.Linear(2, classes, bias=False), Classification(classes))


def always(model: FlatModel, label: int, models: int) -> Tensor:
    """Parameters of models that say `label` of every record whose first number is positive."""
    theta = torch.zeros(model.dimension).view(-1, 2)
    theta[label, 0] = 1.0
    return theta.reshape(1, -1).repeat(models, 1)


def said(model: FlatModel, models: Tensor, plan: GaussianPlan, x: Tensor, y: Tensor, key: bytes, **more: Any) -> Any:
    """What one agent's payload says of the models, as its server reads it."""
    request = Request("run", ALGORITHMS["fedspa"], terms_of(plan), models[0], "f32", "secure", models=models)
    agent = Agent(number=0, pool_x=x, pool_y=y, mask_seed=SEED, key=key, **more)
    intake = Intake(score_terms(request.terms, len(models)), request.algorithm, request.coding, 1)
    intake.take(payloads(request, {"agent-0": agent}, Scores(model, models))["agent-0"], seed=SEED)
    return intake.mean()


@pytest.mark.parametrize("changes", [
    {},
    {"sampling": "fixed", "neighbours": "replace-one", "batch": 10, "records": 40, "local_steps": 7},
    {"neighbours": "replace-one", "batch": 10, "records": 40, "unit": "person"},
    {"clip": "coordinate", "clip_value": 3.0},
])  # fmt: skip
@pytest.mark.parametrize("models", [1, 2, 5])
def test_a_score_costs_what_a_training_costs(changes: dict[str, Any], models: int) -> None:
    plan = plan_of(**changes)
    scores = score_plan(plan, models)
    assert scores.event == plan.event
    assert (scores.participations, scores.delta) == (plan.participations, plan.delta)
    # A record says between −1 and 1 of each model; in its place another may say the opposite of all.
    width = 1 if plan.neighbours == "add-remove" else 2
    assert scores.sensitivity == pytest.approx(width * math.sqrt(models))
    assert scores.sigma * scores.batch == pytest.approx(plan.noise_multiplier * math.sqrt(models))


def test_only_noise_that_each_agent_adds_alone_serves() -> None:
    with pytest.raises(PrivacyError, match="each adds alone"):
        score_plan(None, 2)
    for models in (0, 65):
        with pytest.raises(PrivacyError, match="1 to 64"):
            score_plan(plan_of(), models)


@pytest.mark.parametrize("exact", [False, True])
def test_what_is_said_is_the_share_that_was_right(exact: bool) -> None:
    """With next to no noise. Half of the records are of class 0, which the first model says of all."""
    records = 40
    plan = plan_of(noise_multiplier=2.0**-19, batch=records, records=records)
    model = linear(3)
    x, y = torch.ones(records, 2), torch.tensor([0, 1, 0, 2] * 10)
    models = torch.cat([always(model, label, 1) for label in range(3)])
    found = said(model, models, plan, x, y, derive_key(bytes(32), "key"), exact=exact)
    assert [share(value) for value in found] == pytest.approx([0.5, 0.25, 0.25], abs=1e-4)


def test_sampled_steps_say_it_too_and_the_noise_is_as_large_as_was_told() -> None:
    records = 30
    plan = plan_of(batch=6, records=records, local_steps=3, noise_multiplier=4.0)
    model, x, y = linear(), torch.ones(records, 2), torch.zeros(records, dtype=torch.int64)
    models = always(model, 0, 2)
    draws = [said(model, models, plan, x, y, derive_key(bytes(32), "draw", i)) for i in range(60)]
    found = np.array(draws) / 2 + 0.5
    assert found.mean() == pytest.approx(1.0, abs=4 * deviation(plan, 2, 1) / math.sqrt(120))
    # Poisson batches add some spread of their own to the noise.
    sampled = math.sqrt(deviation(plan, 2, 1) ** 2 + (0.8 / 6 / 3) / 4)
    assert found.std() == pytest.approx(sampled, rel=0.25)


def test_a_records_score_is_its_own_whoever_is_beside_it() -> None:
    """Of a model that nearly ties, in float32: to the bit the same in any company."""
    model = linear(4)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(17, 2, generator=generator)
    y = torch.randint(4, (17,), generator=generator)
    models = 1e-8 * torch.randn(3, model.dimension, generator=generator) + 1
    engine = Scores(model, models)
    (together,) = engine.rows(torch.zeros(3), x, y, None)
    for i in range(17):
        (alone,) = engine.rows(torch.zeros(3), x[i : i + 1], y[i : i + 1], None)
        assert torch.equal(alone[0], together[i])


class Fragile(nn.Module):
    """Raises for a record of negative numbers, and draws in every forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if bool((x < 0).any()):
            raise ValueError("a record that must not be revealed")
        return self.inner(x) + 0 * torch.rand(1)


def test_a_record_that_fails_adds_nothing_and_no_draw_is_shared() -> None:
    model = FlatModel(Fragile(), Classification(2))
    engine = Scores(model, torch.tensor([[1.0, 0, 0, 0], [0, 0, 1.0, 0]]))
    before = torch.random.get_rng_state()
    (rows,) = engine.rows(torch.zeros(2), torch.tensor([[1.0, 1], [-1, -1]]), torch.tensor([0, 0]), None)
    assert rows[0].tolist() == [-1, 1]
    assert rows[1].isnan().all()  # which a clip takes for zero
    assert torch.equal(torch.random.get_rng_state(), before)
    assert model.module.training


def test_scores_of_other_tasks_and_of_persons() -> None:
    module = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        module.weight.fill_(1.0)
    x, y = torch.ones(1, 2), torch.tensor([[2.0]])
    with torch.no_grad():
        assert float(score(Regression(), module, x, y)) == 1.0
        assert 0 < float(score(Regression(), module, x, y + 1)) < 1
    model, person = linear(), {"records": torch.ones(1, 4, 2), "count": torch.tensor([3])}
    model.load(always(model, 0, 1)[0])
    labels = torch.tensor([[0, 0, 1, 0]])  # the fourth is a place that is empty
    assert float(score(PerPerson(Classification(2)), model.module, person, labels)) == pytest.approx(2 / 3)


# What an agent says of several models, with a record that all of them are right about, without it, or with one in its
# place that all are wrong about. The models call every record of class 0; all records but the first are, and every
# record is in every batch: an attack shows most where no sampling hides a record.

MODELS, RECORDS, DRAWS = 4, 2, 400
ATTACKED = {relation: plan_of(neighbours=relation, clip="coordinate", batch=RECORDS, records=RECORDS)
            for relation in ("add-remove", "replace-one")}  # fmt: skip
relations = pytest.mark.parametrize("relation", ATTACKED)


def answers(plan: GaussianPlan, first: str, draws: int, label: str, scored: Callable[..., Any] = score_plan) -> Any:
    """[draws, models], in units of the noise as accounted, without what the record behind the first adds."""
    model = FlatModel(nn.Linear(1, 2, bias=False), Classification(2))
    models = torch.tensor([[1.0, 0.0]]).repeat(MODELS, 1)
    x, y = torch.ones(RECORDS, 1), torch.zeros(RECORDS, dtype=torch.int64)
    y[0] = first == "wrong"
    held = slice(1, None) if first == "absent" else slice(None)
    keys = [derive_key(bytes(32), label, i) for i in range(draws)]
    agents = [Agent(i, x[held], y[held], SEED, key, False) for i, key in enumerate(keys)]
    terms = Terms(0, "per-agent", None, 1.0, scored(plan, MODELS))
    found = respond(torch.zeros(MODELS), terms, agents, Scores(model, models))
    values = np.stack([answer.values for answer in found]).astype(np.float64) - (RECORDS - 1) / plan.batch
    return values * plan.batch / (plan.noise_multiplier * math.sqrt(MODELS))


def claimed(plan: GaussianPlan) -> float:
    return (1 if plan.neighbours == "add-remove" else 2) / plan.noise_multiplier


def distance(relation: str, scored: Callable[..., Any] = score_plan) -> float:
    """Worst neighbours under the same key, over the noise that is really there: without chance."""
    plan = ATTACKED[relation]
    other = "absent" if relation == "add-remove" else "wrong"
    right, left = (answers(plan, first, 1, "pair", scored) for first in ("right", other))
    return float(np.linalg.norm(right - left)) * score_plan(plan, MODELS).sigma / scored(plan, MODELS).sigma


def noise(scored: Callable[..., Any] = score_plan) -> list[bool]:
    """Whether the noise has its size, and each model its own: the difference of two counts with one noise is bare."""
    plan = ATTACKED["add-remove"]
    found = answers(plan, "right", DRAWS, "noise", scored) - 1 / (plan.noise_multiplier * math.sqrt(MODELS))
    asked = [noise_size("size", claimed(plan), [found, *found.T], ""), columns("coordinates", found)]
    return [question.answer(1e-5).holds for question in asked]


@relations
def test_neighbours_are_as_far_apart_as_claimed(relation: str) -> None:
    assert distance(relation) == pytest.approx(claimed(ATTACKED[relation]), rel=1e-5)


@relations
def test_an_attack_on_counts_stays_within_the_claim_and_sees_something(relation: str) -> None:
    """All models' counts together say most of a record."""
    plan = ATTACKED[relation]
    other = "absent" if relation == "add-remove" else "wrong"
    sides = [answers(plan, first, DRAWS, first).sum(axis=1) / math.sqrt(MODELS) for first in ("right", other)]
    middle = claimed(plan) / 2 if relation == "add-remove" else 0.0
    check = threshold_attack("μ", "mu", claimed(plan), sides, middle, mu_lower, "").answer(1e-5)
    assert check.holds
    assert check.lower_bound > (0.5 * check.claimed if relation == "replace-one" else 0)


def louder(ratio: float) -> Callable[[GaussianPlan, int], GaussianPlan]:
    """Noise of a variance smaller than accounted by this ratio; by the number of models where a sensitivity is that of
    one count."""

    def scored(plan: GaussianPlan, models: int) -> GaussianPlan:
        own = score_plan(plan, models)
        return replace(own, noise_multiplier=own.noise_multiplier / math.sqrt(ratio))

    return scored


@relations
def test_a_sensitivity_that_forgets_the_other_models_is_caught(relation: str) -> None:
    assert distance(relation, louder(MODELS)) > 1.9 * claimed(ATTACKED[relation])


def test_noise_that_is_weak_or_shared_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    assert noise() == [True, True]
    assert noise(louder(1.5**2)) == [False, True]

    def shared(*given: Any) -> Iterator[Update]:
        for answer in true(*given):
            yield replace(answer, values=np.full_like(answer.values, answer.values[0]))

    true = respond
    monkeypatch.setitem(globals(), "respond", shared)
    assert noise()[1] is False  # of the right size each, though the true counts of these models are the same


@relations
def test_an_engine_that_counts_tenfold_is_clipped(relation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Scores.rows
    monkeypatch.setattr(Scores, "rows", lambda *given: (10 * found for found in rows(*given)))
    assert distance(relation) == pytest.approx(claimed(ATTACKED[relation]), rel=1e-5)


@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_an_agents_optimiser_has_no_part_in_scores(name: str) -> None:
    """Scores are counts with noise, and no gradients."""
    plan = GaussianPlan(40, 40, "l2", 0.3, "poisson", 5, 2000, 6, 2, 1.0, "add-remove", 1e-4)
    plain = Terms(0, "per-agent", None, 0.1, plan)
    scored = score_terms(replace(plain, optimizer=LocalOptimizer(name)), 3)  # type: ignore[arg-type]
    assert scored == score_terms(plain, 3)
