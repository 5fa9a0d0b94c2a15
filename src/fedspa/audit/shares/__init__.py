"""The audit of discrete Gaussian shares (fedspa, dp-fed under secure aggregation): its questions, in the report's
order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from fedspa.audit import sums
from fedspa.audit.result import Question
from fedspa.audit.run import Audited
from fedspa.audit.setting import Setting
from fedspa.audit.shares.answers import neighbour_questions
from fedspa.audit.shares.target import PLANTS, of_plan, synthetic
from fedspa.audit.sums.cohort import Summed
from fedspa.mechanisms.discrete_gaussian.plan import DiscreteGaussianPlan
from fedspa.privacy.event import Neighbours


def questions(setting: Setting, target: Summed) -> Iterator[Question]:
    yield from neighbour_questions(setting, target)
    yield from sums.questions(setting, target)


SHARES = Audited(
    name=DiscreteGaussianPlan.audited,
    choices={"noise": (), "neighbours": get_args(Neighbours)},
    synthetic=synthetic,
    of_plan=of_plan,
    questions=questions,
    plants=PLANTS,
)
