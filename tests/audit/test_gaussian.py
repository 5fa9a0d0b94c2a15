"""The audit of Gaussian noise: holds on production, catches every injected fault, and alarms no oftener than it says.

Most tests have fixed seeds (noise mode `seeded`); on production a check fails with chance 1e-5 for another seed.
"""

import hashlib
import itertools
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from faults import GAUSSIAN_FAULTS, broken
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedspa.algorithms.fedspa import respond
from fedspa.audit import gaussian, training
from fedspa.audit.gaussian import (
    GAUSSIAN,
    TOLERANCE,
    direct_sampler_questions,
    epsilon_question,
    mu_question,
    noise_questions,
    pair_question,
    synthetic,
    worst_neighbours,
)
from fedspa.audit.probes import worst_row
from fedspa.audit.run import FALSE_ALARM, Setting, of_config
from fedspa.engine import native
from fedspa.errors import ConfigError
from fedspa.mechanisms.clipping import CLIP_MARGIN
from fedspa.mechanisms.gaussian.release import noisy_mean
from fedspa.randomness.streams import Stream

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
        yield gaussian.pair_question(setting, target, plan)
        yield training.pair_question(setting, target, plan)


def noise(setting, target):
    return [*gaussian.noise_questions(setting, target), *training.noise_questions(setting, target)]


def batches(setting, target):
    return [*gaussian.direct_sampler_questions(setting, target), *training.update_sampler_questions(setting, target)]


def masks(setting, target):
    return [training.mask_question(setting, target)]


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


@pytest.mark.parametrize(("name", "clip"), [*zip(GAUSSIAN_FAULTS, itertools.cycle(["coordinate", "l2"]))])
def test_every_fault_is_caught(name, clip):
    """At the false-alarm rate of a whole audit; over seeds 1 to 8 each mistake was caught 8 times."""
    questions, wanted = CAUGHT_BY[name]
    asked = questions(replace(SEEDED, draws=200), GAUSSIAN_FAULTS[name](synthetic(clip=clip)))
    assert {question.name for question in asked if not question.answer(ALPHA).holds} >= wanted


def test_a_mask_whose_seed_the_records_choose_is_seen():
    """Though values and places fit together: the seed itself tells of the records."""

    def of_records(theta, terms, agents, made):
        seeds = [hashlib.blake2b(agent.x.numpy().tobytes(), digest_size=16).digest() for agent in agents]
        return respond(theta, terms, [replace(agent, mask_seed=seed) for agent, seed in zip(agents, seeds)], made)

    question = training.mask_question(SEEDED, replace(synthetic(), respond=of_records))
    assert not question.answer(0.0).holds


def test_canaries_hold_on_production_and_see_noise_that_is_missing():
    *others, sound = (question.answer(1e-5) for question in training.run_questions(SEEDED, synthetic()))
    assert sound.holds
    assert all(check.holds for check in others)
    assert sound.lower_bound > 0.2

    def faint(chunks, plan, noise, on_grid):
        return noisy_mean(chunks, replace(plan, noise_multiplier=plan.noise_multiplier / 6), noise, on_grid=on_grid)

    loud = training.run_questions(SEEDED, broken(synthetic(), release=faint))[-1].answer(1e-5)
    assert loud.lower_bound > loud.claimed


@pytest.mark.parametrize("name", ["seed", "seed-reused"])
def test_noise_of_public_or_shared_keys_is_seen_in_a_run(name):
    questions = training.run_questions(Setting(), GAUSSIAN_FAULTS[name](synthetic()))
    assert [question.name for question in questions if not question.answer(1e-5).holds] == ["run: keys"]


def test_a_run_that_the_server_refuses_is_a_failed_check():
    def far_off(chunks, plan, noise, on_grid):
        return torch.full((plan.active,), 1e9, dtype=torch.float64), plan.clip_value

    (check,) = (q.answer(0.0) for q in training.run_questions(SEEDED, broken(synthetic(), release=far_off)))
    assert (check.name, check.holds, check.confidence) == ("run: updates", False, 1.0)


def release_questions(setting, target):
    for plan in target.plans():
        yield gaussian.mu_question(setting, target, plan)
        yield gaussian.epsilon_question(setting, target, plan)
    yield from gaussian.noise_questions(setting, target)
    yield from gaussian.direct_sampler_questions(setting, target)


