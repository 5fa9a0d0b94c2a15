"""The audit: every check, with the false-alarm rate shared out among those that rest on chance."""

from __future__ import annotations

from fedspa.audit.attacks import epsilon_check, mu_check
from fedspa.audit.batches import sampler_checks
from fedspa.audit.canaries import run_checks
from fedspa.audit.noise import noise_checks
from fedspa.audit.pairs import pair_check
from fedspa.audit.probe import (
    engine_mu_check,
    engine_noise_checks,
    engine_pair_check,
    engine_sampler_checks,
    make_probe,
)
from fedspa.audit.result import Check, Report
from fedspa.audit.setting import Setting
from fedspa.audit.target import Target

# Questions answered with a chance of error: a few for all relations together, and some for each relation.
COMMON, PER_RELATION = 13, 3


def audit(setting: Setting, target: Target) -> Report:
    """Attack the target. Holds on a sound mechanism except with chance `setting.false_alarm`, by the union bound."""
    alpha = setting.false_alarm / (COMMON + PER_RELATION * len(setting.relations))
    checks: list[Check] = []
    for plan in setting.plans():
        checks.append(pair_check(setting, target, plan))
        checks.append(mu_check(setting, target, plan, alpha))
        checks.append(epsilon_check(setting, target, plan, alpha))
    checks += noise_checks(setting, target, alpha)
    checks += sampler_checks(setting, target, alpha)
    probe = make_probe(setting, target)
    for plan in setting.plans():
        checks.append(engine_pair_check(setting, target, probe, plan))
        checks.append(engine_mu_check(setting, target, probe, plan, alpha))
    checks += engine_noise_checks(setting, target, probe, alpha)
    checks += engine_sampler_checks(setting, probe, alpha)
    checks += run_checks(setting, target, alpha)
    return Report(tuple(checks), setting.false_alarm, _notes(setting))


def _notes(setting: Setting) -> tuple[str, ...]:
    if setting.noise_mode == "seeded":
        return ("seeded noise is a function of run.seed: whoever knows the seed can subtract it; not tested here",)
    return ()
