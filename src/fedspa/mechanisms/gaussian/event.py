"""What a participation with Gaussian noise does, and the privacy cost of its steps.

The noise multiplier is the standard deviation of the noise on the *sum* of clipped gradients, in units of the bound C
on one example's clipped gradient (√k·c for `coordinate` clipping, C for `l2`): the same number under both relations.
Replace-one moves a sum by up to 2C: the Gaussian and fixed-size pairs are handed σ/(2C) there, whereas the Poisson
replace pair holds both examples and takes σ/C.

Fixed-size samples have an accountant under replace-one only.

The δ that a release costs because its noise ends: no sampler draws a Gaussian of any size, and an ε that assumes one
is too low.

A pair of values of `secure` noise has a radius √(−2·ln u), whose u has 74 random bits: none is drawn beyond
T = √(2·74·ln 2) = 10.13 standard deviations. `exact` noise goes on to 14 for each value. Within, neighbours' losses are
those of the Gaussian. A release that lies within T of its own centre, and beyond T of the neighbour's, has an infinite
loss, and the probability of that is what δ must cover.

**One pair.** Let a record move the centre of a pair by g ≤ T. By the triangle inequality, noise that leads beyond T of
the other centre has a radius between T − g and T. A Gaussian pair has a radius above r with probability e^(−r²/2), so
that this has the probability

    h(g) = e^(−(T − g)²/2) − e^(−T²/2) = 2⁻⁷⁴·(e^(gT − g²/2) − 1).

(About 1/π of it is reached, as only a part of the directions leads beyond.)

**All pairs.** A record moves all pairs together by `shift` at most: Σg² ≤ shift². The union bound adds up h. For pairs
with g ≤ t, e^x − 1 ≤ x·e^x gives h(g) ≤ 2⁻⁷⁴·T·e^(tT)·g, and Σg ≤ √pairs·shift by Cauchy and Schwarz. For the others,
h(g) ≤ g²·max h(g)/g², which is attained at t or at the largest g there can be: h(g)/g² falls and then rises between
them. Steps add up, also where a server chose each of them by the releases before it.

With 2³⁰ pairs this is 2·10⁻¹⁷ for each step and unit of shift, so that noise for ε = 1 at δ = 10⁻¹² is not decided by
it for up to 10¹⁰ steps. A radius of 63 bits would cost 1,900 times as much, and decided it from 10⁵ steps on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, ClassVar

from fedspa.errors import PrivacyError
from fedspa.privacy.event import PLD, Event, Neighbours, NoiseMode, Sampling, Step, Unit
from fedspa.randomness.mask import DIMENSION_LIMIT

if TYPE_CHECKING:
    from fedspa.privacy.pld import DominatingPair

RADIUS_BITS = 74
TAIL = math.sqrt(2 * RADIUS_BITS * math.log(2))
_LAST = 2.0**-RADIUS_BITS
_SMALL = 0.02  # t: any would do
_PAIRS = DIMENSION_LIMIT // 2


def truncation_delta(shift: float) -> float:
    """Return an upper bound on the probability that one release lies where the neighbour's cannot; `shift` is in
    standard deviations."""
    if shift > TAIL - 1:
        return 1.0
    spread = TAIL * math.exp(_SMALL * TAIL) * math.sqrt(_PAIRS) * shift
    steepest = max(_chance(move) / move**2 for move in (_SMALL, max(shift, _SMALL)))
    return min(1.0, _LAST * (spread + steepest * shift**2) * (1 + 1e-9))


def _chance(move: float) -> float:
    return math.expm1(move * TAIL - move**2 / 2)


# Between these, the cost of a step is that of its own noise; outside, that of a step that costs more.
_LEAST_NOISE, _MOST_NOISE = 1e-3, 1e8


@dataclass(frozen=True, slots=True)
class GaussianEvent(Event):
    """`steps` Gaussian releases, each on a fresh sample of `batch` (expected or exact) of `records` records."""

    kind: ClassVar[str] = "gaussian"

    sampling: Sampling
    batch: int
    records: int
    steps: int
    noise_multiplier: float
    noise: NoiseMode | None = None
    unit: Unit = "record"

    def __post_init__(self) -> None:
        Event.__post_init__(self)
        if not (math.isfinite(self.noise_multiplier) and self.noise_multiplier > 0):
            raise PrivacyError(f"noise multiplier is {self.noise_multiplier}; it must be positive and finite")

    def accountant(self, neighbours: Neighbours) -> str:
        if (self.sampling, neighbours) == ("fixed", "add-remove"):
            raise PrivacyError("fixed sampling has no accountant under add-remove; allowed: replace-one")
        return PLD

    @property
    def step(self) -> SampledGaussian:
        """A step, or one that costs no less and is within what accountants can compute."""
        noise = min(self.noise_multiplier, _MOST_NOISE)
        # With hardly any noise, sampling hides nothing that is worth the many cells its losses would take.
        rate = Fraction(self.batch, self.records) if noise >= _LEAST_NOISE else Fraction(1)
        return SampledGaussian(self.sampling, rate, noise)

    def __str__(self) -> str:
        drawn = f"{self.sampling} {self.batch}/{self.records}{self._shown_unit}"
        return f"{self.steps} steps, {drawn}, noise {self.noise_multiplier:.4g}{self._shown_mode}"


@dataclass(frozen=True, slots=True)
class SampledGaussian(Step):
    """One release of a sampled batch, as accountants compose it: `noise` in the units of `GaussianEvent`."""

    sampling: Sampling
    rate: Fraction
    noise: float

    def pairs(self, neighbours: Neighbours) -> tuple[DominatingPair, ...]:
        from fedspa.privacy.subsampling import Added, FixedSize, Removed, Replaced

        rate = float(self.rate)
        if self.sampling == "fixed":
            return (FixedSize(rate, 2 / self.noise),)
        if neighbours == "replace-one":
            return (Replaced(rate, 1 / self.noise),)
        return Removed(rate, 1 / self.noise), Added(rate, 1 / self.noise)

    def gaussian_shift(self, neighbours: Neighbours) -> float | None:
        """Return the shift of a plain Gaussian, which a step is without sampling (q = 1)."""
        return _width(neighbours) / self.noise if self.rate == 1 else None

    def extra_delta(self, neighbours: Neighbours) -> float:
        """Return the δ of the ends of the noise (`truncation_delta`). A record that is not in the sample moves nothing.
        Where it is replaced in a Poisson sample of half the records or less, the neighbour's release is at least as
        likely one without it, which is half as far."""
        halfway = self.sampling == "poisson" and self.rate <= Fraction(1, 2)
        return float(self.rate) * truncation_delta((1 if halfway else _width(neighbours)) / self.noise)


def _width(neighbours: Neighbours) -> int:
    """Return how many bounds on an example one record moves a sum by."""
    return 1 if neighbours == "add-remove" else 2
