"""Noise, sampler, attacks and probe: each holds on production and sees its own mistakes, without the help of others.

Every test has fixed seeds (noise mode `seeded`); on production a check fails with chance 1e-5 for another seed.
"""

import math

import numpy as np
import pytest
import torch

from fedspa.audit.attacks import epsilon_check, mu_check, worst_neighbours
from fedspa.audit.batches import overlap_check, sampler_checks, shares_check, sizes_check
from fedspa.audit.noise import cosines, noise_checks
from fedspa.audit.plants import plant
from fedspa.audit.probe import (
    engine_mu_check,
    engine_noise_checks,
    engine_pair_check,
    engine_sampler_checks,
    make_probe,
)
from fedspa.audit.setting import synthetic
from fedspa.audit.target import Target, production
from fedspa.engine import native

ALPHA = 1e-5
TARGET = production("generic", exact=False)


def _failed(checks):
    return {check.name for check in checks if not check.holds}


def _engines():
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(32, 2))
    fast = [] if native.supports(module, (32,)) else ["native"]
    return ["generic", "reference", *fast]


class TestNoise:
    @pytest.mark.parametrize("mode", ["seeded", "exact"])
    @pytest.mark.parametrize("clip", ["coordinate", "l2"])
    def test_production_holds(self, mode, clip):
        setting = synthetic(noise_mode=mode, clip=clip, draws=1000)
        assert _failed(noise_checks(setting, TARGET, ALPHA)) == set()

    @pytest.mark.parametrize("name", ["noise", "noise-missing", "mean"])
    def test_plants_are_seen_in_its_size(self, name):
        setting = synthetic(noise_mode="seeded", draws=1000)
        assert "noise: size" in _failed(noise_checks(setting, plant(name, TARGET), ALPHA))

    def test_noise_that_all_coordinates_share_is_seen(self):
        def shared(chunks, plan, noise, on_grid):
            return torch.from_numpy(plan.sigma * noise.gaussian(1)).expand(plan.active), plan.clip_value

        setting = synthetic(noise_mode="seeded", draws=1000)
        target = Target(TARGET.batches, shared, TARGET.engine)
        assert "noise: coordinates" in _failed(noise_checks(setting, target, ALPHA))

    def test_uniform_noise_of_the_right_size_is_seen(self):
        def uniform(chunks, plan, noise, on_grid):
            values = (noise.uniform(plan.active) - 0.5) * math.sqrt(12) * plan.sigma
            return torch.from_numpy(values), plan.clip_value

        setting = synthetic(noise_mode="seeded", draws=1000)
        target = Target(TARGET.batches, uniform, TARGET.engine)
        assert _failed(noise_checks(setting, target, ALPHA)) == {"noise: law"}

    def test_cosines_see_a_vector_that_comes_twice(self):
        vectors = np.random.default_rng(0).normal(size=(20, 100))
        assert cosines("", vectors, ALPHA, "").holds
        vectors[3] = -vectors[17]
        assert cosines("", vectors, ALPHA, "").lower_bound == pytest.approx(1.0)
        assert not cosines("", vectors, ALPHA, "").holds


class TestSampler:
    @pytest.mark.parametrize("sampling", ["poisson", "fixed"])
    def test_production_holds(self, sampling):
        setting = synthetic(noise_mode="seeded", sampling=sampling, draws=2000)
        assert _failed(sampler_checks(setting, TARGET, ALPHA)) == set()

    def test_shuffled_epochs_are_seen_under_both_samplings(self):
        epochs = plant("sampling", TARGET)
        poisson = _failed(sampler_checks(synthetic(noise_mode="seeded", draws=500), epochs, ALPHA))
        fixed = _failed(sampler_checks(synthetic(noise_mode="seeded", draws=500, sampling="fixed"), epochs, ALPHA))
        assert poisson == {"sampler: batch sizes", "sampler: steps"}
        assert fixed == {"sampler: steps"}

    def test_fixed_sizes_are_seen_under_poisson(self):
        setting = synthetic(noise_mode="seeded", draws=500)
        assert _failed(sampler_checks(setting, plant("sampling-fixed", TARGET), ALPHA)) == {"sampler: batch sizes"}

    def test_a_record_drawn_too_often_is_seen(self):
        plan = synthetic().plan
        counts = np.full(plan.records, 500)
        assert shares_check("", plan, counts, 1000, ALPHA).holds
        counts[0] = 600
        assert not shares_check("", plan, counts, 1000, ALPHA).holds

    def test_overlaps_on_either_side_are_seen(self):
        plan = synthetic().plan
        expected = round(1000 * plan.records * plan.event.rate**2)
        assert overlap_check("", plan, expected, 1000, ALPHA).holds
        assert not overlap_check("", plan, round(0.9 * expected), 1000, ALPHA).holds
        assert not overlap_check("", plan, round(1.1 * expected), 1000, ALPHA).holds

    def test_one_batch_of_another_size_breaks_fixed(self):
        plan = synthetic(sampling="fixed").plan
        sizes = np.full(100, plan.batch)
        assert sizes_check("", plan, sizes, 1, ALPHA).holds
        sizes[7] += 1
        assert not sizes_check("", plan, sizes, 1, ALPHA).holds


