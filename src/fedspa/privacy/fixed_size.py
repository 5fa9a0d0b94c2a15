"""Loss distribution of one Gaussian step on a fixed-size sample: B of m records, uniform, without replacement.

Neighbours differ in one record's value (replace-one). With μ = (replace-one sensitivity)/σ and q = B/m, a step's
privacy profile lies below

    δ(ε) = q·H_a(N(μ,1) ‖ N(0,1)),  a = 1 + (e^ε − 1)/q,      ε ≥ 0      (Balle, Barthe, Gaboardi 2018, Theorem 11)
    δ(−ε) = 1 − e^(−ε) + e^(−ε)·δ(ε)                                     (the relation is symmetric)

for every pair of neighbours. The two halves together are convex in e^ε, hence the profile of a pair that dominates the
step and may be composed (Zhu, Dong, Wang 2022, Proposition 15 and Theorem 10). In terms of x with r(x) = φ(x−μ)/φ(x)
that pair has, for x > μ/2, the loss ln(1 − q + q·r(x)) with P-mass (1−q)φ(x) + qφ(x−μ), its mirror image with P- and
Q-mass swapped, and the rest, (1−q)(2Φ(μ/2) − 1), at loss 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy import special

from fedspa.privacy.pld import Array, LossMass
from fedspa.privacy.poisson import SKETCH_POINTS, addition_cells, grid, mixture_loss, removal_cells


@dataclass(frozen=True, slots=True)
class FixedSize:
    """One record of m replaced, B of m sampled. `rate` is q, `shift` is μ with the replace-one sensitivity."""

    rate: float
    shift: float

    def sketch(self, reach: float) -> tuple[Array, Array]:
        x = np.linspace(self.shift / 2, self.shift + reach, SKETCH_POINTS)
        step = (x[1] - x[0]) / np.sqrt(2 * np.pi)
        without = step * np.exp(-(x**2) / 2)
        with_it = step * np.exp(-((x - self.shift) ** 2) / 2)
        losses = mixture_loss(self.rate, self.shift, x)
        mass = np.concatenate((without[::-1], [self._unchanged], (1 - self.rate) * without + self.rate * with_it))
        return np.concatenate((-losses[::-1], [0.0], losses)), mass / mass.sum()

    @property
    def _unchanged(self) -> float:
        return float((1 - self.rate) * (1 - 2 * special.ndtr(-self.shift / 2)))

    @lru_cache(maxsize=8)  # noqa: B019 (pairs are small values, equal ones share the entry)
    def discretise(self, interval: float, reach: float) -> LossMass:
        _, losses, x = grid(self.rate, self.shift, self.shift / 2, self.shift + reach, interval)
        down, up = removal_cells(self.rate, self.shift, losses, x, interval)
        positive = np.append(down, 0.0)
        positive[1:] += up
        down, up = addition_cells(self.rate, self.shift, losses, x, interval)
        negative = np.append(up, 0.0)
        negative[1:] += down
        negative[-1] += special.ndtr(-x[-1])
        mass = np.concatenate((negative[:0:-1], [negative[0] + self._unchanged + positive[0]], positive[1:]))
        infinite = (1 - self.rate) * special.ndtr(-x[-1]) + self.rate * special.ndtr(self.shift - x[-1])
        return LossMass(interval, 1 - losses.size, mass, float(infinite))
