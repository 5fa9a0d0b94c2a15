"""Privacy loss distributions on a grid: discretised from above, composed by FFT, read off as ε.

A dominating pair (P, Q) of one step is discretised so that the grid's privacy profile lies above the true one
(connect-the-dots, Doroshenko et al. 2022): each cell's mass moves to the cell's two ends such that both P- and Q-mass
are kept, which costs only second order in the interval. Mass beyond the reach goes to infinite loss.

Composition multiplies Fourier transforms of the *exponentially tilted* masses. Tilting puts the peak of the composed
distribution at ε, so that round-off is relative to δ rather than to 1, and ε stays an upper bound at δ = 1e-10 after
10⁶ steps. What floating point and truncation may lose is added back: the returned ε is never below the true one.

The pairs of one Gaussian step on a sample are here, too.

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
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from scipy import fft, special

Array = NDArray[np.float64]

# Relative error of ε that the discretisation may add. It only decides tightness: any interval gives an upper bound.
TOLERANCE = 1e-5
MOST_CELLS = 2**20
# ε is computed to this part of a cell's width at least, down to an ε that is as good as none.
CELLS_BELOW = 256
LEAST_EPSILON = 1e-3
# Above this ε a bound is as good as the truth.
ANY_EPSILON = 1e5
# What a difference of normal tail masses may be wrong by, relative to the larger tail: a few tens of ulps.
TAIL_ERROR = 4e-14
LEFT_OUT = 1e-15


@dataclass(frozen=True, slots=True, eq=False)
class LossMass:
    """P-mass on the losses (offset + i)·interval, and at infinite loss."""

    interval: float
    offset: int
    mass: Array
    infinite: float

    @property
    def losses(self) -> Array:
        return np.asarray((self.offset + np.arange(self.mass.size)) * self.interval, dtype=np.float64)


class DominatingPair(Protocol):
    """The worst pair of output distributions of one step. Hashable, so that discretisations can be cached."""

    def sketch(self, reach: float) -> tuple[Array, Array]:
        """Return a few thousand (loss, P-mass) points: enough to choose a tilt and an interval, not to claim
        anything."""

    def __hash__(self) -> int: ...

    def discretise(self, interval: float, reach: float) -> LossMass:
        """Return the pessimistic loss distribution; `reach` is how many standard deviations of noise are resolved."""


def normal_mass(low: Array, high: Array, log_scale: Array | float = 0.0) -> tuple[Array, Array]:
    """exp(log_scale)·(Φ(high) − Φ(low)), and the larger tail that it is the difference of (its scale of error).

    Taken from the nearer tail, in logarithms, so that cells far out keep their relative precision and a large scale
    cannot overflow against a tiny mass.
    """
    upper = low + high > 0
    near = special.log_ndtr(np.where(upper, -low, high))
    far = special.log_ndtr(np.where(upper, -high, low))
    tail = np.exp(log_scale + near)
    return tail * -np.expm1(far - near), tail


def split(mass: Array, excess: Array, slack: Array, interval: float) -> tuple[Array, Array]:
    """Connect-the-dots: (to the cell's lower end, to its upper end).

    `excess` is P − e^(lower end)·Q of the cell. `slack` bounds its round-off and is spent upwards.
    """
    up = np.clip((excess + slack) / -math.expm1(-interval), 0.0, mass)
    return mass - up, up


def on_grid(losses: Array, mass: Array, infinite: float, interval: float) -> LossMass:
    """Return atoms of P-mass at these losses on the grid, from above: both their P- and their Q-mass are kept."""
    index = np.floor(losses / interval).astype(np.int64)
    within = np.clip(losses - index * interval, 0.0, interval)
    down, up = split(mass, -mass * np.expm1(-within), 1e-15 * mass, interval)
    first = int(index.min())
    cells = np.zeros(int(index.max()) - first + 2)
    np.add.at(cells, index - first, down)
    np.add.at(cells, index - first + 1, up)
    return LossMass(interval, first, cells, infinite)


@dataclass(frozen=True, slots=True)
class RandomisedResponse:
    """The pair that dominates every release which is (ε, 0)-differentially private."""

    epsilon: float

    def sketch(self, reach: float) -> tuple[Array, Array]:
        losses = np.array([-self.epsilon, self.epsilon])
        return losses, special.expit(losses)

    def discretise(self, interval: float, reach: float) -> LossMass:
        return on_grid(*self.sketch(reach), 0.0, interval)


def composed_epsilon(parts: Sequence[tuple[DominatingPair, int]], delta: float, at_least: float = 0.0) -> float:
    """Return the ε at `delta` of all pairs, each composed its number of times; infinite where none can be certified.

    Below `at_least` the answer need not be tight, which saves work where another direction has cost that much already.
    """
    steps = sum(count for _, count in parts)
    reach = tail_cutoff(steps, delta)
    choice = _choose(parts, delta, reach)

    def at(interval: float) -> float:
        return _epsilon([(pair.discretise(interval, reach), count) for pair, count in parts], delta, choice)

    interval = choice.interval
    if at_least > 0:
        epsilon = at(16 * interval)
        if epsilon <= at_least:
            return epsilon
    epsilon = at(interval)
    # The sketch may have guessed ε too high, by much where few steps leave a heavy tail: look closer then.
    while interval > choice.finest and epsilon > 0 and max(epsilon, LEAST_EPSILON) < CELLS_BELOW * interval:
        interval = max(power_of_two(max(epsilon, LEAST_EPSILON) / (2 * CELLS_BELOW)), choice.finest)
        epsilon = min(epsilon, at(interval))
    return epsilon


def tail_cutoff(steps: int, delta: float) -> float:
    """Return how many standard deviations of noise are resolved: truncation may take 1e-10 of δ. Rounded up to quarters
    so that the cache sees few different values."""
    return math.ceil(-4 * float(special.ndtri(max(1e-10 * delta / steps, 1e-300)))) / 4


def composed_mass(one: LossMass, count: int) -> LossMass:
    """Return the whole loss distribution of `count` independent parts alike, from above; what the window cuts off is at
    ∞."""
    points = [(one.losses, one.mass, count)]
    mean = float(one.mass @ one.losses)
    deviation = math.sqrt(count * (float(one.mass @ (one.losses - mean) ** 2) + one.interval**2))
    orders = np.geomspace(0.25, 64, 17) / deviation
    high = float(((_cumulant(points, orders) - math.log(LEFT_OUT)) / orders).min())
    low = float(((_cumulant(points, -orders) - math.log(LEFT_OUT)) / -orders).max())
    bottom = math.floor(low / one.interval)
    size = int(fft.next_fast_len(max(math.ceil(high / one.interval) - bottom + 1, 16), real=True))
    log_norm = float(_cumulant(points, np.array([0.0]))[0]) + 1e-15 * count
    mass = _tilted([(one, count)], 0.0, size, bottom) * math.exp(log_norm)
    infinite = _any_infinite([(one, count)]) + LEFT_OUT * math.exp(max(log_norm, 0.0))
    return LossMass(one.interval, bottom, mass, infinite)


def _any_infinite(masses: Sequence[tuple[LossMass, int]]) -> float:
    """Return the chance that any of the parts is at infinite loss."""
    if any(part.infinite >= 1 for part, _ in masses):
        return 1.0
    return -math.expm1(sum(count * math.log1p(-part.infinite) for part, count in masses))


def power_of_two(interval: float) -> float:
    """Rounded down, so that a growing ledger meets the same discretisation again and the cache serves it."""
    return 2.0 ** math.floor(math.log2(interval))


@dataclass(frozen=True, slots=True)
class _Choice:
    """Tilt λ, intervals wanted and affordable, and the orders at which the composed tails above and below are cut."""

    tilt: float
    interval: float
    finest: float
    above: float
    below: float


def _cumulant(points: Sequence[tuple[Array, Array, int]], orders: Array) -> Array:
    """K(λ) = Σ n·ln E_P[e^(λL)] for each order λ."""
    with np.errstate(divide="ignore"):
        return np.asarray(
            sum(
                count * special.logsumexp(orders[:, None] * losses + np.log(mass), axis=1)
                for losses, mass, count in points
            )
        )


def _conversion(order: Array) -> Array:
    """ln of sup over L of (1 − e^(ε−L))·e^(−λ(L−ε)): Canonne, Kamath, Steinke 2020, Proposition 12."""
    return np.asarray(order * np.log(order) - (order + 1) * np.log1p(order))


def _choose(parts: Sequence[tuple[DominatingPair, int]], delta: float, reach: float) -> _Choice:
    """Read tilt, interval and window off the sketches. Decides tightness and cost; soundness does not rest on it."""
    points = [(*pair.sketch(reach), count) for pair, count in parts]

    exponents = np.linspace(-14, 10, 49)
    spacing = 0.5
    for _ in range(4):
        orders = 10**exponents
        bounds = (_cumulant(points, orders) - math.log(delta) + _conversion(orders)) / orders
        best = int(np.argmin(bounds))
        centre = exponents[best]
        exponents = centre + spacing * np.linspace(-1, 1, 9)
        spacing /= 4
    tilt, rough = float(10**centre), float(bounds[best])

    # A step's discretisation adds about interval²/6 of variance to the loss: ε moves by half the tilt times that.
    steps = sum(count for _, count in parts)
    wanted = math.sqrt(12 * TOLERANCE * max(rough, LEAST_EPSILON) / (steps * (tilt + 1)))

    variance = 0.0
    for losses, mass, count in points:
        weights = mass * np.exp(tilt * (losses - losses.max()))
        weights /= weights.sum()
        mean = float(weights @ losses)
        variance += count * float(weights @ (losses - mean) ** 2)
    deviation = math.sqrt(variance + steps * wanted**2)

    orders = np.geomspace(0.25, 64, 17) / deviation
    here = _cumulant(points, np.array([tilt]))[0]
    highs = (_cumulant(points, tilt + orders) - here - math.log(LEFT_OUT)) / orders
    lows = (_cumulant(points, tilt - orders) - here - math.log(LEFT_OUT)) / -orders
    width = float(highs.min() - lows.max())
    spread = max(float(losses.max() - losses.min()) for losses, _, _ in points)

    finest = max(width, spread) / MOST_CELLS
    return _Choice(
        tilt=tilt,
        interval=power_of_two(max(wanted, finest)),
        finest=power_of_two(finest),
        above=float(orders[np.argmin(highs)]),
        below=float(orders[np.argmax(lows)]),
    )


def _epsilon(masses: Sequence[tuple[LossMass, int]], delta: float, choice: _Choice) -> float:
    interval, tilt = masses[0][0].interval, choice.tilt
    steps = sum(count for _, count in masses)
    infinite = _any_infinite(masses)
    if infinite >= delta:
        return math.inf

    points = [(part.losses, part.mass, count) for part, count in masses]
    log_norm, log_above, log_below = _cumulant(points, tilt + np.array([0.0, choice.above, -choice.below]))
    log_norm += 1e-15 * steps  # total masses are right to a few ulps
    if not all(map(math.isfinite, (log_norm, log_above, log_below))):
        return math.inf
    high = (log_above - log_norm - math.log(LEFT_OUT)) / choice.above
    low = (log_below - log_norm - math.log(LEFT_OUT)) / -choice.below
    infinite += math.exp(log_above - (tilt + choice.above) * high)  # Chernoff: mass above the window
    if infinite >= delta:
        return math.inf
    chernoff = (log_norm - math.log(delta - infinite) + float(_conversion(np.array(tilt)))) / tilt

    bottom = math.floor(low / interval)
    size = int(fft.next_fast_len(max(math.ceil(high / interval) - bottom + 1, 16), real=True))
    if size > 8 * MOST_CELLS or chernoff > ANY_EPSILON:
        return max(0.0, float(chernoff))
    losses = np.asarray((bottom + np.arange(size)) * interval)
    # Cells far below ε would overflow here; their exact mass no longer matters.
    mass = _tilted(masses, tilt, size, bottom) * np.exp(np.minimum(log_norm - tilt * losses, 300.0))
    if not np.isfinite(mass).all():
        return max(0.0, float(chernoff))
    return max(0.0, min(float(chernoff), _crossing(losses, mass, infinite, delta, chernoff)) * (1 + 1e-9))


def _tilted(masses: Sequence[tuple[LossMass, int]], tilt: float, size: int, bottom: int) -> Array:
    """Return the composed distribution of e^(λL)·P, normed to 1, on `size` grid points from `bottom`; from above.

    What lies outside the window wraps around into it, which only adds mass.
    """
    log_transform = np.zeros(size // 2 + 1, dtype=np.complex128)
    shift, roundoff = 0, 0.0
    for part, count in masses:
        with np.errstate(divide="ignore"):
            log_weights = np.log(part.mass) + tilt * part.losses
        weights = np.exp(log_weights - log_weights.max())
        weights /= weights.sum()
        index = part.offset + np.arange(weights.size)
        # Centred on its mean: phases stay small where the transform is large, and so does the error of their powers.
        centre = round(float(weights @ index))
        shift += count * centre
        folded = np.bincount((index - centre) % size, weights=weights, minlength=size)
        with np.errstate(divide="ignore", invalid="ignore"):
            log_transform += count * np.log(fft.rfft(folded))  # a zero becomes −∞, and is not heard below
        roundoff = max(roundoff, float(np.linalg.norm(weights)) / math.sqrt(size))
    transform = np.zeros_like(log_transform)
    heard = log_transform.real > -70.0
    transform[heard] = np.exp(log_transform[heard])
    composed = fft.irfft(transform, size)

    # FFTs are right to u·log2(size) of the norm, and a power of n multiplies that by n; four times over for safety.
    steps = sum(count for _, count in masses)
    roundoff += steps * float(np.abs(transform).sum()) * 2 / size
    error = 4 * np.finfo(np.float64).eps * math.log2(size) * roundoff
    return np.roll(np.maximum(composed, 0.0) + error, -((bottom - shift) % size))


def _crossing(losses: Array, mass: Array, infinite: float, delta: float, ceiling: float) -> float:
    """Return the smallest ε with δ(ε) ≤ delta, or the window's lowest loss where δ is small enough already.

    `ceiling` is an ε that is known to do.
    """
    above = np.append(np.cumsum(mass[:0:-1])[::-1], 0.0)  # Σ mass of higher losses
    # δ at a loss, Σ (1 − e^(loss − higher))·mass, as a sum over `above`, which has no cancellation.
    scale = np.clip(ceiling - losses, -700.0, 300.0)
    discounted = np.cumsum((above * np.exp(scale))[::-1])[::-1] * np.exp(-scale)
    deltas = infinite - math.expm1(losses[0] - losses[1]) * discounted
    deltas = np.where(scale < 300.0, deltas, infinite + above)
    if not np.isfinite(deltas).all():
        return ceiling
    passed = np.flatnonzero((losses <= ceiling) & (deltas > delta))
    if passed.size == 0:
        return float(losses[0])
    last = int(passed[-1])
    lower = above[last] + infinite - deltas[last]
    step = math.log1p((deltas[last] - delta) / lower) if lower > 0 else math.inf
    return float(losses[last]) + min(step, float(losses[1] - losses[0]))


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
    of `FixedSize` begins there, and would begin a cell too early below."""
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
