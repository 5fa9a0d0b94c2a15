"""cpSGD's accounting: by hand, by brute force, and by its laws."""

from __future__ import annotations

import math
from dataclasses import replace

import mpmath
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedspa.algorithms.cpsgd import accounting as binomial
from fedspa.algorithms.cpsgd.accounting import (
    amplified,
    composed_epsilon,
    release_epsilon,
    sensitivity,
)
from fedspa.algorithms.cpsgd.event import BinomialEvent
from fedspa.errors import PrivacyError
from fedspa.mechanisms.gaussian.event import GaussianEvent
from fedspa.privacy import accounting
from fedspa.privacy.event import Event

# B = 10 of m = 600, d = 100, 4 levels, 10,000 trials, no rotation, local.
EVENT = BinomialEvent(
    batch=10, records=600, steps=1, dimension=100, bits=2, trials=10_000, rotation=False, aggregated=1
)
DELTA = 1e-5
MNIST = BinomialEvent(
    batch=10, records=600, steps=1, dimension=21840, bits=1, trials=7130, rotation=False, aggregated=1
)


def test_sensitivities_by_hand() -> None:
    # r = √100·3/10 = 3; ‖x‖₁ ≤ √100·3 = 30; ln(2/δ) = ln 200,000 = 12.2061
    # Δ₁ = 30 + √(2·30·12.2061) + ⅔·12.2061 = 30 + 27.0622 + 8.1374 = 65.1996 (below d·⌈3/10⌉ = 100)
    # Δ∞ = ⌈3/10⌉ = 1; Δ₂ = min(3 + √65.1996 = 11.0746, √(65.1996·1) = 8.0746)
    moved = sensitivity(EVENT, DELTA)
    assert moved.l1 == pytest.approx(65.1996, abs=1e-4)
    assert moved.l2 == pytest.approx(8.0746, abs=1e-4)
    assert moved.largest == 1


def test_with_rotation_by_hand() -> None:
    # d = 100 is padded to 128; κ = √(2·ln(2·128·2¹⁰)) = √(2·12.4766) = 4.99533
    # r = √128·3/(10·4.99533) = 0.679460; ‖x‖₁ ≤ √128·0.679460 = 7.68718
    # Δ₁ = 7.68718 + √(2·7.68718·12.2061) + 8.13738 = 7.68718 + 13.69883 + 8.13738 = 29.52340; Δ∞ = ⌈0.679⌉ = 1
    # Δ₂ = min(0.679460 + 5.43354, √29.52340 = 5.43354)
    moved = sensitivity(replace(EVENT, rotation=True), DELTA)
    assert moved == pytest.approx((29.52340, 5.43354, 1), abs=1e-4)


def test_one_release_by_hand() -> None:
    # h = √(5000·ln(1000/10⁻⁵)) = √(5000·18.42068) = 303.485; u = 304.485/5000 = 0.060897; γ = u/(3(1 − u²)) = 0.020375
    # η = γ/2500 = 8.15·10⁻⁶; −ln(0.9·10⁻⁵) = 11.61829. At λ = 25 (the best is near): 1 − 25η = 0.999796,
    # mean 65.1996/5000 = 0.013040, spread (0.020375 + 25)·65.1996/(5000·0.999796) = 0.326330,
    # (11.61829 − ln 26)/25 = 0.334408, −ln(26/25) = −0.039221: together 0.634557
    assert 0.6345 < release_epsilon(EVENT, DELTA) < 0.634558


def test_composition_by_hand() -> None:
    # One participation: plain addition at δ/(2q) = 10⁻⁵·60/2 = 3·10⁻⁴, then ln(1 + (e^ε − 1)/60).
    once = amplified(release_epsilon(EVENT, 3e-4), 1 / 60)
    assert once == pytest.approx(math.log1p(math.expm1(release_epsilon(EVENT, 3e-4)) / 60), rel=1e-12)
    assert composed_epsilon({EVENT: 1}, 1e-5) == pytest.approx(once, rel=1e-6)
    # Many: half of δ for composition is one of the ways that are tried, so that the result is no larger.
    n, delta = 1000, 1e-3
    each = amplified(release_epsilon(EVENT, delta / 2 / n * 30), 1 / 60)
    by_hand = math.sqrt(2 * n * math.log(2 / delta)) * each + n * each * math.expm1(each)
    assert composed_epsilon({EVENT: n}, delta) <= by_hand * (1 + 1e-8)
    assert composed_epsilon({EVENT: n}, delta) < n * each


def test_the_papers_settings() -> None:
    """MNIST's CNN, p = 0.4 (two levels, 7,130 trials): 38.4 in local DP, 0.17 only under secure aggregation."""
    assert composed_epsilon({MNIST: 45}, 1e-3) == pytest.approx(38.4, abs=0.1)
    assert composed_epsilon({replace(MNIST, aggregated=100): 45}, 1e-3) == pytest.approx(0.169, abs=0.001)


def test_where_noise_can_run_out_there_is_no_epsilon() -> None:
    # h + 1 < 2v at δ = 10⁻³·60/(2·45) of a release takes v of about ½·ln(10·21840/δ) = 9.8, and a little for the 1.
    assert composed_epsilon({replace(MNIST, trials=40): 45}, 1e-3) == math.inf
    assert composed_epsilon({replace(MNIST, trials=50): 45}, 1e-3) < math.inf
    assert composed_epsilon({MNIST: 1, replace(MNIST, trials=7): 1}, 1e-3) == math.inf


