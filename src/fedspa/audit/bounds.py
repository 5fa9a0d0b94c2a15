"""Confidence bounds that the attacks rest on. `alpha` is always the chance that a bound is wrong."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
from scipy import stats


def proportion(successes: int, trials: int, alpha: float) -> tuple[float, float]:
    """Clopper–Pearson: both ends hold together except with chance `alpha`."""
    low = float(stats.beta.ppf(alpha / 2, successes, trials - successes + 1)) if successes > 0 else 0.0
    high = float(stats.beta.isf(alpha / 2, successes + 1, trials - successes)) if successes < trials else 1.0
    return low, high


def mu_lower(hits: int, false_hits: int, trials: int, alpha: float) -> float:
    """Gaussian DP (Dong, Roth & Su 2022): a test of these error rates needs μ ≥ Φ⁻¹(1 − FPR) − Φ⁻¹(FNR)."""
    hit_rate, _ = proportion(hits, trials, alpha / 2)
    _, false_rate = proportion(false_hits, trials, alpha / 2)
    return max(0.0, float(stats.norm.isf(false_rate) - stats.norm.isf(hit_rate)))


def epsilon_lower(delta: float, hits: int, false_hits: int, trials: int, alpha: float) -> float:
    """(ε, δ)-DP: P(S|D) ≤ e^ε·P(S|D′) + δ for the attack's event S, hence ε ≥ ln((TPR − δ)/FPR)."""
    hit_rate, _ = proportion(hits, trials, alpha / 2)
    _, false_rate = proportion(false_hits, trials, alpha / 2)
    return math.log((hit_rate - delta) / false_rate) if hit_rate - delta > false_rate else 0.0


def epsilon_lower_one_run(canaries: int, guesses: int, correct: int, delta: float, alpha: float) -> float:
    """One run, many canaries: in or out by fair coins, guessed or abstained (Steinke, Nasr & Jagielski 2023, Thm 5.2).

    Under (ε, δ)-DP the number of right guesses is dominated by Binomial(guesses, e^ε/(1 + e^ε)), but for an excess that
    δ pays for. The bound is the largest ε at which so many right guesses have a chance below `alpha`.
    """
    if _chance(canaries, guesses, correct, delta, 0.0) > alpha:
        return 0.0
    low, high = 0.0, 50.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if _chance(canaries, guesses, correct, delta, middle) <= alpha else (low, middle)
    return low


def _chance(canaries: int, guesses: int, correct: int, delta: float, epsilon: float) -> float:
    """Most that P(X ≥ correct) can be: the binomial tail, and 2·canaries·δ·max_i P(correct − i ≤ X < correct)/i."""
    rate = 1 / (1 + math.exp(-epsilon))
    tail = float(stats.binom.sf(correct - 1, guesses, rate))
    if correct == 0:
        return 1.0
    below = stats.binom.pmf(np.arange(correct - 1, -1, -1), guesses, rate).cumsum()
    share = float((below / np.arange(1, correct + 1)).max())
    return min(1.0, tail + 2 * canaries * delta * share)


@cache
def variance_limits(count: int, alpha: float) -> tuple[float, float]:
    """Where the mean square of `count` standard normals lies but for `alpha` (χ², both sides)."""
    low, high = stats.chi2.ppf(alpha / 2, count), stats.chi2.isf(alpha / 2, count)
    return float(low) / count, float(high) / count


def cosine_limit(length: int, pairs: int, alpha: float) -> float:
    """The largest |cosine| among `pairs` pairs of independent Gaussian vectors of this length, but for `alpha`."""
    shape = (length - 1) / 2
    return float(2 * stats.beta.isf(alpha / (2 * pairs), shape, shape) - 1)
