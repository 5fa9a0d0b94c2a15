"""The audit of cpSGD's Binomial noise, against what `binomial.bound` assumes: its questions, in the report's order.

Where the claim is a bound (with rotation), it is so loose that the attack on ε sees noise several times too small
only. Small faults are seen by the questions about the mechanism as accounted: how far apart neighbours are after
rounding with the same coins, whether a release of nothing is Binomial, whether rounding is unbiased, who was drawn, and
whose noise repeats. Questions named `answer` go through `respond` and the engine of a run, which clips by itself.
"""

from __future__ import annotations

from collections.abc import Iterator

from fedspa.audit import sums
from fedspa.audit.binomial import answers, release
from fedspa.audit.binomial.target import PLANTS, Target, of_plan, synthetic
from fedspa.audit.result import Question
from fedspa.audit.run import Audited
from fedspa.audit.setting import Setting
from fedspa.mechanisms.binomial.plan import BinomialPlan


def questions(setting: Setting, target: Target) -> Iterator[Question]:
    for plan in target.variants:
        yield from release.pair_questions(setting, target, plan)
        yield from release.noise_questions(setting, target, plan)
        yield release.rounding_question(setting, target, plan)
        yield release.attack_question(setting, target, plan)
        yield from answers.neighbour_questions(setting, target, plan)
        yield from answers.noise_questions(setting, target, plan)
    yield from answers.round_sampler_questions(setting, target)
    yield answers.keys_question(setting, target)
    if target.sums is not None:
        yield from sums.questions(setting, target.sums)


BINOMIAL = Audited(
    name=BinomialPlan.audited,
    choices={},
    synthetic=synthetic,
    of_plan=of_plan,
    questions=questions,
    plants=PLANTS,
)
