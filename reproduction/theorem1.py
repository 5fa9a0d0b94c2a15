"""The paper's own guarantee (Hu, Gong, Guo 2021, Theorem 1), as printed and with its sensitivity corrected.

With q = B/m, n = I·τ steps and σ'² = σ²/φ², φ the L2 sensitivity of the mean gradient,

    ε(α) = 3.5·q²·n·α/σ'² + ln(1/δ)/(α − 1),     minimised over α > 1,

where the paper prints φ² = 2pG²/B²; two gradients of norm √p·G can point apart, so that it must be 4pG²/B². The
theorem asks for σ'² ≥ 0.7 and α ≤ (2/3)·σ'²·ln(1/(qα(1 + σ'²))) + 1. (The paper prints σ² before the logarithm, which
has the units of a gradient; the lemma that it rests on has σ'².) The paper's figures need the range ignored:
`published_epsilon` ignores it and says whether it holds.

Noise is in the units of `GaussianEvent`: σ = noise_multiplier·√p·G/B.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedspa.errors import PrivacyError
from fedspa.mechanisms.gaussian.plan import GaussianEvent
from fedspa.privacy.event import MOST


@dataclass(frozen=True, slots=True)
class Published:
    """`epsilon` at the minimising `alpha`, and whether Theorem 1's conditions hold there.

    Where `in_range` is False the theorem does not say what the paper takes from it. Where `corrected` is also False
    nothing is guaranteed at all.
    """

    epsilon: float
    alpha: float
    in_range: bool
    corrected: bool


def published_epsilon(event: GaussianEvent, participations: int, delta: float, *, corrected: bool = False) -> Published:
    """Theorem 1 for `participations` of `event`, α's range ignored."""
    _check(participations, delta)
    relative = _relative_variance(event.noise_multiplier, corrected)
    with_noise_1 = 3.5 * event.rate**2 * participations * event.steps
    # Noise whose square is beyond float64 is none, or all there can be.
    slope = with_noise_1 / relative if relative else math.inf
    alpha = 1 + math.sqrt(-math.log(delta) / slope) if slope else math.inf
    value = slope + 2 * math.sqrt(-math.log(delta) * slope)  # slope·α + ln(1/δ)/(α − 1) at this α
    return Published(value, alpha, in_range(alpha, event.rate, relative), corrected)


def published_noise(
    epsilon: float,
    delta: float,
    *,
    batch: int,
    records: int,
    steps: int,
    participations: int,
    corrected: bool = False,
) -> float:
    """The noise multiplier at which Theorem 1, its range ignored, gives `epsilon`: what the paper's experiments use."""
    _check(participations, delta)
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise PrivacyError(f"epsilon is {epsilon}; it must be positive and finite")
    # min over α is slope + 2·√(slope·ln(1/δ)): solved for the slope, then for σ'².
    log = -math.log(delta)
    slope = (epsilon / (math.sqrt(log + epsilon) + math.sqrt(log))) ** 2
    if slope == 0:
        raise PrivacyError(f"epsilon is {epsilon}; Theorem 1 gives it at no finite noise")
    rate = GaussianEvent("fixed", batch, records, steps, 1.0).rate
    relative = 3.5 * rate**2 * participations * steps / slope
    return math.sqrt(relative / _relative_variance(1.0, corrected))


def in_range(alpha: float, rate: float, relative_variance: float) -> bool:
    """Theorem 1's conditions, σ'² in front of the logarithm; `relative_variance` is σ'²."""
    inside = rate * alpha * (1 + relative_variance)
    if not 0 < inside < math.inf:
        return False
    return relative_variance >= 0.7 and alpha <= 1 - 2 / 3 * relative_variance * math.log(inside)


def smallest_certified_epsilon(*, batch: int, records: int, steps: int, participations: int, delta: float) -> float:
    """The smallest ε that Theorem 1 can certify at any noise once its conditions are enforced; infinite if none.

    More noise does not help: beyond some σ'² no α is in range. The correction of the sensitivity changes the noise at
    which this ε is met, not the ε.
    """
    _check(participations, delta)
    rate = GaussianEvent("fixed", batch, records, steps, 1.0).rate

    def best_at(alpha: float) -> float:
        """ε at the most noise that is in range at this order; σ'²·ln(1/(qα(1+σ'²))) rises, then falls, in σ'²."""
        top = 1 / (rate * alpha)
        if top <= 1.7:
            return math.inf
        low, high = 0.7, top
        for _ in range(60):  # ternary search: where the range's right-hand side is largest
            left, right = low + (high - low) / 3, high - (high - low) / 3
            if left * -math.log(rate * alpha * (1 + left)) < right * -math.log(rate * alpha * (1 + right)):
                low = left
            else:
                high = right
        if not in_range(alpha, rate, low):
            return math.inf
        high = top
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if in_range(alpha, rate, middle) else (low, middle)
        return 3.5 * rate**2 * participations * steps * alpha / low - math.log(delta) / (alpha - 1)

    # Coarse to fine over ln(α − 1), between orders that no experiment goes beyond.
    low, high = math.log(1e-3), math.log(max(1 / rate, 1.001) * 10)
    best = math.inf
    for _ in range(6):
        width = (high - low) / 40
        points = [(best_at(1 + math.exp(low + i * width)), low + i * width) for i in range(41)]
        value, centre = min(points)
        best = min(best, value)
        low, high = centre - 2 * width, centre + 2 * width
    return best


def _relative_variance(noise_multiplier: float, corrected: bool) -> float:
    """σ'² = σ²/φ², in units where √p·G/B is 1."""
    return noise_multiplier * noise_multiplier / (4 if corrected else 2)


def _check(participations: int, delta: float) -> None:
    if not 1 <= participations <= MOST:
        raise PrivacyError(f"participations is {participations}; it must lie between 1 and {MOST:g}")
    if not 0 < delta < 1:
        raise PrivacyError(f"delta is {delta}; it must lie between 0 and 1")
