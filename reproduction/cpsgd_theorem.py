"""The theorem that was published for cpSGD, with its sensitivities as printed. Its ε can be below the truth.

Agarwal, Suresh, Yu, Kumar, McMahan, "cpSGD", NeurIPS 2018, Theorem 1, at p = 1/2; sampling and composition as in
`fedspa.algorithms.cpsgd.accounting`.
"""

from __future__ import annotations

import math

from fedspa.algorithms.cpsgd.accounting import Sensitivity, amplified, variance
from fedspa.algorithms.cpsgd.event import BinomialEvent, spread
from fedspa.privacy.accounting import compose_releases

_LARGEST_STEP_DELTA = 0.1
_SLACK = 1 + 1e-9


def published_sensitivity(event: BinomialEvent, delta: float) -> Sensitivity:
    """The same as cpSGD prints it for a vector of L2 norm D: here D = G/B, half of what one record can move."""
    d, levels = event.coordinates, 2**event.bits
    r = math.sqrt(d) * (levels - 1) / (event.batch * spread(event))
    tail = math.log(2 / delta)
    deviation = math.sqrt(2 * math.sqrt(d) * r * tail)
    l1 = math.sqrt(d) * r + deviation + 4 / 3 * tail
    return Sensitivity(l1, r + math.sqrt(l1 + deviation), levels + 1)


def published_shift_epsilon(event: BinomialEvent, moved: Sensitivity, delta: float) -> float:
    """Theorem 1 of cpSGD; infinite outside its condition."""
    v, once, tenth = variance(event), math.log(1.25 / delta), math.log(10 / delta)
    if v < max(23 * math.log(10 * event.coordinates / delta), 2 * moved.largest):
        return math.inf
    gaussian = moved.l2 * math.sqrt(2 * once / v)
    skew = (moved.l2 * 1.75 * math.sqrt(2 * tenth) + moved.l1 / 3) / (v * (1 - delta / 10))
    extreme = moved.largest * 2 / 3 * (once + math.log(20 * event.coordinates / delta) * tenth) / v
    return gaussian + skew + extreme


def published_epsilon(event: BinomialEvent, participations: int, delta: float) -> float:
    """ε at `delta`, replace-one, of so many participations; infinite outside the theorem's condition."""
    return compose_releases({event: participations}, delta, _sampled)


def _sampled(event: BinomialEvent, delta: float) -> float:
    own = min(delta / (2 * event.rate), _LARGEST_STEP_DELTA)
    release = published_shift_epsilon(event, published_sensitivity(event, own), own) * _SLACK
    return amplified(release, event.rate)
