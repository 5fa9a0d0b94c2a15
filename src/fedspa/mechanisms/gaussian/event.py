"""What a participation with Gaussian noise does, and how its steps are priced.

The noise multiplier is the standard deviation of the noise on the *sum* of clipped gradients, in units of the bound C
on one example's clipped gradient (√k·c for `coordinate` clipping, C for `l2`): the same number under both relations.
Replace-one moves a sum by up to 2C: the Gaussian and fixed-size pairs are handed σ/(2C) there, whereas the Poisson
replace pair holds both examples and takes σ/C.

Fixed-size samples have an accountant under replace-one only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from fedspa.errors import PrivacyError
from fedspa.mechanisms.gaussian.tail import truncation_delta
from fedspa.privacy.event import PLD, Event, Neighbours, NoiseMode, Sampling, Step, Unit, check_word

if TYPE_CHECKING:
    from fedspa.privacy.pld import DominatingPair

KIND = "gaussian"
# Steps are priced by their own noise between these; outside by a step that costs more.
_LEAST_NOISE, _MOST_NOISE = 1e-3, 1e8


@dataclass(frozen=True, slots=True)
class GaussianEvent(Event):
    """`steps` Gaussian releases, each on a fresh sample of `batch` (expected or exact) of `records` records."""

    sampling: Sampling
    batch: int
    records: int
    steps: int
    noise_multiplier: float
    noise: NoiseMode | None = None
    unit: Unit = "record"

    def __post_init__(self) -> None:
        try:
            self._make_whole("batch", "records", "steps")
            object.__setattr__(self, "noise_multiplier", float(self.noise_multiplier))  # equal events, equal text
        except (TypeError, ValueError, OverflowError) as error:
            raise PrivacyError(f"an event takes whole numbers and a noise multiplier: {error}") from None
        check_word("sampling", self.sampling, Sampling)
        self._check_sampled()
        if not (math.isfinite(self.noise_multiplier) and self.noise_multiplier > 0):
            raise PrivacyError(f"noise multiplier is {self.noise_multiplier}; it must be positive and finite")

    def to_json(self) -> str:
        return self._canonical(KIND)

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
    """One release of a sampled batch, as it is priced: `noise` in the units of `GaussianEvent`."""

    sampling: Sampling
    rate: Fraction
    noise: float

    def pairs(self, neighbours: Neighbours) -> tuple[DominatingPair, ...]:
        from fedspa.privacy.fixed_size import FixedSize
        from fedspa.privacy.poisson import Added, Removed, Replaced

        rate = float(self.rate)
        if self.sampling == "fixed":
            return (FixedSize(rate, 2 / self.noise),)
        if neighbours == "replace-one":
            return (Replaced(rate, 1 / self.noise),)
        return Removed(rate, 1 / self.noise), Added(rate, 1 / self.noise)

    def gaussian_shift(self, neighbours: Neighbours) -> float | None:
        """Without sampling (q = 1) a step is a plain Gaussian."""
        return _width(neighbours) / self.noise if self.rate == 1 else None

    def beyond(self, neighbours: Neighbours) -> float:
        """Where the noise ends (`tail`). A record that is not in the sample moves nothing. Where it is replaced in a
        Poisson sample of half the records or less, the neighbour's release is at least as likely one without it, which
        is half as far."""
        halfway = self.sampling == "poisson" and self.rate <= Fraction(1, 2)
        return float(self.rate) * truncation_delta((1 if halfway else _width(neighbours)) / self.noise)


def _width(neighbours: Neighbours) -> int:
    """How many bounds on an example one record moves a sum by."""
    return 1 if neighbours == "add-remove" else 2
