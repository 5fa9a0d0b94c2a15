"""Noise, sampler, attacks and probe: each holds on production and sees its own mistakes, without the help of others.

Every test has fixed seeds (noise mode `seeded`); on production a check fails with chance 1e-5 for another seed.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from fedspa.audit.gaussian import GAUSSIAN
from fedspa.audit.gaussian import engine as updates
from fedspa.audit.gaussian.release import (
    direct_sampler_questions,
    epsilon_question,
    mu_question,
    noise_questions,
    worst_neighbours,
)
from fedspa.audit.gaussian.target import broken, synthetic
from fedspa.audit.questions import (
    columns,
    cosines,
    law_question,
    overlap_question,
    sampler_questions,
    shares_question,
    sizes_question,
)
from fedspa.audit.setting import Setting
from fedspa.engine import native
from fedspa.mechanisms.gaussian.release import noisy_mean

ALPHA = 1e-5


def _setting(draws=5000, mode="seeded", engine="generic"):
    return Setting(mode, engine, draws)


def _failed(questions):
    return {question.name for question in questions if not question.answer(ALPHA).holds}


def plant(name, **choices):
    return GAUSSIAN.planted(name, synthetic(**choices))


def _engines():
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(32, 2))
    fast = [] if native.supports(module, (32,)) else ["native"]
    return ["generic", "traced", "reference", *fast]


class TestNoise:
    @pytest.mark.parametrize("mode", ["seeded", "exact"])
    @pytest.mark.parametrize("clip", ["coordinate", "l2"])
    def test_production_holds(self, mode, clip):
        assert _failed(noise_questions(_setting(1000, mode), synthetic(clip=clip))) == set()

    @pytest.mark.parametrize("name", ["noise", "noise-missing", "mean"])
    def test_plants_are_seen_in_its_size(self, name):
        assert "noise: size" in _failed(noise_questions(_setting(1000), plant(name)))

    def test_noise_that_all_coordinates_share_is_seen(self):
        def shared(chunks, plan, noise, on_grid):
            return torch.from_numpy(plan.sigma * noise.gaussian(1)).expand(plan.active), plan.clip_value

        target = replace(synthetic(), release=shared)
        assert "noise: coordinates" in _failed(noise_questions(_setting(1000), target))

    def test_uniform_noise_of_the_right_size_is_seen(self):
        def uniform(chunks, plan, noise, on_grid):
            values = (noise.uniform(plan.active) - 0.5) * math.sqrt(12) * plan.sigma
            return torch.from_numpy(values), plan.clip_value

        target = replace(synthetic(), release=uniform)
        assert _failed(noise_questions(_setting(1000), target)) == {"noise: law"}

    def test_cosines_see_a_vector_that_comes_twice(self):
        vectors = np.random.default_rng(0).normal(size=(20, 100))
        assert cosines("", vectors, "").answer(ALPHA).holds
        vectors[3] = -vectors[17]
        assert cosines("", vectors, "").answer(ALPHA).lower_bound == pytest.approx(1.0)
        assert not cosines("", vectors, "").answer(ALPHA).holds

    def test_a_large_models_coordinates_are_looked_at_to_the_last(self):
        draws = np.random.default_rng(0).normal(size=(100, 1000))
        assert columns("", draws).answer(ALPHA).holds
        draws[:, 999] = draws[:, 998]
        assert not columns("", draws).answer(ALPHA).holds

    @pytest.mark.parametrize("law", [stats.norm, stats.binom(5, 0.5)])
    def test_the_distance_from_a_law_is_that_of_kolmogorov_and_smirnov(self, law):
        """Of a discrete law too, whose distribution function jumps; scipy's own is for continuous laws."""
        values = law.rvs(size=300, random_state=1)
        grid = np.concatenate([values, np.nextafter(values, -np.inf)])
        expected = max(abs((values <= point).mean() - law.cdf(point)) for point in grid)
        seen = law_question("", law, [values], "").answer(ALPHA)
        assert seen.lower_bound == pytest.approx(expected)
        assert seen.claimed == pytest.approx(math.sqrt(math.log(2 / ALPHA) / 600))

    def test_the_worst_of_several_samples_counts(self):
        samples = [stats.norm.rvs(size=2000, random_state=1), stats.norm.rvs(size=500, random_state=2) + 0.5]
        seen = law_question("", stats.norm, samples, "").answer(ALPHA)
        assert not seen.holds
        assert seen.claimed == pytest.approx(math.sqrt(math.log(4 / ALPHA) / 1000))


