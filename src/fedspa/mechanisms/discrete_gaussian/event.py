"""What a participation in a sum over agents does, where each adds a discrete Gaussian share of the noise.

In whole numbers: the sum of an agent's clipped gradients is a point on a grid, `FINE` steps of which are a unit. What
leaves the agent is a draw of the discrete Gaussian on the whole units around that point, of standard deviation `SIGMA`
units. One kind of event has one `SIGMA` and one `FINE`: how much noise that is, is said by the bound on an example's
gradient in steps of the grid. docs/shares.md has the theorem.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from fedspa.errors import PrivacyError
from fedspa.privacy.event import PLD, Event, Neighbours, NoiseMode, Sampling, Step, Unit, check_cohort, told

KIND = "discrete-gaussian"
# Of one share, in units; and the steps of the grid that a unit has.
SIGMA, FINE = 4, 1024
MOST_BOUND = 2**24


@dataclass(frozen=True, slots=True)
class DiscreteGaussianEvent(Event):
    """One release of all `records` of an agent: the sum of their clipped gradients on `active` coordinates.

    `bound` is the most that one clipped gradient measures in L2, in steps of the grid. The adversary sees the sum over
    `members` agents at least, up to `colluders` of whom it knows; without members it sees this agent's own share.
    """

    records: int
    active: int
    bound: int
    members: int = 0
    colluders: int = 0
    noise: NoiseMode | None = None
    unit: Unit = "record"

    def __post_init__(self) -> None:
        try:
            self._make_whole("records", "active", "bound", "members", "colluders")
        except TypeError as error:
            raise PrivacyError(f"a discrete Gaussian event takes whole numbers: {error}") from None
        self._check_sampled()
        for name, most in (("active", 2**31 - 1), ("bound", MOST_BOUND)):
            if not 1 <= getattr(self, name) <= most:
                raise PrivacyError(f"{name} is {told(getattr(self, name))}; it must lie between 1 and {most}")
        if self.members or self.colluders:
            check_cohort(self.members, self.colluders)

    @property
    def sampling(self) -> Sampling:
        """Every record takes part: a Poisson sample at rate 1."""
        return "poisson"

    @property
    def batch(self) -> int:
        return self.records

    @property
    def steps(self) -> int:
        return 1

    def to_json(self) -> str:
        return self._canonical(KIND)

    def floor(self) -> Self:
        return replace(self, members=0, colluders=0)

    def accountant(self, neighbours: Neighbours) -> str:
        return PLD

    @property
    def step(self) -> Step:
        from fedspa.mechanisms.discrete_gaussian.price import SharedNoise  # slow to import

        return SharedNoise(self.bound, self.honest, self.active)

    def __str__(self) -> str:
        seen = "the agent's own share"
        if self.members:
            seen = f"in sums over {self.members} members with up to {self.colluders} colluding"
        return (
            f"1 step on all {self.records}{self._shown_unit or ' records'}, discrete Gaussian share of noise "
            f"{SIGMA * FINE / self.bound:.4g}{self._shown_mode}, {seen}"
        )