def engine_questions(setting, target):
    yield from (training.mu_question(setting, target, plan) for plan in target.plans())
    yield training.mask_question(setting, target)
    yield from training.noise_questions(setting, target)
    yield from training.update_sampler_questions(setting, target)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("questions", "of_fit", "repetitions"),
    [
        (engine_questions, (), 25),
        pytest.param(engine_questions, ("engine: keys", "engine: steps"), 100, marks=pytest.mark.long),
        pytest.param(
            *(release_questions, ("noise: size", "noise: coordinates", "sampler: batch sizes"), 100),
            marks=pytest.mark.long,
        ),
    ],
)
def test_false_alarms_come_no_more_often_than_stated(questions, of_fit, repetitions):
    """Audits with α = 0.1 for each question. Of 100, a question alarms more than 27 times with a chance below 1e-6; one
    that alarms three times too often does so with a chance of 0.7, four times too often with one of 0.99. The questions
    of fit must alarm now and then."""
    alpha = 0.1
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


SURE = 1e-5


def _setting(draws=5000, mode="seeded", engine="generic"):
    return Setting(mode, engine, draws)


def _failed(questions):
    return {question.name for question in questions if not question.answer(SURE).holds}


def faulty(name, **choices):
    return GAUSSIAN_FAULTS[name](synthetic(**choices))


def _engines():
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(32, 2))
    fast = [] if native.supports(module, (32,)) else ["native"]
    return ["generic", "traced", "reference", *fast]


@pytest.mark.parametrize("mode", ["seeded", "exact"])
@pytest.mark.parametrize("clip", ["coordinate", "l2"])
def test_noise_of_production_holds(mode, clip):
    assert _failed(noise_questions(_setting(1000, mode), synthetic(clip=clip))) == set()


def test_noise_that_all_coordinates_share_is_seen():
    def shared(chunks, plan, noise, on_grid):
        return torch.from_numpy(plan.sigma * noise.gaussian(1)).expand(plan.active), plan.clip_value

    target = replace(synthetic(), release=shared)
    assert "noise: coordinates" in _failed(noise_questions(_setting(1000), target))


def test_uniform_noise_of_the_right_size_is_seen():
    def uniform(chunks, plan, noise, on_grid):
        values = (noise.uniform(plan.active) - 0.5) * math.sqrt(12) * plan.sigma
        return torch.from_numpy(values), plan.clip_value

    target = replace(synthetic(), release=uniform)
    assert _failed(noise_questions(_setting(1000), target)) == {"noise: law"}


@pytest.mark.parametrize("sampling", ["poisson", "fixed"])
def test_batches_of_production_hold(sampling):
    assert _failed(direct_sampler_questions(_setting(2000), synthetic(sampling=sampling))) == set()


def test_shuffled_epochs_are_seen_under_both_samplings():
    poisson = _failed(direct_sampler_questions(_setting(500), faulty("sampling")))
    fixed = _failed(direct_sampler_questions(_setting(500), faulty("sampling", sampling="fixed")))
    assert poisson == {"sampler: batch sizes", "sampler: steps"}
    assert fixed == {"sampler: steps"}


@pytest.mark.parametrize(
    ("sampling", "neighbours"), [("poisson", "add-remove"), ("poisson", "replace-one"), ("fixed", "replace-one")]
)
def test_bounds_stay_below_the_claim_and_come_near(sampling, neighbours):
    target = synthetic(sampling=sampling, neighbours=neighbours)
    mu = mu_question(_setting(2000), target, target.plan).answer(SURE)
    epsilon = epsilon_question(_setting(2000), target, target.plan).answer(SURE)
    assert mu.holds
    assert epsilon.holds
    assert mu.lower_bound > 0.6 * mu.claimed
    # Add-remove has nothing to show at δ = 0.1 and so few draws.
    assert epsilon.lower_bound > (0.25 * epsilon.claimed if neighbours == "replace-one" else -1)


def test_the_papers_sensitivity_is_seen_by_mu():
    target = faulty("sensitivity", neighbours="replace-one")
    assert _failed([mu_question(_setting(2000), target, target.plan)])


def test_noise_too_small_is_seen_by_mu_and_epsilon():
    target = faulty("noise", neighbours="replace-one")
    assert _failed([mu_question(_setting(), target, target.plan)])
    assert _failed([epsilon_question(_setting(), target, target.plan)])


def test_a_sampler_that_takes_everyone_is_seen_by_epsilon():
    def everyone(plan, stream):
        while True:
            yield np.arange(plan.records)

    target = replace(synthetic(neighbours="replace-one"), batches=everyone)
    assert _failed([epsilon_question(_setting(2000), target, target.plan)])


def test_fixed_size_neighbours_pull_against_each_other():
    plan = synthetic(sampling="fixed").plan
    first, _, others = worst_neighbours(plan, torch.Generator())
    assert torch.equal(others, -first)


