"""The audit: how it attacks, what a mechanism tells it, and the false-alarm rate shared out among its questions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Generic, TypeVar, get_args

import torch
from torch import nn

from fedspa import registry
from fedspa.audit.result import Question, Report
from fedspa.engine import EngineName
from fedspa.engine.choose import choose
from fedspa.engine.task import Engine
from fedspa.errors import ConfigError
from fedspa.examples import blank
from fedspa.randomness.streams import NoiseMode, Stream, derive_key, root_key

FALSE_ALARM = 1e-4
DRAWS = 5000
# Audits that are not of an algorithm by its own name: of its variant for sums, and of scores by agents.
OTHERS = {"shares": "fedspa.audit.aggregation:SHARES", "scores": "fedspa.audit.scores:SCORES"}
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Setting:
    """`seed` decides the audit's data. `root` is where the mechanism's randomness comes from: the operating system,
    unless the noise mode is `seeded`."""

    noise_mode: NoiseMode = "secure"
    engine: EngineName = "auto"
    draws: int = DRAWS
    seed: int = 0
    false_alarm: float = FALSE_ALARM
    root: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.draws < 100:
            raise ConfigError(f"--draws is {self.draws}; below 100 no attack can say anything")
        if not 0 < self.false_alarm < 0.5:
            raise ConfigError(f"the false-alarm rate is {self.false_alarm}; it must lie above 0 and below 0.5")
        refuse_unless("noise_mode", self.noise_mode, get_args(NoiseMode))
        refuse_unless("engine", self.engine, get_args(EngineName))
        object.__setattr__(self, "root", root_key(self.noise_mode, self.seed))

    @property
    def exact(self) -> bool:
        return self.noise_mode == "exact"

    def key(self, *labels: str | int) -> bytes:
        return derive_key(self.root, "audit", *labels)

    def stream(self, *labels: str | int) -> Stream:
        return Stream(self.key(*labels))

    def generator(self) -> torch.Generator:
        """For the audit's data, afresh each time."""
        return torch.Generator().manual_seed(self.seed)

    def make_engine(self, module: nn.Module, input_shape: tuple[int, ...]) -> Engine:
        """What a run with this noise mode would take for such a model."""
        return choose(self.engine, module, blank(input_shape), "cpu", 1, self.exact)


@dataclass(frozen=True, slots=True)
class Audited(Generic[T]):
    """What a mechanism tells the audit. A target T is what is attacked: plans, and the functions that train by them.

    `synthetic` makes a small target that attacks see well, by those of the `choices` that are given (an option of the
    command line, and its allowed values; none where it is a number). `of_plan` makes the target of a run's plan; of the
    choices it is given `neighbours` only. Each of `faults` makes a target with one known mistake in it, which the
    audit must catch (`--self-test`).
    """

    name: str
    choices: Mapping[str, tuple[str, ...]]
    synthetic: Callable[..., T]
    of_plan: Callable[..., T]
    questions: Callable[[Setting, T], Iterable[Question]]
    faults: Mapping[str, Callable[[T], T]] = field(default_factory=dict)

    def audit(self, setting: Setting, target: T) -> Report:
        """Attack the target. Holds on sound code except with chance `setting.false_alarm`, by the union bound."""
        questions = list(self.questions(setting, target))
        whole = sum(question.share for question in questions) or 1.0
        checks = (question.answer(setting.false_alarm * question.share / whole) for question in questions)
        return Report(tuple(checks), setting.false_alarm, _notes(setting))

    def self_test(self, setting: Setting, target: T) -> dict[str, Report]:
        """Attack the target with each fault in it; none of the reports may hold."""
        if not self.faults:
            raise ConfigError(f"--self-test: the audit of {self.name} has no faults of its own; audit fedspa")
        return {name: self.audit(setting, fault(target)) for name, fault in self.faults.items()}


def _notes(setting: Setting) -> tuple[str, ...]:
    if setting.noise_mode == "seeded":
        return ("seeded noise is a function of run.seed: whoever knows the seed can subtract it; not tested here",)
    return ()


def synthetic(algorithm: str, choices: Mapping[str, Any]) -> tuple[Audited[Any], Any]:
    """Return an audit by its name, and a target of it."""
    known = {each.name: each.audit for each in registry.every() if each.audit is not None and each.mean is None}
    names = known | OTHERS
    refuse_unless("algorithm", algorithm, tuple(names))
    audited = _named(names[algorithm])
    _refuse_others(audited, choices)
    return audited, audited.synthetic(**choices)


def of_config(
    path: Path, overrides: Sequence[str], choices: Mapping[str, Any], draws: int, seed: int
) -> tuple[Audited[Any], Any, Setting]:
    """Return the audit of a run's config, with its plan (calibrated as the run would), noise mode and engine."""
    from fedspa.runs.config import load
    from fedspa.runs.plans import algorithm_of
    from fedspa.runs.setup import prepare

    config = load(path, overrides)
    plan, reference = prepare(config).plan, algorithm_of(config).audit
    if plan is None:
        raise ConfigError(f"{path}: {config.algorithm.name} promises no privacy; audit a config that has a plan")
    if reference is None:
        raise ConfigError(f"{path}: {config.algorithm.name} names no audit; its Algorithm must (`audit`)")
    audited = _named(reference)
    _refuse_others(audited, choices)
    setting = Setting(config.privacy.noise, config.run.engine, draws, seed)
    return audited, audited.of_plan(plan, **choices), setting


def _named(reference: str) -> Audited[Any]:
    module, _, variable = reference.partition(":")
    found: Audited[Any] = getattr(import_module(module), variable)
    return found


def _refuse_others(audited: Audited[Any], choices: Mapping[str, Any]) -> None:
    """Choices that the mechanism does not have, and values that they do not have."""
    if unknown := choices.keys() - audited.choices.keys():
        flags = ", ".join(f"--{key.replace('_', '-')}" for key in sorted(unknown))
        raise ConfigError(f"{flags}: the audit of {audited.name} has no such choice and tries every variant")
    for key, value in choices.items():
        if audited.choices[key]:
            refuse_unless(key, value, audited.choices[key])


def refuse_unless(option: str, value: object, allowed: tuple[str, ...]) -> None:
    """An error in the words of the command line."""
    if value not in allowed:
        raise ConfigError(f"--{option.replace('_', '-')} is {value!r}; allowed: {', '.join(allowed)}")
