"""An audit of scores by agents: what an agent says of several models, with a record that all of them are right about,
without it, or with one in its place that all are wrong about.

The answers are made as in a run, by the algorithm's `respond` and the engine of scores. Every record is in every batch:
an attack shows most where no sampling hides a record.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import targets
import torch
from torch import nn

from fedspa.algorithms import Agent, Terms
from fedspa.algorithms.base import score_plan
from fedspa.algorithms.fedspa import respond
from fedspa.audit import gaussian
from fedspa.audit.audited import Audited, Setting
from fedspa.audit.probes import SEED
from fedspa.audit.statistics import Floats, Question, certain, columns, mu_lower, noise_size, threshold_attack
from fedspa.engine.per_example import Scores
from fedspa.learning.flat import FlatModel
from fedspa.learning.tasks import Classification
from fedspa.mechanisms.gaussian.plan import GaussianPlan
from fedspa.privacy.event import Neighbours, Sampling

MODELS, RECORDS = 4, 2
MOST_DRAWS = 1000
# Answers travel as float32: what the pair test may be off by.
TOLERANCE = 1e-5
First = Literal["right", "wrong", "absent"]


@dataclass(frozen=True, slots=True)
class Target:
    """`plan` is the run's. `scored` makes that of the scores from it, and from the number of models."""

    plan: GaussianPlan
    relations: tuple[Neighbours, ...]
    scored: Callable[[GaussianPlan, int], GaussianPlan] = score_plan

    def plans(self) -> Iterator[GaussianPlan]:
        """The run's, with every record in every batch and one step, under each relation."""
        for relation in self.relations:
            yield replace(self.plan, batch=RECORDS, records=RECORDS, local_steps=1, neighbours=relation)


def synthetic(*, noise: float = 1.0, neighbours: Neighbours | None = None, sampling: Sampling = "poisson") -> Target:
    made = targets.synthetic(noise=noise, neighbours=neighbours, sampling=sampling)
    return Target(made.plan, made.relations)


def of_plan(plan: GaussianPlan) -> Target:
    return Target(plan, gaussian.of_plan(plan).relations)


def _claimed(plan: GaussianPlan) -> float:
    """μ, of any participation in one step on all records."""
    return (1 if plan.neighbours == "add-remove" else 2) / plan.noise_multiplier


def _answers(setting: Setting, target: Target, plan: GaussianPlan, first: First, keys: Sequence[bytes]) -> Floats:
    """What agents with these keys say, [keys, models], without what the records behind the first add. The models call
    every record of class 0; all records but the first are."""
    model = FlatModel(nn.Linear(1, 2, bias=False), Classification(2))
    models = torch.tensor([[1.0, 0.0]]).repeat(MODELS, 1)
    x, y = torch.ones(RECORDS, 1), torch.zeros(RECORDS, dtype=torch.int64)
    y[0] = first == "wrong"
    held = slice(1, None) if first == "absent" else slice(None)
    scored = target.scored(plan, MODELS)
    agents = [Agent(i, x[held], y[held], SEED, key, setting.exact) for i, key in enumerate(keys)]
    found = respond(torch.zeros(MODELS), Terms(0, "per-agent", None, 1.0, scored), agents, Scores(model, models))
    return np.stack([answer.values for answer in found]).astype(np.float64) - (RECORDS - 1) / plan.batch


def _sigma(plan: GaussianPlan) -> float:
    """Return the σ of the noise in each score, as accounted: a record's scores have norm √models."""
    return plan.noise_multiplier * math.sqrt(MODELS) / plan.batch


def _other(plan: GaussianPlan) -> First:
    return "absent" if plan.neighbours == "add-remove" else "wrong"


def pair_question(setting: Setting, target: Target, plan: GaussianPlan) -> Question:
    """Worst neighbours under the same key: the distance without chance."""
    key = [setting.key("scores pair")]
    right, other = (_answers(setting, target, plan, first, key) for first in ("right", _other(plan)))
    claimed, distance = _claimed(plan), float(np.linalg.norm(right - other)) / target.scored(plan, MODELS).sigma
    holds = claimed * (1 - TOLERANCE) <= distance <= claimed * (1 + TOLERANCE)
    detail = f"one answer on {MODELS} models, a record that all are right about"
    return certain(f"scores: pair, {plan.neighbours}", "mu", claimed, distance, detail, holds)


def mu_question(setting: Setting, target: Target, plan: GaussianPlan) -> Question:
    """Return the threshold attack: all models' counts together say most of a record."""

    def found(first: First) -> Floats:
        keys = [setting.key("scores", plan.neighbours, first, i) for i in range(min(setting.draws, MOST_DRAWS))]
        total: Floats = _answers(setting, target, plan, first, keys).sum(axis=1) / math.sqrt(MODELS) / _sigma(plan)
        return total

    claimed = _claimed(plan)
    middle = 0.0 if plan.neighbours == "replace-one" else claimed / 2
    detail = f"threshold attack on the counts of {MODELS} models, q = 1"
    sides = found("right"), found(_other(plan))
    return threshold_attack(f"scores: μ, {plan.neighbours}", "mu", claimed, sides, middle, mu_lower, detail)


def noise_questions(setting: Setting, target: Target, plan: GaussianPlan) -> list[Question]:
    """Whether the noise has the size that a plan of training has on a vector of this norm, and each model its own: the
    difference of two counts with the same noise is bare."""
    keys = [setting.key("scores noise", i) for i in range(min(setting.draws, MOST_DRAWS))]
    noise = (_answers(setting, target, plan, "right", keys) - 1 / plan.batch) / _sigma(plan)
    detail = f"{len(keys)} answers on {MODELS} models"
    return [
        noise_size("scores: noise", _claimed(plan), [noise, *noise.T], detail),
        columns("scores: coordinates", noise),
    ]


def questions(setting: Setting, target: Target) -> Iterator[Question]:
    plans = list(target.plans())
    for plan in plans:
        yield pair_question(setting, target, plan)
        yield mu_question(setting, target, plan)
    yield from noise_questions(setting, target, plans[0])


SCORES = Audited(name="scores", of_plan=of_plan, questions=questions)