class TestAttacks:
    @pytest.mark.parametrize(
        ("sampling", "neighbours"), [("poisson", "add-remove"), ("poisson", "replace-one"), ("fixed", "replace-one")]
    )
    def test_bounds_stay_below_the_claim_and_come_near(self, sampling, neighbours):
        setting = synthetic(noise_mode="seeded", sampling=sampling, neighbours=neighbours, draws=2000)
        mu = mu_check(setting, TARGET, setting.plan, ALPHA)
        epsilon = epsilon_check(setting, TARGET, setting.plan, ALPHA)
        assert mu.holds
        assert epsilon.holds
        assert mu.lower_bound > 0.6 * mu.claimed
        # Add-remove has nothing to show at δ = 0.1 and so few draws.
        assert epsilon.lower_bound > (0.25 * epsilon.claimed if neighbours == "replace-one" else -1)

    def test_the_papers_sensitivity_is_seen_by_mu(self):
        setting = synthetic(noise_mode="seeded", neighbours="replace-one", draws=2000)
        assert not mu_check(setting, plant("sensitivity", TARGET), setting.plan, ALPHA).holds

    def test_noise_too_small_is_seen_by_mu_and_epsilon(self):
        setting = synthetic(noise_mode="seeded", neighbours="replace-one", draws=5000)
        broken = plant("noise", TARGET)
        assert not mu_check(setting, broken, setting.plan, ALPHA).holds
        assert not epsilon_check(setting, broken, setting.plan, ALPHA).holds

    def test_a_sampler_that_takes_everyone_is_seen_by_epsilon(self):
        def everyone(plan, stream):
            while True:
                yield np.arange(plan.records)

        setting = synthetic(noise_mode="seeded", neighbours="replace-one", draws=2000)
        target = Target(everyone, TARGET.release, TARGET.engine)
        assert not epsilon_check(setting, target, setting.plan, ALPHA).holds

    def test_fixed_size_neighbours_pull_against_each_other(self):
        plan = synthetic(sampling="fixed").plan
        pair = worst_neighbours(plan, torch.Generator())
        assert torch.equal(pair.others, -pair.first)


class TestProbe:
    @pytest.mark.parametrize("engine", _engines())
    @pytest.mark.parametrize("clip", ["coordinate", "l2"])
    @pytest.mark.parametrize("neighbours", ["add-remove", "replace-one"])
    def test_pairs_attain_the_claim_through_every_engine(self, engine, clip, neighbours):
        setting = synthetic(noise_mode="seeded", clip=clip, neighbours=neighbours, engine=engine)
        target = production(engine, exact=False)
        check = engine_pair_check(setting, target, make_probe(setting, target), setting.plan)
        assert check.holds, check

    def test_exact_mode(self):
        setting = synthetic(noise_mode="exact", clip="l2", neighbours="replace-one")
        target = production("auto", exact=True)
        check = engine_pair_check(setting, target, make_probe(setting, target), setting.plan)
        assert check.holds, check

    @pytest.mark.parametrize("engine", _engines())
    def test_noise_keys_and_batches_hold(self, engine):
        setting = synthetic(noise_mode="seeded", engine=engine, draws=100)
        target = production(engine, exact=False)
        probe = make_probe(setting, target)
        checks = engine_noise_checks(setting, target, probe, ALPHA) + engine_sampler_checks(setting, probe, ALPHA)
        assert _failed(checks) == set()

    @pytest.mark.parametrize("name", ["seed", "seed-reused"])
    def test_noise_of_public_or_shared_keys_is_seen(self, name):
        setting = synthetic(noise_mode="seeded")
        target = plant(name, TARGET)
        assert "engine: keys" in _failed(engine_noise_checks(setting, target, make_probe(setting, target), ALPHA))

    def test_noise_repeated_in_every_step_is_seen(self):
        def frozen(chunks, plan, noise, on_grid):
            noise.seek(0)
            return TARGET.release(chunks, plan, noise, on_grid)

        from fedspa.audit.plants import _broken

        setting = synthetic(noise_mode="seeded")
        target = _broken(TARGET, release=frozen)
        assert "engine: noise" in _failed(engine_noise_checks(setting, target, make_probe(setting, target), ALPHA))

    @pytest.mark.parametrize("name", ["sampling", "sampling-fixed"])
    def test_wrong_samplers_are_seen_through_the_engine(self, name):
        setting = synthetic(noise_mode="seeded")
        probe = make_probe(setting, plant(name, TARGET))
        assert "engine: batch sizes" in _failed(engine_sampler_checks(setting, probe, ALPHA))

    def test_small_noise_is_seen_through_the_engine(self):
        setting = synthetic(noise_mode="seeded", neighbours="replace-one")
        target = plant("noise", TARGET)
        probe = make_probe(setting, target)
        assert not engine_noise_checks(setting, target, probe, ALPHA)[0].holds
        assert engine_mu_check(setting, target, probe, setting.plan, ALPHA).lower_bound > 1.8
