"""cpSGD's exact accountant against brute force: every pair of inputs of small channels, their products and samples."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from fedspa.algorithms.cpsgd.plan import BinomialEvent, RoundedStep, rounded_step
from fedspa.mechanisms.gaussian.plan import GaussianEvent
from fedspa.privacy.accounting import epsilon as total_epsilon
from fedspa.privacy.event import Event
from fedspa.privacy.pld import LossMass, composed_mass

Law = NDArray[np.float64]
EPSILONS = (0.0, 0.05, 0.3, 1.0, 2.5)


def rounded_epsilon(events: dict[Event, int], delta: float) -> float:
    return total_epsilon(events, delta, neighbours="replace-one")


def channel(a: float, trials: int, top: int) -> Law:
    """The law of ⌊a + u⌋ + Bin(trials, ½) on 0 … top + trials."""
    low = min(int(a), top)
    law = np.zeros(top + trials + 1)
    noise = stats.binom.pmf(np.arange(trials + 1), trials, 0.5)
    law[low : low + trials + 1] += (1 - (a - low)) * noise
    if a > low:
        law[low + 1 : low + trials + 2] += (a - low) * noise
    return law


def product(*laws: Law) -> Law:
    return np.einsum("i,j,k->ijk", *laws).ravel()  # type: ignore[no-any-return]


def divergence(p: Law, q: Law, epsilon: float) -> float:
    return float(np.maximum(p - math.exp(epsilon) * q, 0).sum())


def profile(mass: LossMass, epsilon: float) -> float:
    gain = -np.expm1(np.minimum(0.0, epsilon - mass.losses))
    return float(mass.mass @ gain) + mass.infinite


@pytest.mark.parametrize(("trials", "top", "batch"), [(6, 1, 2), (12, 3, 3), (15, 3, 2), (8, 1, 1)])
def test_one_coordinate_dominates_every_pair_of_inputs(trials: int, top: int, batch: int) -> None:
    """All a, a′ of a grid with |a − a′| ≤ ρ, both ways round, at every ε; and the worst of them is nearly reached."""
    shift = Fraction(top, batch)
    event = BinomialEvent(batch, batch, 1, 1, top.bit_length(), trials)
    step = rounded_step(event).discretise(2.0**-12, 12.0)
    places = np.arange(0, top * 12 * batch + 1) / (12 * batch)
    laws = {a: channel(a, trials, top) for a in places}
    for epsilon in EPSILONS:
        worst = max(
            divergence(laws[a], laws[b], epsilon)
            for a, b in itertools.product(places, repeat=2)
            if abs(a - b) <= float(shift) + 1e-12
        )
        assert worst <= profile(step, epsilon) * (1 + 1e-9) + 1e-12
        if shift <= 1 or shift.denominator == 1:
            assert profile(step, epsilon) <= worst * 1.01 + 1e-6


@pytest.mark.parametrize(("trials", "batch"), [(7, 3), (10, 2), (12, 1)])
def test_products_dominate_coordinates_that_move_either_way(trials: int, batch: int) -> None:
    """Three coordinates, each at one of its two worst pairs, in every combination."""
    top, shift = 1, 1 / batch
    step = RoundedStep(1.0, 3, Fraction(1, batch), trials).discretise(2.0**-12, 12.0)
    ends = [(0.0, shift), (shift, 0.0), (1.0, 1 - shift), (1 - shift, 1.0)]
    for epsilon in EPSILONS:
        for moves in itertools.combinations_with_replacement(ends, 3):
            p, q = (product(*(channel(move[side], trials, top) for move in moves)) for side in (0, 1))
            assert divergence(p, q, epsilon) <= profile(step, epsilon) * (1 + 1e-9) + 1e-12


@pytest.mark.parametrize("others", [0.0, 1.0, 0.5])
def test_sampling_dominates_real_mixtures(others: float) -> None:
    """One of 3 records is drawn (B = 1): the first is a or a′, the others sit anywhere; q = 1/3."""
    trials, top = 9, 1
    step = RoundedStep(1 / 3, 1, Fraction(1), trials).discretise(2.0**-12, 12.0)
    for a, b in ((0.0, 1.0), (1.0, 0.0), (0.0, 0.5), (0.25, 1.0)):
        p, q = ((channel(first, trials, top) + 2 * channel(others, trials, top)) / 3 for first in (a, b))
        for epsilon in EPSILONS:
            assert divergence(p, q, epsilon) <= profile(step, epsilon) * (1 + 1e-9) + 1e-12
            below = -epsilon
            assert divergence(p, q, below) <= profile(step, below) * (1 + 1e-9) + 1e-12


def test_composition_of_whole_runs_by_brute_force() -> None:
    """Two rounds of one coordinate, q = 1/2: the worst of all pairs, enumerated, is within 1 % below."""
    trials = 11
    event = BinomialEvent(1, 2, 1, 1, 1, trials)
    delta = 0.05
    epsilon = rounded_epsilon({event: 2}, delta)
    worst = 0.0
    for others in (0.0, 1.0):
        for a, b in ((0.0, 1.0), (1.0, 0.0)):
            p, q = ((channel(first, trials, 1) + channel(others, trials, 1)) / 2 for first in (a, b))
            worst = max(worst, divergence(np.outer(p, p).ravel(), np.outer(q, q).ravel(), epsilon))
    assert worst <= delta


EVENT = BinomialEvent(10, 600, 1, 21840, 1, 7130)


def test_the_papers_settings() -> None:
    """MNIST's CNN at p = 0.4: ε is 0.0758, in local DP."""
    assert rounded_epsilon({EVENT: 45}, 1e-3) == pytest.approx(0.07581, abs=2e-5)
    assert rounded_epsilon({replace(EVENT, trials=82): 45}, 1e-3) == pytest.approx(19.73, abs=0.01)
    assert rounded_epsilon({replace(EVENT, trials=7): 45}, 1e-3) == math.inf
    assert rounded_epsilon({EVENT: 0}, 1e-3) == 0.0


