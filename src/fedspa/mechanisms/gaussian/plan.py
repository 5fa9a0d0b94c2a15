"""The plan: everything that decides an agent's guarantee, in one frozen object.

The sampler, the clipping, the noise and the accountant all read the plan; sensitivity, σ and the event are derived
from it and typed by nobody. A plan that exists is consistent.

L2 sensitivity of the sum of clipped gradients over k active coordinates:

    | clipping               | add-remove | replace-one |
    | coordinate, each to ±c |    √k·c    |    2√k·c    |
    | l2, norm to C          |      C     |      2C     |

The paper's 2pG²/B² for replace-one (squared, of the mean) should be 4pG²/B².
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedspa.errors import PrivacyError
from fedspa.mechanisms.base import (
    Asked,
    Clipping,
    ClipRule,
    Mechanism,
    PlanDefaults,
    check_clip,
    check_one_given,
    relation,
)
from fedspa.mechanisms.gaussian.calibrate import noise_multiplier
from fedspa.mechanisms.gaussian.event import KIND, GaussianEvent
from fedspa.mechanisms.gaussian.exact import make_grid
from fedspa.privacy.event import MOST, Event, Neighbours, Sampling, Unit, check_word, told

# A privately chosen clip (rule "quantile") takes this much more noise on the gradients: 2 %, so that the noisy count of
# clipped examples fits into the same accounted release.
QUANTILE_NOISE_FACTOR = 1.02

# The quantile that a private clip steers to, and how fast (Andrew et al. 2021): a step moves log C by about RATE times
# the noisy share's distance from it. At the paper's settings that share has a standard deviation of 0.46 per step;
# RATE = 0.02 averages over some hundred steps.
CLIP_QUANTILE = 0.5
CLIP_RATE = 0.02
# However long and noisy a participation: a clip that moves by more than e¹⁰ in it is no honest one.
LARGEST_LOG_GROWTH = 10.0


@dataclass(frozen=True, slots=True)
class GaussianPlan(PlanDefaults):
    """The terms of every agent. Units: gradients for `clip_value`; `noise_multiplier` as in `GaussianEvent`.

    `records` is a public number m, the fewest that an agent holds. It sets the sampling rate q = B/m, which must not
    depend on anyone's own count: a neighbour with a record more would sample at another rate, and no accountant here
    covers that. An agent with more records draws batches that are larger on average, at the same ε. Where `unit` is
    "person", each of these records is a person, with what counts of theirs.
    """

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
    clip_rule: ClipRule = "given"
    unit: Unit = "record"

    def __post_init__(self) -> None:
        if not 1 <= self.active <= self.dimension <= MOST:
            raise PrivacyError(
                f"k is {told(self.active)}; it must lie between 1 and d = {told(self.dimension)}, at most {MOST:g}"
            )
        check_clip(self.clip, self.clip_value)
        check_word("clip rule", self.clip_rule, ClipRule)
        check_word("neighbours", self.neighbours, Neighbours)
        if self.sampling == "fixed" and self.neighbours != "replace-one":
            raise PrivacyError("sampling 'fixed' has a sound accountant under neighbours 'replace-one' only")
        if not 1 <= self.participations <= MOST:
            raise PrivacyError(f"participations is {told(self.participations)}; it must lie between 1 and {MOST:g}")
        _ = self.event  # checks sampling, batch, records, steps and noise
        if not 0 < self.delta < 1 / self.records:
            raise PrivacyError(f"delta is {self.delta}; it must lie between 0 and 1/records = {1 / self.records:.3g}")

    @property
    def rate(self) -> float:
        """q = B/m, for the m that the plan names: a public number, not a count of anyone's records."""
        return self.event.rate

    @property
    def sensitivity(self) -> float:
        """L2 sensitivity of the sum of clipped gradients under the plan's relation (the table above)."""
        return self.clip_norm if self.neighbours == "add-remove" else 2 * self.clip_norm

    @property
    def gradient_noise_multiplier(self) -> float:
        """Noise on the gradient sum in units of `clip_norm`; above `noise_multiplier` where the clip is private."""
        factor = QUANTILE_NOISE_FACTOR if self.clip_rule == "quantile" else 1.0
        return factor * self.noise_multiplier

    @property
    def count_noise(self) -> float:
        """σ_b, the noise on the count of clipped examples (rule "quantile" only).

        An example adds (g, b − ½) with |g| ≤ C and b a bit; the pair costs like one Gaussian of multiplier z when
        z_g⁻² + (2σ_b)⁻² = z⁻². Replace-one doubles both parts, so the same σ_b serves both relations.
        """
        if self.clip_rule != "quantile":
            raise PrivacyError(f"clip rule {self.clip_rule!r} counts nothing")
        z, z_g = self.noise_multiplier, self.gradient_noise_multiplier
        return 0.5 / math.sqrt(z**-2 - z_g**-2)

    @property
    def sigma(self) -> float:
        """σ of Algorithm 1: noise per coordinate of the *mean* gradient (sum over B), before the 1/p scaling."""
        return self.gradient_noise_multiplier * self.clip_norm / self.batch

    @property
    def event(self) -> GaussianEvent:
        """What one participation does."""
        return GaussianEvent(
            self.sampling,
            self.batch,
            self.records,
            self.local_steps,
            self.noise_multiplier,
            unit=self.unit,
        )

    @property
    def clip_growth(self) -> float:
        """How far the clip value can plausibly rise within a participation: all examples clipped, noise at 8σ."""
        if self.clip_rule != "quantile":
            return 1.0
        noise = 8 * math.sqrt(self.local_steps) * self.count_noise / self.batch
        return math.exp(min(CLIP_RATE * (CLIP_QUANTILE * self.local_steps + noise), LARGEST_LOG_GROWTH))

    def update_noise(self, local_lr: float, scale: float) -> float:
        """τ independent draws, scaled like the gradient."""
        return local_lr * scale * self.sigma * math.sqrt(self.local_steps)

    def update_bound(self, local_lr: float, scale: float) -> float:
        """Signal: every sampled example pulls the coordinate to its clip, and ten times as many are sampled as the plan
        expects (an agent may hold more records than the plan names). Noise: 12 standard deviations. A clip that follows
        a quantile may have grown in the meantime."""
        examples = 10 * self.local_steps * self.batch + 50
        signal = local_lr * scale * self.clip_value * examples / self.batch
        return (signal + 12 * self.update_noise(local_lr, scale)) * self.clip_growth

    def require_sendable(self, *, exact: bool) -> None:
        if exact:
            make_grid(self.clip, self.clip_value, self.active, self.gradient_noise_multiplier)
            if self.clip_rule == "quantile":
                make_grid("coordinate", 0.5, 1, 2 * self.count_noise)

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


