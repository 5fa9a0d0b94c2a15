"""What can be audited. A new mechanism is a file with an `Audited` in it, and a line here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedspa.audit.binomial import BINOMIAL
from fedspa.audit.gaussian import GAUSSIAN
from fedspa.audit.run import Audited
from fedspa.audit.scores import SCORES
from fedspa.audit.setting import Setting, refuse_unless
from fedspa.audit.shares import SHARES
from fedspa.errors import ConfigError

AUDITED: dict[str, Audited[Any]] = {mechanism.name: mechanism for mechanism in (GAUSSIAN, BINOMIAL, SHARES, SCORES)}


def synthetic(algorithm: str, choices: Mapping[str, Any]) -> tuple[Audited[Any], Any]:
    """A mechanism by its name, and a target of it."""
    refuse_unless("algorithm", algorithm, tuple(AUDITED))
    mechanism = AUDITED[algorithm]
    _refuse_others(mechanism, choices)
    return mechanism, mechanism.synthetic(**choices)


def of_config(
    path: Path, overrides: Sequence[str], choices: Mapping[str, Any], draws: int, seed: int
) -> tuple[Audited[Any], Any, Setting]:
    """The mechanism of a run's config, with its plan (calibrated as the run would), noise mode and engine."""
    from fedspa.runs.config import load
    from fedspa.runs.setup import prepare

    config = load(path, overrides)
    plan = prepare(config).plan
    if plan is None:
        raise ConfigError(f"{path}: {config.algorithm.name} promises no privacy; audit a config that has a plan")
    mechanism = AUDITED.get(plan.audited)
    if mechanism is None:
        raise ConfigError(f"{path}: no audit knows the mechanism of {config.algorithm.name}; add it to AUDITED")
    _refuse_others(mechanism, choices)
    setting = Setting(config.privacy.noise, config.run.engine, draws, seed)
    return mechanism, mechanism.of_plan(plan, **choices), setting


def _refuse_others(mechanism: Audited[Any], choices: Mapping[str, Any]) -> None:
    """Choices that the mechanism does not have, and values that they do not have."""
    if unknown := choices.keys() - mechanism.choices.keys():
        flags = ", ".join(f"--{key.replace('_', '-')}" for key in sorted(unknown))
        raise ConfigError(f"{flags}: the audit of {mechanism.name} has no such choice and tries every variant")
    for key, value in choices.items():
        if mechanism.choices[key]:
            refuse_unless(key, value, mechanism.choices[key])
