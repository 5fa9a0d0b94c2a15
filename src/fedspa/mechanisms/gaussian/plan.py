"""The plan: everything that decides an agent's guarantee, in one frozen object.

The sampler, the clipping, the noise and the accountant all read the plan; sensitivity, σ and the event are derived
from it and typed by nobody. A plan that exists is consistent.

L2 sensitivity of the sum of clipped gradients over k active coordinates:

    | clipping               | add-remove | replace-one |
    | coordinate, each to ±c |    √k·c    |    2√k·c    |
    | l2, norm to C          |      C     |      2C     |

The paper's 2pG²/B² for replace-one (squared, of the mean) should be 4pG²/B².

The noise multiplier is the standard deviation of the noise on the *sum* of clipped gradients, in units of the bound C
on one example's clipped gradient (√k·c for `coordinate` clipping, C for `l2`): the same number under both relations.
Replace-one moves a sum by up to 2C: the Gaussian and fixed-size pairs are handed σ/(2C) there, whereas the Poisson
replace pair holds both examples and takes σ/C. The noise ends, which δ pays for (docs/accounting.md has the proof).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, ClassVar

from fedspa.errors import PrivacyError
from fedspa.mechanisms.base import (
    Clipping,
    Mechanism,
    Plan,
    PlanRequest,
    check_one_given,
    make_plan,
    relation,
)
from fedspa.mechanisms.gaussian.exact import make_grid
from fedspa.privacy import accounting
from fedspa.privacy.accounting import gaussian_epsilon
from fedspa.privacy.event import MOST, PLD, Event, Neighbours, NoiseMode, Sampling, Step, Unit
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
        from fedspa.privacy.pld import Added, FixedSize, Removed, Replaced

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


@dataclass(frozen=True, slots=True)
class GaussianPlan(Plan):
    """The terms of every agent. Units: gradients for `clip_value`; `noise_multiplier` as in `GaussianEvent`.

    `records` is a public number m, the fewest that an agent holds. It sets the sampling rate q = B/m, which must not
    depend on anyone's own count: a neighbour with a record more would sample at another rate, and no accountant here
    covers that. An agent with more records draws batches that are larger on average, at the same ε. Where `unit` is
    "person", each of these records is a person, with what counts of theirs.
    """

    event_type = GaussianEvent

    dimension: int
    active: int
    clip: Clipping
    clip_value: float
    sampling: Sampling
    batch: int
    records: int
    local_steps: int
    participations: int
    noise_multiplier: float
    neighbours: Neighbours
    delta: float
    unit: Unit = "record"

    if TYPE_CHECKING:

        @property
        def event(self) -> GaussianEvent: ...

    def __post_init__(self) -> None:
        Plan.__post_init__(self)
        if self.sampling == "fixed" and self.neighbours != "replace-one":
            raise PrivacyError("sampling 'fixed' has an accountant under neighbours 'replace-one' only")

    @property
    def rate(self) -> float:
        """q = B/m, for the m that the plan names: a public number, not a count of anyone's records."""
        return self.event.rate

    @property
    def sensitivity(self) -> float:
        """L2 sensitivity of the sum of clipped gradients under the plan's relation (the table above)."""
        return self.clip_norm if self.neighbours == "add-remove" else 2 * self.clip_norm

    @property
    def sigma(self) -> float:
        """σ of Algorithm 1: noise per coordinate of the *mean* gradient (sum over B), before the 1/p scaling."""
        return self.noise_multiplier * self.clip_norm / self.batch

    def update_bound(self, local_lr: float, scale: float) -> float:
        """Signal: every sampled example pulls the coordinate to its clip, and ten times as many are sampled as the plan
        expects (an agent may hold more records than the plan names). Noise: 12 standard deviations."""
        examples = 10 * self.local_steps * self.batch + 50
        signal = local_lr * scale * self.clip_value * examples / self.batch
        return signal + 12 * self.update_noise(local_lr, scale)

    def scoring(self, models: int) -> GaussianPlan:
        """A record's scores have norm √models: the plan's noise is that many times its multiplier."""
        return replace(self, dimension=models, active=models, clip="coordinate", clip_value=1.0)

    def check_sendable(self, *, exact: bool) -> None:
        if exact:
            make_grid(self.clip, self.clip_value, self.active, self.noise_multiplier)

    def report_rows(self) -> list[tuple[str, str, str]]:
        return [
            ("k", f"{self.active:,}", "active coordinates: what an upload holds"),
            ("p", f"{self.compression:.4g}", "compression, k/d"),
            ("sensitivity", f"{self.sensitivity:.4g}", f"L2, of the sum of clipped gradients, {self.neighbours}"),
        ]


def check(config: Mapping[str, Any]) -> None:
    check_one_given(config)
    sampling, neighbours = config["privacy.sampling"], config["privacy.neighbours"]
    if sampling == "fixed" and neighbours == "add-remove":
        raise ValueError(
            "privacy.neighbours is 'add-remove'; privacy.sampling 'fixed' has an accountant under 'replace-one' only"
        )


