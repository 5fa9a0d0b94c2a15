"""What a participation in cpSGD does, in whole numbers, and how it is priced.

Under replace-one: without rotation by its loss distribution (`rounded`), which composes with all others; with rotation
by a bound on one release (`bound`), under the accountant's name `binomial`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Self

from fedspa.errors import PrivacyError
from fedspa.privacy.event import (
    PLD,
    Event,
    Neighbours,
    NoiseMode,
    Sampling,
    Step,
    Unit,
    check_cohort,
    told,
)

KIND = "binomial"
MOST_TRIALS = 2**31 - 1
# Standard deviations of the noise up to which draws have their law. Beyond, it counts as none.
FAR = 20
# The levels of a rotated vector reach this far: all coordinates stay within them but for this chance. It decides ε, so
# it is part of what a stored event means and may not change.
ROTATION_TAIL = 2.0**-10


@dataclass(frozen=True, slots=True)
class BinomialEvent(Event):
    """`steps` releases of cpSGD, each of a fresh batch of exactly `batch` of `records` records (docs/cpsgd.md).

    The mean of `batch` clipped gradients of `dimension` coordinates, rounded at random onto 2^`bits` levels that span
    ±the clip bound (with `rotation`: of the rotated, padded vector, ± what a rotated coordinate hardly ever passes),
    plus Binomial(`trials`, ½) in each coordinate. `aggregated` is of how many agents the noise counts: 1 where the
    adversary sees this agent's numbers. Where secure aggregation was run, it sees their sum over `members` at least, up
    to `colluders` of whom it knows. Without `members`, more than 1 was only a price: the first editions stated one for
    an aggregation that nobody ran.
    """

    batch: int
    records: int
    steps: int
    dimension: int
    bits: int
    trials: int
    rotation: bool
    aggregated: int
    noise: NoiseMode | None = None
    unit: Unit = "record"
    members: int = 0
    colluders: int = 0

    def __post_init__(self) -> None:
        try:
            self._make_whole("batch", "records", "steps", "dimension", "bits", "trials", "aggregated")
            self._make_whole("members", "colluders")
        except TypeError as error:
            raise PrivacyError(f"a Binomial event takes whole numbers: {error}") from None
        self._check_sampled()
        if type(self.rotation) is not bool:
            raise PrivacyError(f"rotation is {self.rotation!r}; it must be true or false")
        for name, most in (("dimension", 2**31 - 1), ("bits", 16), ("trials", MOST_TRIALS), ("aggregated", 2**31 - 1)):
            if not 1 <= getattr(self, name) <= most:
                raise PrivacyError(f"{name} is {told(getattr(self, name))}; it must lie between 1 and {most}")
        if self.members or self.colluders:
            check_cohort(self.members, self.colluders)
            if self.aggregated != self.honest:
                raise PrivacyError(
                    f"aggregated is {self.aggregated}; of {self.members} members with {self.colluders} colluders the "
                    f"noise of {self.honest} counts"
                )

    @property
    def sampling(self) -> Sampling:
        return "fixed"

    @property
    def coordinates(self) -> int:
        """How many numbers are released: d, or the power of two that a rotation pads it to."""
        return 1 << (self.dimension - 1).bit_length() if self.rotation else self.dimension

    def to_json(self) -> str:
        return self._canonical(KIND)

    def as_server_saw(self) -> Self:
        return (self if self.members else self.floor()).with_noise(None)

    def floor(self) -> Self:
        return replace(self, aggregated=1, members=0, colluders=0)

    def accountant(self, neighbours: Neighbours) -> str:
        if neighbours != "replace-one":
            raise PrivacyError(f"cpsgd has no guarantee under {neighbours}; allowed: replace-one")
        return "binomial" if self.rotation else PLD

    @property
    def step(self) -> Step | None:
        from fedspa.algorithms.cpsgd.accounting import rounded_step  # slow to import

        return None if self.rotation else rounded_step(self)

    def step_epsilon(self, delta: float) -> float:
        from fedspa.algorithms.cpsgd.accounting import sampled_epsilon

        return sampled_epsilon(self, delta)

    def __str__(self) -> str:
        seen = "" if self.aggregated == 1 else f", ONLY under secure aggregation of {self.aggregated} agents"
        if self.members:
            seen = f", in sums over {self.members} members with up to {self.colluders} colluding"
        return (
            f"{self.steps} steps of cpsgd, fixed {self.batch}/{self.records}{self._shown_unit}, {2**self.bits} levels, "
            f"Binomial({self.trials}, 1/2) noise{self._shown_mode}{seen}"
        )


def spread(event: BinomialEvent) -> float:
    """κ: the levels span ±κ/√d times the bound on a gradient's L2 norm. 1 without rotation (a coordinate's clip)."""
    return math.sqrt(2 * math.log(2 * event.coordinates / ROTATION_TAIL)) if event.rotation else 1.0
