"""The audit of Gaussian noise (fedspa, dp-fed): its questions, in the order of the report."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from fedspa.audit.gaussian import canaries, engine, release
from fedspa.audit.gaussian.target import PLANTS, Target, of_plan, synthetic
from fedspa.audit.result import Question
from fedspa.audit.run import Audited
from fedspa.audit.setting import Setting
from fedspa.mechanisms.base import Clipping
from fedspa.mechanisms.gaussian.plan import GaussianPlan
from fedspa.privacy.event import Neighbours, Sampling


def questions(setting: Setting, target: Target) -> Iterator[Question]:
    for plan in target.plans():
        yield release.pair_question(setting, target, plan)
        yield release.mu_question(setting, target, plan)
        yield release.epsilon_question(setting, target, plan)
    yield from release.noise_questions(setting, target)
    yield from release.direct_sampler_questions(setting, target)
    for plan in target.plans():
        yield engine.pair_question(setting, target, plan)
        yield engine.mu_question(setting, target, plan)
    yield engine.mask_question(setting, target)
    yield from engine.noise_questions(setting, target)
    yield from engine.update_sampler_questions(setting, target)
    yield from canaries.run_questions(setting, target)


GAUSSIAN = Audited(
    name=GaussianPlan.audited,
    choices={
        "noise": (),
        "clip": get_args(Clipping),
        "sampling": get_args(Sampling),
        "neighbours": get_args(Neighbours),
    },
    synthetic=synthetic,
    of_plan=of_plan,
    questions=questions,
    plants=PLANTS,
)
