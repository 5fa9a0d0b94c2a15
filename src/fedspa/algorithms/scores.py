"""Models scored by agents: a round in which nobody trains, under the run's own event.

The terms of such a round are the run's with the plan's noise on another vector: one number per model, between −1 and 1
for each record, in place of a gradient on k coordinates. Batch, steps, sampling, noise multiplier and unit are the
plan's, so its event is the plan's: whoever prices a training prices a score.
"""

from __future__ import annotations

import math
from dataclasses import replace

from fedspa.algorithms.base import Terms
from fedspa.errors import PrivacyError
from fedspa.mechanisms import Plan
from fedspa.mechanisms.gaussian.plan import GaussianPlan

MOST_MODELS = 64


def scored_by_agents(plan: Plan | None) -> bool:
    """Whether agents can score under this plan: Gaussian noise on what each of them sends alone, at a clip value that
    stays."""
    return isinstance(plan, GaussianPlan) and plan.clip_rule == "given"


def score_plan(plan: Plan | None, models: int) -> GaussianPlan:
    """The plan of scores of so many models. A record's scores, each within ±1, have norm √models: the plan's noise is
    that many times its multiplier."""
    if not isinstance(plan, GaussianPlan) or not scored_by_agents(plan):
        raise PrivacyError(
            "agents score under Gaussian noise that each adds alone, with a clip value that is given; this plan has "
            "another"
        )
    if not 1 <= models <= MOST_MODELS:
        raise PrivacyError(f"{models} models are to be scored; 1 to {MOST_MODELS} are allowed")
    return replace(plan, dimension=models, active=models, clip="coordinate", clip_value=1.0)


def score_terms(terms: Terms, models: int) -> Terms:
    """Of a round in which so many models are scored, from the terms that it would be trained under."""
    plan = score_plan(terms.plan, models)
    return replace(terms, steps=plan, local_lr=1 / plan.local_steps, layers=None)


def share(value: float) -> float:
    """The score from 0 to 1 that a mean of 2s − 1 stands for."""
    return (1 + value) / 2


def deviation(plan: Plan | None, models: int, agents: int) -> float:
    """Of the noise in each score of the mean over so many agents: a public number, known before anyone scores."""
    steps = score_plan(plan, models)
    return steps.update_noise(1 / steps.local_steps, 1.0) / 2 / math.sqrt(agents)
