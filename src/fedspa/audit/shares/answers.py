"""How far apart the shares of neighbours are, through `respond` and the engine of a run, without any chance.

Two agents with the same keys have the same coins and the same random bits of noise. A draw of noise grows with the
point that it is around, and by whole units as that moves by whole units: so two draws are apart by what their points
are, rounded up. The grid is so fine here that these roundings, of less than a unit and a step per coordinate, hardly
show.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import numpy as np

from fedspa.audit.neighbours import TwoClass, neighbours, two_class_models
from fedspa.audit.probe import answers
from fedspa.audit.questions import Floats
from fedspa.audit.result import Question, certain
from fedspa.audit.setting import Setting
from fedspa.audit.sums.cohort import Summed
from fedspa.mechanisms.discrete_gaussian.event import FINE, MOST_BOUND
from fedspa.mechanisms.discrete_gaussian.plan import DiscreteGaussianPlan

RECORDS = 17
# What the worst pair reaches of the claim, which has room for roundings.
REACHED = 0.99


def neighbour_questions(setting: Setting, target: Summed) -> list[Question]:
    """The distances of shares that come nearest to what is claimed: of an agent with another record in the place of
    one, and with neither."""
    assert isinstance(target.plan, DiscreteGaussianPlan)
    worst = {"replace-one": (0.0, 1.0), "add-remove": (0.0, 1.0)}
    pairs, slackest = 0, math.inf
    for model, plan in two_class_models(setting.seed, partial(_fitted, target.plan)):
        away = _differences(setting, target, model, plan)
        for relation, distances, weight in zip(worst, away, (2, 1)):
            most = weight * plan.bound / FINE + math.sqrt(plan.active) * (1 + 1 / FINE)
            worst[relation] = max(worst[relation], (float(distances.max()), most), key=lambda of: of[0] / of[1])
            slackest = min(slackest, float(distances.max()) / most)
        pairs += away.size
    detail = f"{pairs} pairs of agents, the same keys for both"
    if slackest < REACHED:
        detail += f"; the worst pair of one model reaches {slackest:.4g} of it only: this test has lost its reach"
    return [
        certain(f"answer: Δ₂, {relation}", "levels", most, seen, detail, seen <= most and slackest >= REACHED)
        for relation, (seen, most) in worst.items()
    ]


def _fitted(plan: DiscreteGaussianPlan, dimension: int, clip_value: float | None) -> DiscreteGaussianPlan:
    """On a fine grid, with a mask of three quarters of the coordinates where the plan has one."""
    active = dimension if plan.active == plan.dimension else dimension * 3 // 4
    own = replace(plan, dimension=dimension, active=active, records=RECORDS, bound=MOST_BOUND // 2, delta=1e-3)
    return own if clip_value is None else replace(own, clip_value=clip_value)


def _differences(setting: Setting, target: Summed, model: TwoClass, plan: DiscreteGaussianPlan) -> Floats:
    """In L2 and units, [replaced or removed, pairs]."""
    key = setting.key("neighbours", plan.dimension)
    agents = [(x, y, key) for each in neighbours(model, RECORDS, setting.generator()) for x, y in each]
    values = np.stack([answer.values for answer in answers(setting, target, model, plan, agents)]).astype(np.float64)
    one, another, neither = values[::3], values[1::3], values[2::3]
    return np.stack([np.linalg.norm(one - another, axis=1), np.linalg.norm(one - neither, axis=1)])