EVENTS = st.builds(
    BinomialEvent,
    batch=st.integers(1, 50),
    records=st.integers(50, 5000),
    steps=st.just(1),
    dimension=st.integers(1, 10**6),
    bits=st.integers(1, 10),
    trials=st.integers(1, 10**7),
    rotation=st.booleans(),
    aggregated=st.sampled_from([1, 10, 1000]),
)


@given(EVENTS, st.sampled_from([1e-6, 1e-3]), st.integers(1, 200))
@settings(max_examples=200, deadline=None)
def test_more_noise_costs_less_and_more_of_anything_else_costs_more(
    event: BinomialEvent, delta: float, times: int
) -> None:
    cost = composed_epsilon({event: times}, delta)
    assert cost > 0
    assert composed_epsilon({replace(event, trials=2 * event.trials): times}, delta) <= cost
    assert composed_epsilon({replace(event, aggregated=event.aggregated + 1): times}, delta) <= cost
    assert composed_epsilon({event: times}, 2 * delta) <= cost
    assert composed_epsilon({event: times + 1}, delta) >= cost
    if not event.rotation:
        assert composed_epsilon({replace(event, dimension=event.dimension + 1): times}, delta) >= cost
        assert composed_epsilon({replace(event, bits=event.bits + 1): times}, delta) >= cost
    if event.records > event.batch:
        assert composed_epsilon({replace(event, records=event.records - 1): times}, delta) >= cost


@pytest.mark.parametrize("rotation", [False, True])
@pytest.mark.parametrize(("bits", "batch"), [(1, 1), (1, 10), (4, 10), (6, 3)])
def test_rounded_neighbours_stay_within_the_sensitivities(rotation: bool, bits: int, batch: int) -> None:
    """Worst and random neighbours with the same coins. At δ = 10⁻⁶ a bound is passed in 500 trials with chance 10⁻³;
    Δ∞ is never passed."""
    event = replace(EVENT, batch=batch, bits=bits, rotation=rotation, dimension=64)
    moved, top = sensitivity(event, 1e-6), 2**bits - 1
    generator = np.random.default_rng(7)
    reach = top / (batch * binomial.spread(event)) * math.sqrt(64)  # ‖x‖₂ ≤ r
    furthest = np.zeros(3)
    for trial in range(500):
        direction = np.ones(64) if trial % 2 == 0 else generator.normal(size=64)
        direction = np.clip(direction, -1, 1) / 8 if not rotation else direction / np.linalg.norm(direction)
        x = reach * direction
        start = np.clip(generator.uniform(0, top, 64), np.maximum(0, -x), np.minimum(top, top - x))
        coins = generator.uniform(size=64)
        distance = np.floor(start + x + coins) - np.floor(start + coins)
        norms = [np.abs(distance).sum(), np.linalg.norm(distance), np.abs(distance).max()]
        furthest = np.maximum(furthest, norms)
    assert (furthest <= np.array(moved) * (1 + 1e-12)).all()
    assert furthest[1] >= moved.l2 / 4  # and they are not far from it


def test_gaussian_and_binomial_add_up() -> None:
    """With rotation each kind is priced at δ/2; without, one accountant composes both, at less than their sum."""
    gaussian, rotated = GaussianEvent("fixed", 10, 600, 1, 2.0), replace(EVENT, rotation=True)

    def cost(events: dict[Event, int], delta: float) -> float:
        return accounting.epsilon(events, delta, neighbours="replace-one")

    assert cost({rotated: 45}, 1e-3) == composed_epsilon({rotated: 45}, 1e-3)
    assert cost({gaussian: 5, rotated: 45}, 1e-3) == cost({gaussian: 5}, 5e-4) + cost({rotated: 45}, 5e-4)
    alone = cost({gaussian: 5}, 1e-3), cost({EVENT: 45}, 1e-3)
    assert max(alone) < cost({gaussian: 5, EVENT: 45}, 1e-3) < sum(alone)
    assert cost({gaussian: 5, EVENT: 0, rotated: 0}, 1e-3) == alone[0]
    assert cost({EVENT: 0}, 1e-3) == 0.0


def test_there_is_no_add_remove() -> None:
    with pytest.raises(PrivacyError, match="replace-one"):
        accounting.epsilon({EVENT: 1}, 1e-3, neighbours="add-remove")


def test_amplification_does_not_overflow() -> None:
    assert amplified(5000.0, 0.01) == pytest.approx(5000 + math.log(0.01))
    assert amplified(0.5, 1.0) == pytest.approx(0.5)
    assert amplified(math.inf, 0.01) == math.inf
    assert amplified(700.1, 0.01) == pytest.approx(amplified(699.9, 0.01) + 0.2)


@given(st.floats(-15, 3), st.integers(1, 2**31 - 1), st.integers(1, 2**31 - 1))
@example(-10.0, 1, 10**7)  # ε + ln(q + (1 − q)e^−ε) loses all its digits here, and can be negative
@example(2.9, 1, 2**31 - 1)
def test_amplification_is_never_below_the_truth(magnitude: float, batch: int, records: int) -> None:
    cost, rate = 10**magnitude, min(batch, records) / max(batch, records)
    with mpmath.workdps(60):
        truth = mpmath.log(1 + mpmath.mpf(rate) * mpmath.expm1(mpmath.mpf(cost)))
        assert truth <= amplified(cost, rate) <= truth * (1 + mpmath.mpf(2) ** -48)
