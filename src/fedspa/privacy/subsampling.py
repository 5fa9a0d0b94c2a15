"""Loss distributions of one Gaussian step on a sample.

**Poisson**: each record takes part with chance q, on its own.

With φ the standard normal density, μ = (bound on one example)/σ and r(x) = φ(x−μ)/φ(x), the dominating pairs are

    remove   (1−q)φ(x) + qφ(x−μ)  against  φ(x)                    loss ln(1 − q + q·r(x))
    add      the same, swapped
    replace  (1−q)φ(x) + qφ(x−μ)  against  (1−q)φ(x) + qφ(x+μ)

(Mironov, Talwar, Zhang 2019; Zhu, Dong, Wang 2022; Doroshenko et al. 2022 for their discretisation.) `shift` is μ.

**Fixed size**: B of m records, uniform, without replacement.

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

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy import special

from fedspa.privacy.pld import TAIL_ERROR, Array, LossMass, normal_mass, split

SKETCH_POINTS = 2001


@dataclass(frozen=True, slots=True)
class Removed:
    """A record is there under P and gone under Q."""

    rate: float
    shift: float

    def sketch(self, reach: float) -> tuple[Array, Array]:
        x, mass = _mixture(self.rate, self.shift, reach)
        return mixture_loss(self.rate, self.shift, x), mass

    @lru_cache(maxsize=8)  # noqa: B019 (pairs are small values, equal ones share the entry)
    def discretise(self, interval: float, reach: float) -> LossMass:
        first, losses, x = grid(self.rate, self.shift, -reach, self.shift + reach, interval)
        down, up = removal_cells(self.rate, self.shift, losses, x, interval)
        mass = np.append(down, 0.0)
        mass[1:] += up
        mass[0] += (1 - self.rate) * special.ndtr(x[0]) + self.rate * special.ndtr(x[0] - self.shift)
        infinite = (1 - self.rate) * special.ndtr(-x[-1]) + self.rate * special.ndtr(self.shift - x[-1])
        return LossMass(interval, first, mass, float(infinite))


@dataclass(frozen=True, slots=True)
class Added:
    """A record is gone under P and there under Q."""

    rate: float
    shift: float

    def sketch(self, reach: float) -> tuple[Array, Array]:
        x = np.linspace(-reach, reach, SKETCH_POINTS)
        density = np.exp(-(x**2) / 2)
        return -mixture_loss(self.rate, self.shift, x), density / density.sum()

    @lru_cache(maxsize=8)  # noqa: B019
    def discretise(self, interval: float, reach: float) -> LossMass:
        first, losses, x = grid(self.rate, self.shift, -reach, reach, interval)
        down, up = addition_cells(self.rate, self.shift, losses, x, interval)
        mass = np.append(up, 0.0)  # indexed by the negated loss; the cell's upper end is −losses[j]
        mass[1:] += down
        mass[-1] += special.ndtr(-x[-1])
        return LossMass(interval, -(first + losses.size - 1), mass[::-1], float(special.ndtr(x[0])))


@dataclass(frozen=True, slots=True)
class Replaced:
    """A record is one thing under P and the opposite under Q, each sampled with the same chance."""

    rate: float
    shift: float

    def sketch(self, reach: float) -> tuple[Array, Array]:
        x, mass = _mixture(self.rate, self.shift, reach)
        return self._loss(x), mass

    def _loss(self, x: Array) -> Array:
        return mixture_loss(self.rate, self.shift, x) - mixture_loss(self.rate, self.shift, -x)

    def _inverse(self, losses: Array) -> Array:
        """x = (ε/2 + asinh(a·sinh(ε/2)))/μ with a = e^(μ²/2)·(1−q)/q, without overflow."""
        half = np.abs(losses) / 2
        with np.errstate(divide="ignore"):
            log_sinh = half + np.log(-np.expm1(-2 * half)) - math.log(2)
        log_y = self.shift**2 / 2 + math.log1p(-self.rate) - math.log(self.rate) + log_sinh
        asinh = np.where(log_y > 20, math.log(2) + log_y, np.arcsinh(np.exp(np.minimum(log_y, 20.0))))
        return np.asarray(np.sign(losses) * (half + asinh) / self.shift)

    @lru_cache(maxsize=8)  # noqa: B019
    def discretise(self, interval: float, reach: float) -> LossMass:
        q, shift = self.rate, self.shift
        ends = self._loss(np.array([-reach, shift + reach]))
        first, last = math.floor(ends[0] / interval), math.ceil(ends[1] / interval)
        losses = np.arange(first, last + 1) * interval
        x = self._inverse(losses)
        low, high, e = x[:-1], x[1:], losses[:-1]
        apart, _ = normal_mass(low, high)
        with_p, with_p_tail = normal_mass(low - shift, high - shift)
        with_q, with_q_tail = normal_mass(low + shift, high + shift, e)
        # (1−q)(1 − e^ε)·ΔΦ, where e^ε may overflow against a tiny ΔΦ
        scale = np.where(e > 0, e, 0.0)
        scaled, scaled_tail = normal_mass(low, high, scale)
        factor = -np.expm1(-np.abs(e)) * np.sign(-e)
        excess = (1 - q) * factor * scaled + q * (with_p - with_q)
        error = (1 - q) * np.abs(factor) * scaled_tail + q * (with_p_tail + with_q_tail)
        down, up = split((1 - q) * apart + q * with_p, excess, TAIL_ERROR * (1 + np.abs(e)) * error, interval)
        mass = np.append(down, 0.0)
        mass[1:] += up
        mass[0] += (1 - q) * special.ndtr(x[0]) + q * special.ndtr(x[0] - shift)
        infinite = (1 - q) * special.ndtr(-x[-1]) + q * special.ndtr(shift - x[-1])
        return LossMass(interval, first, mass, float(infinite))


def _mixture(rate: float, shift: float, reach: float) -> tuple[Array, Array]:
    """(1 − q)·N(0, 1) + q·N(μ, 1) at a few thousand points: where, and how much of it."""
    x = np.linspace(-reach, shift + reach, SKETCH_POINTS)
    density = (1 - rate) * np.exp(-(x**2) / 2) + rate * np.exp(-((x - shift) ** 2) / 2)
    return x, density / density.sum()


def mixture_loss(rate: float, shift: float, x: Array) -> Array:
    """ln(1 − q + q·r(x)), with full relative precision where it is near 0. At x = μ/2 it is 0 to the last bit: the grid
    of `fixed_size` begins there, and would begin a cell too early below."""
    log_ratio = shift * (x - shift / 2)
    if rate == 1:
        return log_ratio
    with np.errstate(divide="ignore", over="ignore"):
        small = np.log1p(rate * np.expm1(np.minimum(log_ratio, 30.0)))
        large = math.log(rate) + log_ratio + np.log1p((1 - rate) / rate * np.exp(-np.maximum(log_ratio, 30.0)))
    return np.asarray(np.where(log_ratio < 30, small, large))


def mixture_log_ratio(rate: float, losses: Array) -> Array:
    """ln r at which the remove loss is met: the inverse of `mixture_loss`; −∞ at and below its infimum ln(1−q)."""
    if rate == 1:
        return losses
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        small = np.log1p(np.maximum(np.expm1(np.minimum(losses, 30.0)) / rate, -1.0))
        large = losses - math.log(rate) + np.log1p(-(1 - rate) * np.exp(-np.maximum(losses, 30.0)))
    return np.asarray(np.where(losses < 30, small, large))


def grid(rate: float, shift: float, low: float, high: float, interval: float) -> tuple[int, Array, Array]:
    """Return the remove losses of x in [low, high] as grid indices from `first`, as losses, and as edges in x."""
    ends = mixture_loss(rate, shift, np.array([low, high]))
    first = math.floor(ends[0] / interval)
    losses = np.arange(first, max(math.ceil(ends[1] / interval), first + 1) + 1) * interval
    return first, losses, mixture_log_ratio(rate, losses) / shift + shift / 2


def removal_cells(rate: float, shift: float, losses: Array, x: Array, interval: float) -> tuple[Array, Array]:
    """(down, up) of the cells between neighbouring `losses` under `Removed`.

    P − e^ε·Q of a cell is q·(ΔΦ(x−μ) − r·ΔΦ(x)): q is taken out before the difference, or a small one would drown.
    """
    without, _ = normal_mass(x[:-1], x[1:])
    with_it, with_tail = normal_mass(x[:-1] - shift, x[1:] - shift)
    log_ratio = mixture_log_ratio(rate, losses[:-1])
    against, against_tail = normal_mass(x[:-1], x[1:], log_ratio)
    # The first cell may begin below the infimum ln(1−q), where "r" is negative.
    if log_ratio[0] == -math.inf:
        against[0] = (math.expm1(losses[0]) / rate + 1) * without[0]
        against_tail[0] = abs(against[0])
    slack = TAIL_ERROR * (1 + np.abs(losses[:-1])) * rate * (with_tail + against_tail)
    return split((1 - rate) * without + rate * with_it, rate * (with_it - against), slack, interval)


def addition_cells(rate: float, shift: float, losses: Array, x: Array, interval: float) -> tuple[Array, Array]:
    """(down, up) of the same cells under `Added`: the cell of losses −losses[j+1] … −losses[j]."""
    without, _ = normal_mass(x[:-1], x[1:])
    with_it, with_tail = normal_mass(x[:-1] - shift, x[1:] - shift, -losses[1:])
    against, against_tail = normal_mass(x[:-1], x[1:], mixture_log_ratio(rate, losses[1:]) - losses[1:])
    slack = TAIL_ERROR * (1 + np.abs(losses[1:])) * rate * (with_tail + against_tail)
    return split(without, rate * (against - with_it), slack, interval)


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
