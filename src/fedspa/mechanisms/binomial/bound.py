"""What cpSGD costs: a bound on the Binomial mechanism, amplified by sampling and composed. docs/cpsgd.md derives it.

    one release   Chernoff's bound on the privacy loss. (Theorem 1 of Agarwal, Suresh, Yu, Kumar, McMahan, NeurIPS 2018,
                  can be below the truth.)
    rounding      the sensitivities after stochastic quantisation (their Section 4, here for one record of a batch)
    sampling      Balle, Barthe, Gaboardi 2018, Theorem 9: B of m without replacement, replace-one
    composition   `privacy.composition`, for mechanisms of which (ε, δ) is all that is known

A release is (ε, 2δ)-DP for every δ at which there is a bound, so δ is chosen for the total at hand. Where noise can run
out at every δ there is no guarantee, and ε is infinite.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from fedspa.mechanisms.binomial.event import FAR, BinomialEvent
from fedspa.privacy import composition

# The levels of a rotated vector reach this far: all coordinates stay within them but for this chance. It decides ε, so
# it is part of what a stored event means and may not change.
ROTATION_TAIL = 2.0**-10
_LARGEST_STEP_DELTA = 0.1
# Above all rounding of the few operations between an event and its ε: relative, and where terms nearly cancel.
_SLACK = 1 + 1e-9
_LEAST = 1e-12
# Of a release's δ, what pays for noise so far out that the bound on the loss does not reach there.
_FAR_OUT = 0.1


class Sensitivity(NamedTuple):
    """How far the rounded means of two neighbours are apart, in levels, in the L1, L2 and L∞ norms."""

    l1: float
    l2: float
    largest: float


def spread(event: BinomialEvent) -> float:
    """κ: the levels span ±κ/√d times the bound on a gradient's L2 norm. 1 without rotation (a coordinate's clip)."""
    return math.sqrt(2 * math.log(2 * event.coordinates / ROTATION_TAIL)) if event.rotation else 1.0


def sensitivity(event: BinomialEvent, delta: float) -> Sensitivity:
    """Bounds that a coupling of the two roundings satisfies but for chance `delta`.

    Before rounding, coordinate j moves by x_j levels with ‖x‖₂ ≤ r; rounded with the same coins, by ⌊x_j⌋ or ⌈x_j⌉,
    with mean x_j, independently. Bernstein bounds the sums.
    """
    d, top = event.coordinates, 2**event.bits - 1
    r = math.sqrt(d) * top / (event.batch * spread(event))
    largest = math.ceil(min(r * _SLACK, top)) if event.rotation else -(-top // event.batch)
    tail = math.log(2 / delta)
    mean = math.sqrt(d) * r
    moved = mean + math.sqrt(2 * mean * tail) + 2 / 3 * tail
    l1 = min(moved, d * largest)
    return Sensitivity(l1, min(r + math.sqrt(moved), math.sqrt(l1 * largest)), largest)


def variance(event: BinomialEvent) -> float:
    """v = N/4 of the noise that the adversary cannot subtract: this agent's trials, or those of all aggregated."""
    return event.trials * event.aggregated / 4


def release_epsilon(event: BinomialEvent, delta: float) -> float:
    """ε of one release without sampling, which is (ε, 2·`delta`)-DP under replace-one; infinite where none is known."""
    moved = sensitivity(event, delta)
    if _far_out(event, delta) + moved.largest > FAR * math.sqrt(variance(event)):  # draws have their law up to there
        return math.inf
    return shift_epsilon(event, moved, delta) * _SLACK + _LEAST


def shift_epsilon(event: BinomialEvent, moved: Sensitivity, delta: float) -> float:
    """ε at `delta` of the noise alone, between two whole vectors that are `moved` apart: docs/cpsgd.md has the proof.

    Unless a coordinate's noise is below −h, which happens with chance δ/10 at most, E e^(λ·loss) ≤ e^K(λ), and
    max (1 − e^−z)·e^−λz = λ^λ/(1 + λ)^(1 + λ) turns that into ε for every λ: the best one is looked for.
    """
    v = variance(event)
    h = _far_out(event, delta)
    furthest = (h + moved.largest) / (2 * v)
    if furthest >= 1:
        return math.inf
    # −atanh u ≤ −u + γ·u² down to u = −furthest
    gamma = furthest / (3 * (1 - furthest**2))
    eta = gamma * moved.largest / v
    tail = -math.log((1 - _FAR_OUT) * delta)
    mean = moved.l2**2 / (2 * v) * (1 + eta / 3)

    def epsilon(order: float) -> float:
        left = 1 - order * eta
        if left <= 0:
            return math.inf
        spread_out = (gamma * moved.l1 + order * moved.l2**2 * (1 + eta / 2) ** 2) / (2 * v * left)
        return mean + spread_out + (tail - math.log1p(order)) / order - math.log1p(1 / order)

    # K is convex, so ε falls in λ and then rises.
    high = -math.log(eta)
    low = high - 70
    while high - low > 1e-7:
        third = (high - low) / 3
        if epsilon(math.exp(low + third)) <= epsilon(math.exp(high - third)):
            high -= third
        else:
            low += third
    return max(0.0, epsilon(math.exp(low)))


def _far_out(event: BinomialEvent, delta: float) -> float:
    """h: no coordinate's noise lies so far below its mean, but for a part of `delta`."""
    return math.sqrt(2 * variance(event) * math.log(event.coordinates / (_FAR_OUT * delta)))


def amplified(epsilon: float, rate: float) -> float:
    """ln(1 + q(e^ε − 1)), without overflow, to all digits however small, and never below."""
    far = epsilon > 700  # e^ε is near the largest number, and the 1s are nothing beside it
    cost = epsilon + math.log(rate) if far else math.log1p(rate * math.expm1(epsilon))
    return cost * (1 + 2**-50)  # four units in the last place: above what the functions may round away


def sampled_epsilon(event: BinomialEvent, delta: float) -> float:
    """ε of one release of a sampled batch, which is (ε, `delta`)-DP under replace-one; infinite where none is known."""
    own = min(delta / (2 * event.rate), _LARGEST_STEP_DELTA)
    return amplified(release_epsilon(event, own), event.rate)


def composed_epsilon(events: Mapping[BinomialEvent, int], delta: float) -> float:
    """ε at `delta`, replace-one, of taking part in each event its number of times; infinite where none is known."""
    return composition.epsilon(events, delta, sampled_epsilon)
