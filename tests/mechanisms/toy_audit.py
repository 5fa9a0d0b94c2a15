"""The audit of the toy mechanism."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray
from scipy import stats
from toy import LaplacePlan, noise

from fedspa.audit.audited import Audited, Setting
from fedspa.audit.statistics import Question, epsilon_lower, law_question, threshold_attack


@dataclass(frozen=True)
class Target:
    """A plan of one coordinate, whose noise is `share` of what it should be."""

    plan: LaplacePlan
    share: float = 1.0

    def releases(self, total: float, setting: Setting, label: str, draws: int) -> NDArray[np.float64]:
        return np.asarray(total + self.share * noise(draws, self.plan, setting.stream("laplace", label)))


def questions(setting: Setting, target: Target) -> Iterator[Question]:
    width = target.plan.width
    silent = target.releases(0.0, setting, "silent", 16 * setting.draws)
    yield law_question("laplace: law", stats.laplace(scale=width), [silent], "")
    # Two neighbours at either end of the bound: what one record of a batch without sampling can do.
    sides = [target.releases(sign * target.plan.clip_value, setting, f"{sign}", setting.draws) for sign in (1, -1)]
    bound = partial(epsilon_lower, 0.0)
    yield threshold_attack("laplace: ε", "epsilon", 2 / target.plan.scale, sides, 1.0, bound, "threshold")


AUDIT = Audited(
    name="laplace",
    of_plan=lambda plan: Target(replace(plan, dimension=1)),
    questions=questions,
    faults={"noise": lambda target: replace(target, share=0.4)},
)
