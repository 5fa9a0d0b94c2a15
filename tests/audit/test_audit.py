"""The audit as a whole: holds on production, catches every plant, and cries wolf no oftener than it says."""

import hashlib
import itertools
from collections import Counter
from dataclasses import replace

import pytest
import torch
from scipy import stats

from fedspa.algorithms.fedspa import respond
from fedspa.audit.gaussian import GAUSSIAN, canaries, engine, release
from fedspa.audit.gaussian.target import broken, synthetic
from fedspa.audit.setting import FALSE_ALARM, Setting
from fedspa.audit.targets import of_config
from fedspa.errors import ConfigError
from fedspa.mechanisms.gaussian.release import noisy_mean

SEEDED = Setting("seeded")
# What a question of the default audit is given: 15 and 3 for each relation rest on chance.
ALPHA = FALSE_ALARM / 21


@pytest.mark.slow
@pytest.mark.parametrize(
    ("clip", "sampling", "mode"),
    [  # every pair of choices once; each takes 3 s, in the exact mode 12 s
        ("coordinate", "poisson", "secure"),
        ("l2", "fixed", "secure"),
        ("coordinate", "fixed", "exact"),
        pytest.param("l2", "poisson", "exact", marks=pytest.mark.long),
    ],
)
def test_production_holds(clip, sampling, mode):
    """With the operating system's noise: fails without a fault once in 10,000 runs."""
    target = synthetic(clip=clip, sampling=sampling)
    report = GAUSSIAN.audit(Setting(mode, draws=1000), target)
    assert report.holds, [check for check in report.checks if not check.holds]
    chance = [check for check in report.checks if check.confidence < 1]
    exact_sizes = 2 if sampling == "fixed" else 0  # a fixed size leaves nothing to chance
    assert len(chance) == 15 - exact_sizes + 3 * len(target.relations)
    assert sum(1 - check.confidence for check in chance) == pytest.approx(FALSE_ALARM)


def pairs(setting, target):
    for plan in target.plans():
        yield release.pair_question(setting, target, plan)
        yield engine.pair_question(setting, target, plan)


def noise(setting, target):
    return [*release.noise_questions(setting, target), *engine.noise_questions(setting, target)]


def batches(setting, target):
    return [*release.direct_sampler_questions(setting, target), *engine.update_sampler_questions(setting, target)]


def masks(setting, target):
    return [engine.mask_question(setting, target)]


# The questions that are there for each mistake, and which of them must see it, in the mechanism and in a run's engine.
CAUGHT_BY = {
    "sensitivity": (pairs, {"pair, replace-one", "engine: pair, replace-one"}),
    "noise": (noise, {"noise: law", "engine: noise"}),
    "noise-missing": (noise, {"noise: law", "engine: noise", "engine: law"}),
    "noise-shared": (noise, {"noise: coordinates", "engine: coordinates"}),
    "noise-repeated": (noise, {"engine: noise"}),
    "noise-empty": (noise, {"noise: size", "engine: noise", "engine: law"}),
    "clip": (pairs, {"pair, add-remove", "engine: pair, add-remove"}),
    "mean": (pairs, {"pair, add-remove", "pair, replace-one"}),
    "seed": (noise, {"engine: keys"}),
    "seed-reused": (noise, {"engine: keys"}),
    "sampling": (batches, {"sampler: steps", "engine: steps"}),
    "sampling-fixed": (batches, {"sampler: batch sizes", "engine: batch sizes"}),
    "sampling-rate": (batches, {"sampler: batch sizes", "sampler: steps", "engine: batch sizes", "engine: steps"}),
    "sampling-twice": (batches, {"sampler: twice", "engine: twice"}),
    "mask": (masks, {"engine: mask"}),
}


@pytest.mark.parametrize(("name", "clip"), [*zip(GAUSSIAN.plants, itertools.cycle(["coordinate", "l2"]))])
def test_every_plant_is_caught(name, clip):
    """At the false-alarm rate of a whole audit; over seeds 1 to 8 each mistake was caught 8 times."""
    questions, wanted = CAUGHT_BY[name]
    asked = questions(replace(SEEDED, draws=200), GAUSSIAN.planted(name, synthetic(clip=clip)))
    assert {question.name for question in asked if not question.answer(ALPHA).holds} >= wanted