@pytest.mark.parametrize("engine", _engines())
@pytest.mark.parametrize("clip", ["coordinate", "l2"])
@pytest.mark.parametrize("neighbours", ["add-remove", "replace-one"])
def test_pairs_attain_the_claim_through_every_engine(engine, clip, neighbours):
    target = synthetic(clip=clip, neighbours=neighbours)
    check = training.pair_question(_setting(engine=engine), target, target.plan).answer(SURE)
    assert check.holds, check
    assert f"engine {engine}" in check.detail


def test_exact_mode():
    target = synthetic(clip="l2", neighbours="replace-one")
    check = training.pair_question(_setting(mode="exact", engine="auto"), target, target.plan).answer(SURE)
    assert check.holds, check


@pytest.mark.parametrize("engine", _engines())
def test_noise_keys_and_batches_hold(engine):
    setting, target = _setting(100, engine=engine), synthetic()
    assert (
        _failed(training.noise_questions(setting, target) + training.update_sampler_questions(setting, target)) == set()
    )


def test_small_noise_is_seen_through_the_engine():
    target = faulty("noise", neighbours="replace-one")
    assert "engine: noise" in _failed(training.noise_questions(_setting(), target))
    assert training.mu_question(_setting(), target, target.plan).answer(SURE).lower_bound > 1.8


def pair_check(target):
    """Without chance, hence at any alpha."""
    return pair_question(_setting(), target, target.plan).answer(0.0)


@pytest.mark.parametrize("neighbours", ["add-remove", "replace-one"])
def test_production_stays_within_its_sensitivity_and_attains_it(neighbours):
    check = pair_check(synthetic(neighbours=neighbours))
    assert check.holds, check
    assert check.lower_bound == pytest.approx(check.claimed, rel=TOLERANCE + CLIP_MARGIN)


def test_a_release_that_clips_too_tight_has_lost_the_test_its_reach():
    def tight(chunks, plan, noise, on_grid):
        return noisy_mean((rows * 0 for rows in chunks), plan, noise, on_grid=on_grid)

    check = pair_check(replace(synthetic(neighbours="add-remove"), release=tight))
    assert not check.holds
    assert "reach" in check.detail


def test_a_release_that_gives_nan_does_not_hold():
    def not_a_number(chunks, plan, noise, on_grid):
        return torch.full((plan.active,), torch.nan, dtype=torch.float64), plan.clip_value

    assert not pair_check(replace(synthetic(neighbours="add-remove"), release=not_a_number)).holds


@given(
    clip=st.sampled_from(["coordinate", "l2"]),
    clip_value=st.floats(1e-6, 1e6),
    on_grid=st.booleans(),
    rows=st.lists(st.lists(st.floats(width=32), min_size=16, max_size=16), min_size=1, max_size=5),
    size=st.integers(1, 5),
)
def test_any_row_added_moves_the_release_by_no_more_than_the_sensitivity(clip, clip_value, on_grid, rows, size):
    plan = synthetic(clip=clip, neighbours="add-remove").plan.with_clip_value(clip_value)
    batch = torch.tensor(rows, dtype=torch.float32)
    whole, _ = noisy_mean(batch.split(size), plan, Stream(bytes(32)), on_grid=on_grid)
    without, _ = noisy_mean([batch[1:]], plan, Stream(bytes(32)), on_grid=on_grid)
    # Float64 sums around noise of this size: their own rounding is 1e-15 of it.
    assert float((whole - without).norm()) * plan.batch <= plan.sensitivity * (1 + TOLERANCE)


@pytest.mark.parametrize("clip", ["coordinate", "l2"])
def test_the_worst_row_lies_on_the_bound(clip):
    plan = synthetic(clip=clip).plan
    assert float(worst_row(plan, torch.Generator()).norm()) == pytest.approx(plan.clip_norm, rel=1e-6)


@pytest.mark.parametrize("clip_value", [1.0, 1e-3, 1e-6])
def test_the_largest_floats_are_clipped_to_the_bound_too(clip_value):
    """The factor that shrinks such a row may fall among the subnormal floats, which have few digits."""
    plan = synthetic(clip="l2", neighbours="add-remove").plan.with_clip_value(clip_value)
    nothing, _ = noisy_mean([], plan, Stream(bytes(32)))
    for size in torch.linspace(3e37, 3e38, 50).tolist():
        moved, _ = noisy_mean([torch.full((1, plan.active), size)], plan, Stream(bytes(32)))
        assert float((moved - nothing).norm()) * plan.batch <= plan.sensitivity * (1 + TOLERANCE)
