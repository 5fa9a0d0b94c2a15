"""The audit: every question of a mechanism, with the false-alarm rate shared out among those that rest on chance."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from fedspa.audit.result import Question, Report
from fedspa.audit.setting import Setting
from fedspa.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Audited(Generic[T]):
    """What a mechanism tells the audit. A target T is what is attacked: plans, and the functions that train by them.

    `synthetic` makes a small target that attacks see well, by those of the `choices` that are given (an option of the
    command line, and its allowed values; none where it is a number). `of_plan` makes the target of a run whose plan
    names this audit; of the choices it is given `neighbours` only. A plant is a target with one mistake in it.
    """

    name: str
    choices: Mapping[str, tuple[str, ...]]
    synthetic: Callable[..., T]
    of_plan: Callable[..., T]
    questions: Callable[[Setting, T], Iterable[Question]]
    plants: Mapping[str, Callable[[T], T]]

    def planted(self, name: str, target: T) -> T:
        """`target` with the named mistake in it."""
        if name not in self.plants:
            raise ConfigError(f"--plant is {name!r}; allowed for {self.name}: {', '.join(self.plants)}")
        return self.plants[name](target)

    def audit(self, setting: Setting, target: T) -> Report:
        """Attack the target. Holds on sound code except with chance `setting.false_alarm`, by the union bound."""
        questions = list(self.questions(setting, target))
        whole = sum(question.share for question in questions) or 1.0
        checks = (question.answer(setting.false_alarm * question.share / whole) for question in questions)
        return Report(tuple(checks), setting.false_alarm, _notes(setting))


def _notes(setting: Setting) -> tuple[str, ...]:
    if setting.noise_mode == "seeded":
        return ("seeded noise is a function of run.seed: whoever knows the seed can subtract it; not tested here",)
    return ()