def test_a_mask_whose_seed_the_records_choose_is_seen():
    """Though values and places fit together: the seed itself tells of the records."""

    def of_records(theta, terms, agents, made):
        seeds = [hashlib.blake2b(agent.x.numpy().tobytes(), digest_size=16).digest() for agent in agents]
        return respond(theta, terms, [replace(agent, mask_seed=seed) for agent, seed in zip(agents, seeds)], made)

    question = engine.mask_question(SEEDED, replace(synthetic(), respond=of_records))
    assert not question.answer(0.0).holds


@pytest.mark.parametrize("name", ["sampling-fixed", "sampling-rate"])
def test_a_plant_of_poisson_samples_is_refused_elsewhere(name):
    with pytest.raises(ConfigError, match="use --plant sampling"):
        GAUSSIAN.planted(name, synthetic(sampling="fixed"))


def test_an_unknown_plant_is_an_error():
    with pytest.raises(ConfigError, match="sensitivity"):
        GAUSSIAN.planted("sensitivty", synthetic())


def test_canaries_hold_on_production_and_see_noise_that_is_missing():
    *others, sound = (question.answer(1e-5) for question in canaries.run_questions(SEEDED, synthetic()))
    assert sound.holds
    assert all(check.holds for check in others)
    assert sound.lower_bound > 0.2

    def faint(chunks, plan, noise, on_grid):
        return noisy_mean(chunks, replace(plan, noise_multiplier=plan.noise_multiplier / 6), noise, on_grid=on_grid)

    loud = canaries.run_questions(SEEDED, broken(synthetic(), release=faint))[-1].answer(1e-5)
    assert loud.lower_bound > loud.claimed


@pytest.mark.parametrize("name", ["seed", "seed-reused"])
def test_noise_of_public_or_shared_keys_is_seen_in_a_run(name):
    questions = canaries.run_questions(Setting(), GAUSSIAN.planted(name, synthetic()))
    assert [question.name for question in questions if not question.answer(1e-5).holds] == ["run: keys"]


def test_a_run_that_the_server_refuses_is_a_failed_check():
    def far_off(chunks, plan, noise, on_grid):
        return torch.full((plan.active,), 1e9, dtype=torch.float64), plan.clip_value

    (check,) = (q.answer(0.0) for q in canaries.run_questions(SEEDED, broken(synthetic(), release=far_off)))
    assert (check.name, check.holds, check.confidence) == ("run: updates", False, 1.0)


def release_questions(setting, target):
    for plan in target.plans():
        yield release.mu_question(setting, target, plan)
        yield release.epsilon_question(setting, target, plan)
    yield from release.noise_questions(setting, target)
    yield from release.direct_sampler_questions(setting, target)


def engine_questions(setting, target):
    yield from (engine.mu_question(setting, target, plan) for plan in target.plans())
    yield engine.mask_question(setting, target)
    yield from engine.noise_questions(setting, target)
    yield from engine.update_sampler_questions(setting, target)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("questions", "of_fit"),
    [
        pytest.param(
            *(release_questions, ("noise: size", "noise: coordinates", "sampler: batch sizes")), marks=pytest.mark.long
        ),
        (engine_questions, ("engine: keys", "engine: steps")),
    ],
)
def test_false_alarms_come_no_oftener_than_stated(questions, of_fit):
    """100 audits with α = 0.1 for each question. A question alarms more often than 27 times with a chance below 1e-6;
    one that alarms three times too often does so with a chance of 0.7, four times too often with one of 0.99. The union
    of all stays within the sum of their shares; the questions of fit must alarm now and then."""
    repetitions, alpha = 100, 0.1
    alarms: Counter[str] = Counter()
    for seed in range(repetitions):
        # The rate is promised for any number of draws: the fewest that are allowed.
        asked = questions(Setting("seeded", seed=seed, draws=100), synthetic())
        alarms.update(question.name for question in asked if not question.answer(alpha).holds)
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
    mechanism, target, setting = of_config(path, ['privacy.noise="seeded"'], {}, 500, 0)
    assert mechanism is GAUSSIAN
    assert target.plan.clip_rule == "quantile"
    assert target.plan.batch == 20
    report = mechanism.audit(setting, target)
    assert report.holds, [check for check in report.checks if not check.holds]
    assert report.notes  # seeded noise is no protection


def test_a_config_without_a_claim_is_refused(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[algorithm]\nname = "fedavg"\n')
    with pytest.raises(ConfigError, match="promises no privacy"):
        of_config(path, [], {}, 500, 0)