class TestSampler:
    @pytest.mark.parametrize("sampling", ["poisson", "fixed"])
    def test_production_holds(self, sampling):
        assert _failed(direct_sampler_questions(_setting(2000), synthetic(sampling=sampling))) == set()

    def test_shuffled_epochs_are_seen_under_both_samplings(self):
        poisson = _failed(direct_sampler_questions(_setting(500), plant("sampling")))
        fixed = _failed(direct_sampler_questions(_setting(500), plant("sampling", sampling="fixed")))
        assert poisson == {"sampler: batch sizes", "sampler: steps"}
        assert fixed == {"sampler: steps"}

    def test_fixed_sizes_are_seen_under_poisson(self):
        assert _failed(direct_sampler_questions(_setting(500), plant("sampling-fixed"))) == {"sampler: batch sizes"}

    def test_a_record_drawn_too_often_is_seen(self):
        plan = synthetic().plan
        counts = np.full(plan.records, 500)
        assert shares_question("", plan, counts, 1000).answer(ALPHA).holds
        counts[0] = 600
        assert not shares_question("", plan, counts, 1000).answer(ALPHA).holds

    def test_overlaps_on_either_side_are_seen(self):
        plan = synthetic().plan
        expected = round(1000 * plan.records * plan.event.rate**2)
        assert overlap_question("", plan, expected, 1000).answer(ALPHA).holds
        assert not overlap_question("", plan, round(0.9 * expected), 1000).answer(ALPHA).holds
        assert not overlap_question("", plan, round(1.1 * expected), 1000).answer(ALPHA).holds

    @pytest.mark.parametrize(("records", "batch", "pairs"), [(32, 1, 150), (32, 2, 150), (16, 8, 200)])
    def test_overlaps_of_fixed_batches_alarm_no_oftener_than_stated(self, records, batch, pairs):
        """At the rate of a single question, by the exact law of the sum: a normal law in its place alarms on batches of
        one 15 times too often."""
        plan = replace(synthetic(sampling="fixed").plan, records=records, batch=batch)
        one = stats.hypergeom(records, batch, batch).pmf(np.arange(batch + 1))
        law = np.fft.irfft(np.fft.rfft(one, pairs * batch + 1) ** pairs, pairs * batch + 1)
        alarming = [
            not overlap_question("", plan, both, pairs).answer(ALPHA).holds for both in range(pairs * batch + 1)
        ]
        assert 0 < law[alarming].sum() <= ALPHA

    @pytest.mark.parametrize(("records", "batch", "draws"), [(64, 2, 150), (60_000, 1, 100), (64, 32, 150)])
    def test_sizes_of_poisson_batches_alarm_no_oftener_than_stated(self, records, batch, draws):
        """χ² over cells of some ten expected batches alarmed up to three times as often as its law says."""
        plan = replace(synthetic().plan, records=records, batch=batch, delta=1e-6)
        rng, alpha, audits = np.random.default_rng(0), 1e-2, 400
        drawn = rng.binomial(records, plan.event.rate, size=(audits, draws))
        alarms = sum(not sizes_question("", plan, sizes, 1).answer(alpha).holds for sizes in drawn)
        assert alarms <= stats.binom.isf(1e-6, audits, alpha)

    @pytest.mark.parametrize("parts", [1, 2])
    def test_a_record_that_is_twice_in_one_batch_is_seen(self, parts):
        """Whatever the sizes: one of 100 pairs of steps is enough."""
        drawn = np.zeros((parts, 100, 16), dtype=np.int64)
        drawn[:, :, :4] = 2 // parts
        (sound,) = (q for q in sampler_questions("", synthetic().plan, drawn) if q.name == ": twice")
        assert sound.answer(0.0).holds
        drawn[0, 7, 3] += 1
        (twice,) = (q for q in sampler_questions("", synthetic().plan, drawn) if q.name == ": twice")
        assert not twice.answer(0.0).holds

    def test_one_batch_of_another_size_breaks_fixed(self):
        plan = synthetic(sampling="fixed").plan
        sizes = np.full(100, plan.batch)
        assert sizes_question("", plan, sizes, 1).answer(ALPHA).holds
        sizes[7] += 1
        assert not sizes_question("", plan, sizes, 1).answer(ALPHA).holds