@pytest.mark.parametrize(("bits", "trials"), [(1, 7130), (4, 65520), (8, 10**9)])
def test_it_is_a_little_above_the_gaussian_of_its_variance(bits: int, trials: int) -> None:
    """N(0, N/4) against a shift of ρ in d coordinates has the limit's ε: a few percent below, never above."""
    event = replace(EVENT, bits=bits, trials=trials)
    shift = float(rounded_step(event).shift) * math.sqrt(event.dimension)
    gaussian = total_epsilon(
        {GaussianEvent("fixed", 10, 600, 1, 2 * math.sqrt(trials / 4) / shift): 45}, 1e-3, neighbours="replace-one"
    )
    exact = rounded_epsilon({event: 45}, 1e-3)
    assert gaussian * (1 - 1e-3) <= exact <= gaussian * 1.03


@given(
    st.integers(1, 20),
    st.integers(1, 3000),
    st.integers(1, 6),
    st.integers(100, 10**6),
    st.integers(1, 30),
)
@settings(max_examples=12, deadline=None)
@example(batch=1, dimension=2, bits=6, trials=599, times=1)  # as printed, the theorem says 30.10; the truth is 30.92
def test_more_noise_costs_less(batch: int, dimension: int, bits: int, trials: int, times: int) -> None:
    event = BinomialEvent(batch, 600, 1, dimension, bits, trials)
    cost = rounded_epsilon({event: times}, 1e-4)
    quieter = rounded_epsilon({replace(event, trials=2 * trials): times}, 1e-4)
    longer = rounded_epsilon({event: times + 1}, 1e-4)
    larger = rounded_epsilon({replace(event, dimension=2 * dimension): times}, 1e-4)
    slack = 1 + 1e-3  # of the grids, which differ
    assert quieter <= cost * slack + 1e-6
    assert cost <= longer * slack + 1e-6
    assert cost <= larger * slack + 1e-6


@pytest.mark.parametrize("trials", [8_388_608, 7131])
@pytest.mark.parametrize("shift", [Fraction(1, 10), Fraction(3)])
def test_no_mass_is_counted_twice(trials: int, shift: Fraction) -> None:
    """With an odd number of trials one value has a loss of exactly 0 (a tenth, one, three)."""
    release = RoundedStep(1.0, 20_000, shift, trials)._release(8.0)
    assert 1 - 1e-9 <= float(release.mass.sum()) + release.infinite < 1 + 1e-6


@pytest.mark.parametrize(
    ("trials", "bits", "batch"),
    [
        (1, 1, 1),
        (2, 2, 2),
        (2, 16, 1),
    ],
)
def test_shifts_beyond_the_noise_have_no_epsilon(trials: int, bits: int, batch: int) -> None:
    assert rounded_epsilon({BinomialEvent(batch, 8, 1, 16, bits, trials): 1}, 1e-3) == math.inf


def test_a_whole_composed_distribution_is_from_above() -> None:
    """Ten coins of loss ±0.1: against the binomial law of their sum."""
    rate = 1 / (1 + math.exp(-0.1))
    one = LossMass(0.1, -1, np.array([1 - rate, 0.0, rate]), 0.0)
    whole = composed_mass(one, 10)
    for epsilon in (0.0, 0.15, 0.55):
        exact = sum(
            stats.binom.pmf(i, 10, rate) * -math.expm1(min(0.0, epsilon - 0.1 * (2 * i - 10))) for i in range(11)
        )
        assert exact <= profile(whole, epsilon) <= exact + 1e-9


@pytest.mark.parametrize(("dimension", "delta"), [(1, 1e-3), (2, 1.4e-3)])
def test_more_than_half_of_the_mass_at_infinite_loss(dimension: int, delta: float) -> None:
    """Shift 3 against Bin(4, ½): 11/16 of a coordinate's mass is where the other law has none."""
    event = BinomialEvent(1, 600, 1, dimension, 2, 4)
    certain = (1 - (5 / 16) ** dimension) / 600
    assert delta < certain
    assert rounded_epsilon({event: 1}, delta) == math.inf
    assert rounded_epsilon({event: 1}, 1.05 * certain) < math.inf


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("bits", "trials"), [(16, 10**6), (16, 2**23), (12, 20_000), (16, 1000)])
@pytest.mark.parametrize("dimension", [1, 650])
def test_a_shift_so_far_beyond_the_noise_that_probabilities_vanish(bits: int, trials: int, dimension: int) -> None:
    """Both laws are 0 in floating point where the other has its mass: that is no agreement, but an endless loss."""
    assert rounded_epsilon({BinomialEvent(1, 600, 1, dimension, bits, trials): 1}, 1e-3) == math.inf