def calibrated(request: PlanRequest) -> GaussianPlan:
    noise = request.options["privacy.noise_multiplier"] or noise_multiplier(
        request.target,
        request.delta,
        sampling=request.sampling,
        batch=request.batch,
        records=request.records,
        steps=request.local_steps,
        participations=request.participations,
        neighbours=relation(request.neighbours, request.sampling),
    )
    return make_plan(GaussianPlan, request, noise_multiplier=noise)


GAUSSIAN = Mechanism("gaussian", GaussianPlan, check, calibrated)


# The least noise for a budget, verified by the accountant itself.
#
# ε falls as noise grows. A bracket around a guess is halved on the grid of four significant digits: the result is the
# smallest such number whose ε does not exceed the target.

_DIGITS = 1000  # four significant digits: mantissas 1000 … 9999
LEAST_NOISE, MOST_NOISE = 1e-3, 1e8


def noise_multiplier(
    epsilon: float,
    delta: float,
    *,
    sampling: Sampling,
    batch: int,
    records: int,
    steps: int,
    participations: int,
    neighbours: Neighbours,
) -> float:
    """Return the least noise multiplier, to four digits, at which `participations` cost at most `epsilon` at
    `delta`."""
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise PrivacyError(f"epsilon is {epsilon}; it must be positive and finite")
    if not 0 < delta < 1:
        raise PrivacyError(f"delta is {delta}; it must lie between 0 and 1")
    GaussianEvent(sampling, batch, records, steps, 1.0)  # which refuses sizes that the guess below cannot take
    if not 1 <= participations <= MOST:
        raise PrivacyError(f"participations is {participations}; it must lie between 1 and {MOST:g}")

    def cost(index: int) -> float:
        event = GaussianEvent(sampling, batch, records, steps, _noise(index))
        return accounting.epsilon({event: participations}, delta, neighbours=neighbours)

    # A sampled Gaussian of many steps is nearly one Gaussian of shift q·√n·sensitivity/σ.
    width = 1 if neighbours == "add-remove" else 2
    spread = width * batch / records * math.sqrt(steps * participations)
    guess = min(max(spread / _gaussian_shift(epsilon, delta), 0.3), MOST_NOISE / 10)
    most = _index(MOST_NOISE)
    enough = short = _index(guess)
    stride = _DIGITS // 2
    while cost(enough) > epsilon:
        short, enough, stride = enough, min(enough + stride, most), 2 * stride
        if short == most:
            raise PrivacyError(
                f"no noise multiplier up to {MOST_NOISE:g} keeps epsilon at {epsilon} with delta {delta}; "
                "take a larger epsilon or delta, or fewer steps"
            )
    stride = _DIGITS // 2
    while short >= enough or cost(short) <= epsilon:
        enough = min(enough, short)
        if enough <= _index(LEAST_NOISE):
            return _noise(enough)
        short, stride = max(enough - stride, _index(LEAST_NOISE)), 2 * stride
    return _noise(accounting.last_that_fits(lambda index: cost(index) <= epsilon, enough, short))


def _gaussian_shift(target: float, delta: float) -> float:
    """Return the shift μ at which one Gaussian costs about `target`."""
    low, high = 1e-9, 1e9
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if gaussian_epsilon(middle, delta) <= target else (low, middle)
    return low


def _noise(index: int) -> float:
    """Return the index-th number of four significant digits, in order; read from text, so that it prints as it is."""
    exponent, mantissa = divmod(index, 9 * _DIGITS)
    return float(f"{_DIGITS + mantissa}e{exponent}")


def _index(noise: float) -> int:
    """Return the index of the smallest four-digit number that is not below `noise`."""
    exponent = math.floor(math.log10(noise)) - 3
    index: int = exponent * 9 * _DIGITS + math.floor(noise / 10**exponent) - _DIGITS
    while _noise(index) < noise:
        index += 1
    return index


# A run's own terms first.
TERMS: tuple[tuple[Sampling, Neighbours], ...] = (
    ("poisson", "add-remove"),
    ("poisson", "replace-one"),
    ("fixed", "replace-one"),
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """`noise` as in `GaussianEvent` (σ·B over √p·G or C), and its ε."""

    sampling: Sampling
    neighbours: Neighbours
    accountant: str
    noise: float
    epsilon: float


def compare(
    *,
    batch: int,
    records: int,
    local_steps: int,
    participations: int,
    delta: float,
    epsilon: float | None = None,
    noise: float | None = None,
) -> list[Comparison]:
    """Return the noise that `epsilon` needs (and the ε that it then has), or the ε of `noise`, for each of `TERMS`."""
    if (epsilon is None) == (noise is None):
        raise PrivacyError("give exactly one of epsilon and noise")
    sizes = {"batch": batch, "records": records, "steps": local_steps, "participations": participations}
    table = []
    for sampling, neighbours in TERMS:
        needed = noise
        if epsilon is not None:
            needed = noise_multiplier(epsilon, delta, sampling=sampling, neighbours=neighbours, **sizes)
        assert needed is not None
        event = GaussianEvent(sampling, batch, records, local_steps, needed)
        cost = accounting.epsilon({event: participations}, delta, neighbours=neighbours)
        table.append(Comparison(sampling, neighbours, event.accountant(neighbours), needed, cost))
    return table
