"""Releases of different mechanisms on one record, priced together: ε against the exact law of both, enumerated here."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from fedspa.mechanisms.discrete_gaussian.plan import FINE, SIGMA, DiscreteGaussianEvent
from fedspa.mechanisms.gaussian.plan import GaussianEvent
from fedspa.privacy.accounting import epsilon
from fedspa.privacy.event import Event
from reproduction.cpsgd.plan import BinomialEvent

Law = np.ndarray  # masses
POINTS = np.linspace(-14.0, 20.0, 6001)


def normal(mean: float) -> Law:
    return np.asarray(stats.norm.pdf(POINTS, mean) * (POINTS[1] - POINTS[0]))


def rounded(event: BinomialEvent) -> tuple[Law, Law]:
    """One coordinate of cpSGD: all other records at one end, the record there or at the other end."""
    law = stats.binom.pmf(np.arange(event.trials + 2), event.trials, 0.5)
    moved = (2**event.bits - 1) / event.batch
    assert moved <= 1
    other = (1 - moved) * law + moved * np.concatenate(([0.0], law[:-1]))
    return event.rate * other + (1 - event.rate) * law, law


def sampled(event: GaussianEvent) -> tuple[Law, Law]:
    rate, shift = event.rate, 1 / event.noise_multiplier
    if event.sampling == "fixed":
        return (1 - rate) * normal(0) + rate * normal(2 * shift), normal(0)
    return tuple((1 - rate) * normal(0) + rate * normal(side) for side in (shift, -shift))  # type: ignore[return-value]


def shared(event: DiscreteGaussianEvent) -> tuple[Law, Law]:
    """An agent's own share, whose record moves it by two bounds."""
    numbers = np.arange(-80, 120)
    laws = [np.exp(-((numbers - centre) ** 2) / (2 * SIGMA**2)) for centre in (2 * event.bound / FINE, 0)]
    return laws[0] / laws[0].sum(), laws[1] / laws[1].sum()


def exact_delta(pairs: list[tuple[Law, Law]], epsilon: float) -> float:
    """The worst over all ways in which the record may have been moved in each release."""
    (a, b), (c, d) = pairs
    ways = [((a, b), (c, d)), ((a, b), (d, c)), ((b, a), (c, d)), ((b, a), (d, c))]
    return max(
        float(np.maximum(np.multiply.outer(p, r) - math.exp(epsilon) * np.multiply.outer(q, s), 0).sum())
        for (p, q), (r, s) in ways
    )


ROUNDED = BinomialEvent(5, 10, 1, 1, 2, 60)
FIXED, POISSON = GaussianEvent("fixed", 1, 20, 1, 1.5), GaussianEvent("poisson", 1, 2, 1, 2.0)
SHARE = DiscreteGaussianEvent(50, 1, 3000)
OTHERS: list[tuple[Event, tuple[Law, Law]]] = [
    (FIXED, sampled(FIXED)),
    (POISSON, sampled(POISSON)),
    (SHARE, shared(SHARE)),
]


@pytest.mark.parametrize(("event", "laws"), OTHERS, ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("delta", [1e-6, 1e-4, 1e-2])
def test_two_kinds_together_cost_no_less_than_their_exact_law(
    event: Event, laws: tuple[Law, Law], delta: float
) -> None:
    stated = epsilon({ROUNDED: 1, event: 1}, delta, neighbours="replace-one")
    spent = exact_delta([rounded(ROUNDED), laws], stated)
    assert 0.9 * delta < spent <= delta * (1 + 1e-6)  # sound, and tight enough for a slip to show