def calibrated(asked: Asked) -> GaussianPlan:
    noise = asked.options["privacy.noise_multiplier"] or _least_noise(asked)
    drawn = asked.sampling, asked.batch, asked.records, asked.local_steps
    return of_event(GaussianEvent(*drawn, noise, unit=asked.unit), asked)


def of_event(event: Event, asked: Asked) -> GaussianPlan:
    if not isinstance(event, GaussianEvent):
        raise PrivacyError(f"the ledger holds events that are not of Gaussian noise: {event}")
    return GaussianPlan(
        dimension=asked.dimension,
        active=asked.active,
        clip=asked.clip,
        clip_value=asked.clip_value,
        sampling=event.sampling,
        batch=event.batch,
        records=event.records,
        local_steps=event.steps,
        participations=asked.participations,
        noise_multiplier=event.noise_multiplier,
        neighbours=relation(asked.neighbours, event.sampling),
        delta=asked.delta,
        clip_rule=asked.clip_rule,
        unit=event.unit,
    )


def _least_noise(asked: Asked) -> float:
    sizes = {"batch": asked.batch, "records": asked.records, "steps": asked.local_steps}
    sizes["participations"] = asked.participations
    return noise_multiplier(
        asked.target,
        asked.delta,
        sampling=asked.sampling,
        neighbours=relation(asked.neighbours, asked.sampling),
        **sizes,
    )


GAUSSIAN = Mechanism(
    name="gaussian",
    events={KIND: GaussianEvent},
    check=check,
    calibrated=calibrated,
    of_event=of_event,
    plan=GaussianPlan,
)
