"""The audit as a whole: holds on production, catches every plant, and cries wolf no oftener than it says."""

import itertools
from collections import Counter
from dataclasses import replace

import pytest
from scipy import stats

from fedspa.audit import plants
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
from fedspa.audit.run import COMMON, PER_RELATION, audit
from fedspa.audit.setting import from_config, synthetic
from fedspa.audit.target import production
from fedspa.errors import ConfigError
from fedspa.mechanism.release import noisy_mean


@pytest.mark.slow
@pytest.mark.parametrize(
    ("clip", "sampling", "mode"),
    [  # every pair of choices once; each takes 3 s, in the exact mode 12 s
        ("coordinate", "poisson", "secure"),
        ("l2", "fixed", "secure"),
        ("coordinate", "fixed", "exact"),
        ("l2", "poisson", "exact"),
    ],
)
def test_production_holds(clip, sampling, mode):
    """With the operating system's noise: fails without a fault once in 10,000 runs."""
    setting = synthetic(clip=clip, sampling=sampling, noise_mode=mode, draws=1000)
    report = audit(setting, production("auto", exact=setting.exact))
    assert report.holds, [check for check in report.checks if not check.holds]
    chance = [check for check in report.checks if check.confidence < 1]
    exact_sizes = 2 if sampling == "fixed" else 0  # a fixed size leaves nothing to chance
    assert len(chance) == COMMON - exact_sizes + PER_RELATION * len(setting.relations)


def pairs(setting, target, alpha):
    probe = make_probe(setting, target)
    return [
        *(pair_check(setting, target, plan) for plan in setting.plans()),
        *(engine_pair_check(setting, target, probe, plan) for plan in setting.plans()),
    ]


def noise(setting, target, alpha):
    probe = make_probe(setting, target)
    return [*noise_checks(setting, target, alpha), *engine_noise_checks(setting, target, probe, alpha)]


def batches(setting, target, alpha):
    probe = make_probe(setting, target)
    return [*sampler_checks(setting, target, alpha), *engine_sampler_checks(setting, probe, alpha)]


# The questions that are there for each mistake, and which of them must see it, in the mechanism and in a run's engine.
CAUGHT_BY = {
    "sensitivity": (pairs, {"pair, replace-one", "engine: pair, replace-one"}),
    "noise": (noise, {"noise: law", "engine: noise"}),
    "noise-missing": (noise, {"noise: law", "engine: noise"}),
    "clip": (pairs, {"pair, add-remove", "engine: pair, add-remove"}),
    "mean": (pairs, {"pair, add-remove", "pair, replace-one"}),
    "seed": (noise, {"engine: keys"}),
    "seed-reused": (noise, {"engine: keys"}),
    "sampling": (batches, {"sampler: steps", "engine: steps"}),
    "sampling-fixed": (batches, {"sampler: batch sizes", "engine: batch sizes"}),
}


@pytest.mark.parametrize(("name", "clip"), [*zip(plants.PLANTS, itertools.cycle(["coordinate", "l2"]))])
def test_every_plant_is_caught(name, clip):
    """At the false-alarm rate of a whole audit; over seeds 1 to 8 each mistake was caught 8 times."""
    setting = synthetic(clip=clip, draws=200, noise_mode="seeded")
    alpha = setting.false_alarm / (COMMON + PER_RELATION * len(setting.relations))
    questions, wanted = CAUGHT_BY[name]
    checks = questions(setting, plants.plant(name, production("auto", exact=False)), alpha)
    assert {check.name for check in checks if not check.holds} >= wanted


def test_an_unknown_plant_is_an_error():
    with pytest.raises(ConfigError, match="sensitivity"):
        plants.plant("sensitivty", production("auto", exact=False))


def test_canaries_hold_on_production_and_see_noise_that_is_missing():
    setting = synthetic(noise_mode="seeded")
    target = production("auto", exact=False)
    sound = run_checks(setting, target, 1e-5)
    assert all(check.holds for check in sound)
    assert sound[-1].lower_bound > 0.2

    def faint(chunks, plan, noise, on_grid):
        return noisy_mean(chunks, replace(plan, noise_multiplier=plan.noise_multiplier / 6), noise, on_grid=on_grid)

    broken = run_checks(setting, plants._broken(target, release=faint), 1e-5)
    assert broken[-1].lower_bound > broken[-1].claimed


def test_noise_keyed_by_the_mask_is_seen_in_a_run():
    setting = synthetic()
    checks = run_checks(setting, plants.plant("seed", production("auto", exact=False)), 1e-5)
    assert [check.name for check in checks if not check.holds] == ["run: keys"]


def release_questions(setting, target, alpha):
    return [
        *(mu_check(setting, target, plan, alpha) for plan in setting.plans()),
        *(epsilon_check(setting, target, plan, alpha) for plan in setting.plans()),
        *noise_checks(setting, target, alpha),
        *sampler_checks(setting, target, alpha),
    ]


def engine_questions(setting, target, alpha):
    probe = make_probe(setting, target)
    return [
        *(engine_mu_check(setting, target, probe, plan, alpha) for plan in setting.plans()),
        *engine_noise_checks(setting, target, probe, alpha),
        *engine_sampler_checks(setting, probe, alpha),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("questions", "of_fit"),
    [
        (release_questions, ("noise: size", "noise: coordinates", "sampler: batch sizes")),
        (engine_questions, ("engine: keys", "engine: steps")),
    ],
)
def test_false_alarms_come_no_oftener_than_stated(questions, of_fit):
    """100 audits with α = 0.1 for each question. A question alarms more often than 27 times with a chance below 1e-6;
    one that alarms three times too often does so with a chance of 0.7, four times too often with one of 0.99. The union
    of all stays within the sum of their shares; the questions of fit must alarm now and then."""
    repetitions, alpha = 100, 0.1
    target = production("auto", exact=False)
    alarms: Counter[str] = Counter()
    for seed in range(repetitions):
        # The rate is promised for any number of draws: the fewest that are allowed.
        setting = synthetic(noise_mode="seeded", seed=seed, draws=100)
        alarms.update(check.name for check in questions(setting, target, alpha) if not check.holds)
    limit = stats.binom.isf(1e-6, repetitions, alpha)
    assert all(count <= limit for count in alarms.values()), alarms
    for name in of_fit:
        assert alarms[name] > 0, f"{name} never alarmed at 10 %: it cannot fail"


@pytest.mark.slow
def test_the_mechanism_of_a_config(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        "[federation]\nagents = 4\nrounds = 2\nper_round = 4\n[algorithm]\ncompression = 0.3\nbatch = 20\n"
        '[privacy]\nnoise_multiplier = 1.3\nclip = "coordinate"\nclip_value = 0.02\nclip_rule = "quantile"\n'
    )
    setting = from_config(path, draws=500)
    assert setting.plan.clip_rule == "quantile"
    assert setting.plan.batch == 20
    report = audit(setting, production(setting.engine, exact=setting.exact))
    assert report.holds, [check for check in report.checks if not check.holds]
    assert report.notes  # seeded is the simulator's default, and no protection


def test_a_config_without_a_claim_is_refused(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[algorithm]\nname = "fedavg"\n')
    with pytest.raises(ConfigError, match="promises no privacy"):
        from_config(path)
