"""The pair test holds on the production release, whatever the rows, and sees each mistake that it is made for."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedspa.audit.gaussian import GAUSSIAN
from fedspa.audit.gaussian.release import TOLERANCE, pair_question
from fedspa.audit.gaussian.target import synthetic
from fedspa.audit.rows import worst_row
from fedspa.audit.setting import Setting
from fedspa.mechanisms.clipping import CLIP_MARGIN
from fedspa.mechanisms.gaussian.release import noisy_mean
from fedspa.randomness.streams import Stream

SETTING = Setting("seeded", "generic")


def pair_check(target):
    """Without chance, hence at any alpha."""
    return pair_question(SETTING, target, target.plan).answer(0.0)


@pytest.mark.parametrize("neighbours", ["add-remove", "replace-one"])
def test_production_stays_within_its_sensitivity_and_attains_it(neighbours):
    check = pair_check(synthetic(neighbours=neighbours))
    assert check.holds, check
    assert check.lower_bound == pytest.approx(check.claimed, rel=TOLERANCE + CLIP_MARGIN)


@pytest.mark.parametrize(
    ("name", "neighbours"),
    [
        ("sensitivity", "replace-one"),
        ("clip", "add-remove"),
        ("clip", "replace-one"),
        ("mean", "add-remove"),
        ("mean", "replace-one"),
    ],
)
def test_plants_pass_the_claim(name, neighbours):
    check = pair_check(GAUSSIAN.planted(name, synthetic(neighbours=neighbours)))
    assert check.lower_bound > 1.4 * check.claimed
    assert not check.holds


def test_a_release_that_clips_too_tight_has_lost_the_test_its_reach():
    def tight(chunks, plan, noise, on_grid):
        return noisy_mean((rows * 0 for rows in chunks), plan, noise, on_grid=on_grid)

    check = pair_check(replace(synthetic(neighbours="add-remove"), release=tight))
    assert not check.holds
    assert "reach" in check.detail


def test_a_release_that_gives_nan_does_not_hold():
    def broken(chunks, plan, noise, on_grid):
        return torch.full((plan.active,), torch.nan, dtype=torch.float64), plan.clip_value

    assert not pair_check(replace(synthetic(neighbours="add-remove"), release=broken)).holds


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