class TestAttacks:
    @pytest.mark.parametrize(
        ("sampling", "neighbours"), [("poisson", "add-remove"), ("poisson", "replace-one"), ("fixed", "replace-one")]
    )
    def test_bounds_stay_below_the_claim_and_come_near(self, sampling, neighbours):
        target = synthetic(sampling=sampling, neighbours=neighbours)
        mu = mu_question(_setting(2000), target, target.plan).answer(ALPHA)
        epsilon = epsilon_question(_setting(2000), target, target.plan).answer(ALPHA)
        assert mu.holds
        assert epsilon.holds
        assert mu.lower_bound > 0.6 * mu.claimed
        # Add-remove has nothing to show at δ = 0.1 and so few draws.
        assert epsilon.lower_bound > (0.25 * epsilon.claimed if neighbours == "replace-one" else -1)

    def test_the_papers_sensitivity_is_seen_by_mu(self):
        target = plant("sensitivity", neighbours="replace-one")
        assert _failed([mu_question(_setting(2000), target, target.plan)])

    def test_noise_too_small_is_seen_by_mu_and_epsilon(self):
        target = plant("noise", neighbours="replace-one")
        assert _failed([mu_question(_setting(), target, target.plan)])
        assert _failed([epsilon_question(_setting(), target, target.plan)])

    def test_a_sampler_that_takes_everyone_is_seen_by_epsilon(self):
        def everyone(plan, stream):
            while True:
                yield np.arange(plan.records)

        target = replace(synthetic(neighbours="replace-one"), batches=everyone)
        assert _failed([epsilon_question(_setting(2000), target, target.plan)])

    def test_fixed_size_neighbours_pull_against_each_other(self):
        plan = synthetic(sampling="fixed").plan
        first, _, others = worst_neighbours(plan, torch.Generator())
        assert torch.equal(others, -first)


class TestProbe:
    @pytest.mark.parametrize("engine", _engines())
    @pytest.mark.parametrize("clip", ["coordinate", "l2"])
    @pytest.mark.parametrize("neighbours", ["add-remove", "replace-one"])
    def test_pairs_attain_the_claim_through_every_engine(self, engine, clip, neighbours):
        target = synthetic(clip=clip, neighbours=neighbours)
        check = updates.pair_question(_setting(engine=engine), target, target.plan).answer(ALPHA)
        assert check.holds, check
        assert f"engine {engine}" in check.detail

    def test_exact_mode(self):
        target = synthetic(clip="l2", neighbours="replace-one")
        check = updates.pair_question(_setting(mode="exact", engine="auto"), target, target.plan).answer(ALPHA)
        assert check.holds, check

    @pytest.mark.parametrize("engine", _engines())
    def test_noise_keys_and_batches_hold(self, engine):
        setting, target = _setting(100, engine=engine), synthetic()
        assert (
            _failed(updates.noise_questions(setting, target) + updates.update_sampler_questions(setting, target))
            == set()
        )

    @pytest.mark.parametrize("name", ["seed", "seed-reused"])
    def test_noise_of_public_or_shared_keys_is_seen(self, name):
        assert "engine: keys" in _failed(updates.noise_questions(_setting(), plant(name)))

    def test_noise_repeated_in_every_step_is_seen(self):
        def frozen(chunks, plan, noise, on_grid):
            noise.seek(0)
            return noisy_mean(chunks, plan, noise, on_grid=on_grid)

        assert "engine: noise" in _failed(updates.noise_questions(_setting(), broken(synthetic(), release=frozen)))

    @pytest.mark.parametrize("name", ["sampling", "sampling-fixed"])
    def test_wrong_samplers_are_seen_through_the_engine(self, name):
        assert "engine: batch sizes" in _failed(updates.update_sampler_questions(_setting(), plant(name)))

    def test_small_noise_is_seen_through_the_engine(self):
        target = plant("noise", neighbours="replace-one")
        assert "engine: noise" in _failed(updates.noise_questions(_setting(), target))
        assert updates.mu_question(_setting(), target, target.plan).answer(ALPHA).lower_bound > 1.8
