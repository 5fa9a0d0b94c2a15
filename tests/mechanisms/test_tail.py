"""Noise ends somewhere, and the accounting counts it: what lies beyond is impossible under one of two neighbours."""

from __future__ import annotations

import math
from typing import Any

import chacha
import mpmath
import numpy as np
import pytest

from fedspa.mechanisms.gaussian import exact
from fedspa.mechanisms.gaussian.plan import RADIUS_BITS, TAIL, GaussianEvent, noise_multiplier, truncation_delta
from fedspa.privacy import accounting, filter
from fedspa.privacy.event import Neighbours, Sampling
from fedspa.randomness.streams import Stream


def test_the_samplers_end_no_earlier(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least radius but one is drawn within `TAIL`, the least beyond: no draw that is wider was left out. The angles
    are 0 but for the bits that they lend."""
    words = np.array([0, 0, 1, 0], dtype=np.uint64)  # radii, then angles
    monkeypatch.setattr(Stream, "uint64", lambda self, n: words)
    values = Stream(bytes(32)).gaussian(4)
    assert values[0] < TAIL < values[1]
    halves = np.zeros((16, chacha.LANES), dtype=np.uint32)  # low and high, of a radius and an angle, four times
    halves[2] = 1
    monkeypatch.setattr(chacha, "block_words", lambda *_: halves)
    drawn = chacha.ChaChaNoise(bytes(32)).gaussian(chacha.GROUP).reshape(8, -1)
    assert (drawn[0] < TAIL).all()
    assert (drawn[2] > TAIL).all()
    assert np.allclose(drawn[[0, 2], 0], values[:2], rtol=1e-15)
    assert exact._LAST_SIGMA > TAIL


@pytest.mark.parametrize(
    "shift",
    [
        0.3,
        2.5,
        5.0,
    ],
)
def test_one_pair_that_is_moved_as_far_as_can_be(shift: float) -> None:
    """By integration over a disc that ends: the mass within T of the centre and beyond T of the other one."""
    with mpmath.workdps(30):
        end = mpmath.mpf(TAIL)

        def ring(radius: mpmath.mpf) -> mpmath.mpf:
            """Of a circle around the centre, the part that is beyond T of the other centre, which is `shift` away."""
            cosine = (end**2 - radius**2 - shift**2) / (2 * radius * shift)
            return radius * mpmath.exp(-(radius**2) / 2) * mpmath.acos(max(min(cosine, 1), -1)) / mpmath.pi

        truth = mpmath.quad(ring, mpmath.linspace(end - shift, end, 40))
    assert float(truth) <= truncation_delta(shift) <= 1000 * float(truth) + 5e-14 * shift


def test_however_a_record_spreads_its_bound() -> None:
    rng = np.random.default_rng(7)
    for _ in range(300):
        shift = rng.uniform(0.05, 8)
        moves = np.abs(rng.standard_normal(rng.integers(1, 2000)) ** rng.integers(1, 12))
        moves *= shift / np.linalg.norm(moves)
        chance = 2.0**-RADIUS_BITS * np.expm1(moves * TAIL - moves**2 / 2).sum()
        assert chance <= truncation_delta(shift)


@pytest.mark.parametrize(
    ("sampling", "neighbours"),
    [("poisson", "add-remove"), ("poisson", "replace-one"), ("fixed", "replace-one")],
)
@pytest.mark.parametrize("batch", [50, 99, 100])
def test_where_outcomes_are_impossible_there_is_no_epsilon(sampling: str, neighbours: Neighbours, batch: int) -> None:
    """One step of z = 0.19, or 0.38 where a record counts twice: 6·10⁻⁶ of the releases are proofs, half where half
    takes part. At δ = 10⁻⁶ that is no ε; at 10⁻³ it is one."""
    twice = neighbours == "replace-one" and not (sampling == "poisson" and batch <= 50)
    event = GaussianEvent(sampling, batch, 100, 1, 0.38 if twice else 0.19)  # type: ignore[arg-type]
    assert math.isinf(accounting.epsilon({event: 1}, 1e-6, neighbours=neighbours))
    assert accounting.epsilon({event: 1}, 1e-3, neighbours=neighbours) < 60
    assert math.isinf(filter.least_epsilon({event: 1}, 1e-6, neighbours))
    assert not filter.fits({event: 1}, 1e6, 1e-6, neighbours)
    assert filter.least_epsilon({event: 1}, 0.01, neighbours) < 60


def test_ordinary_plans_keep_their_epsilon() -> None:
    """What is taken off over ten thousand steps is less than a hundred-millionth of a δ of 10⁻³."""
    step = GaussianEvent("poisson", 10, 1000, 10_000, 1.0).step
    assert 10_000 * step.extra_delta("add-remove") < 1e-8 * 1e-3


@pytest.mark.parametrize(("participations", "delta"), [(100, 1e-5), (10_000, 1e-12)])
@pytest.mark.parametrize(("sampling", "neighbours"), [("poisson", "add-remove"), ("fixed", "replace-one")])
def test_the_end_of_the_noise_does_not_decide_how_much_of_it_is_taken(
    sampling: Sampling, neighbours: Neighbours, participations: int, delta: float
) -> None:
    """Up to a million steps, what calibration takes for ε = 1 costs ε = 1, and a hundredth less costs little more: no
    cliff is beside it."""
    shape: dict[str, Any] = {"sampling": sampling, "batch": 10, "records": 600, "steps": 100}
    noise = noise_multiplier(1.0, delta, **shape, participations=participations, neighbours=neighbours)
    own, less = (
        accounting.epsilon(
            {GaussianEvent(**shape, noise_multiplier=each): participations}, delta, neighbours=neighbours
        )
        for each in (noise, 0.99 * noise)
    )
    assert 0.99 < own <= 1.0 < less < 1.03
