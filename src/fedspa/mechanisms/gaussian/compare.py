"""One mechanism, every way to account for it: the paper's figures beside the verified ones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from fedspa.errors import PrivacyError
from fedspa.mechanisms.gaussian import calibrate
from fedspa.mechanisms.gaussian.event import GaussianEvent
from fedspa.mechanisms.gaussian.published import published_epsilon, published_noise, smallest_certified_epsilon
from fedspa.privacy import accounting
from fedspa.privacy.cap import shown_digits
from fedspa.privacy.event import Accountant, Neighbours, Sampling

Method = Literal["published", "published-corrected", "verified"]

# A run's own terms first.
VERIFIED: tuple[tuple[Sampling, Neighbours, Accountant], ...] = (
    ("poisson", "add-remove", "pld"),
    ("poisson", "add-remove", "rdp"),
    ("poisson", "replace-one", "pld"),
    ("fixed", "replace-one", "pld"),
    ("fixed", "replace-one", "rdp"),
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """`noise` as in `GaussianEvent` (σ·B over √p·G or C), its ε by this method, and whether that ε holds."""

    method: Method
    sampling: Sampling
    neighbours: Neighbours
    accountant: Literal["theorem-1", "rdp", "pld"]
    noise: float
    epsilon: float
    sound: bool


def rows(
    *,
    batch: int,
    records: int,
    local_steps: int,
    participations: int,
    delta: float,
    epsilon: float | None = None,
    noise: float | None = None,
) -> list[Comparison]:
    """The noise that each method needs for `epsilon` (and the ε that it then has), or the ε of each at `noise`: sound
    rows first, the paper's claims last."""
    if (epsilon is None) == (noise is None):
        raise PrivacyError("give exactly one of epsilon and noise")
    sizes = {"batch": batch, "records": records, "steps": local_steps, "participations": participations}
    table: list[Comparison] = []
    for sampling, neighbours, accountant in VERIFIED:
        needed = noise
        if epsilon is not None:
            needed = calibrate.noise_multiplier(
                epsilon, delta, sampling=sampling, neighbours=neighbours, accountant=accountant, **sizes
            )
        assert needed is not None
        event = GaussianEvent(sampling, batch, records, local_steps, needed)
        cost = accounting.epsilon({event: participations}, delta, neighbours=neighbours, accountant=accountant)
        table.append(Comparison("verified", sampling, neighbours, accountant, needed, cost, True))
    for corrected in (False, True):
        needed = noise
        if epsilon is not None:
            needed = published_noise(epsilon, delta, corrected=corrected, **sizes)
        assert needed is not None
        event = GaussianEvent("fixed", batch, records, local_steps, needed)
        found = published_epsilon(event, participations, delta, corrected=corrected)
        method: Method = "published-corrected" if corrected else "published"
        sound = found.corrected and found.in_range
        table.append(Comparison(method, "fixed", "replace-one", "theorem-1", needed, found.epsilon, sound))
    return table


def warnings(
    table: list[Comparison], *, batch: int, records: int, local_steps: int, participations: int, delta: float
) -> list[str]:
    """What a reader of the table must know before believing a row, a sentence each; `table` as `rows` gave it."""
    told: list[str] = []
    least = smallest_certified_epsilon(
        batch=batch, records=records, steps=local_steps, participations=participations, delta=delta
    )
    certifies = "no epsilon at any noise" if math.isinf(least) else f"no epsilon below {least:.3g} at any noise"
    for row in table:
        if row.accountant != "theorem-1":
            continue
        corrected = row.method == "published-corrected"
        event = GaussianEvent("fixed", batch, records, local_steps, row.noise)
        found = published_epsilon(event, participations, delta, corrected=corrected)
        if not corrected:
            told.append(
                "published: the paper's sensitivity is too small by a factor of √2 (2pG²/B² for 4pG²/B²), "
                "so this row guarantees nothing"
            )
        if found.in_range:
            told.append(f"{row.method}: alpha = {found.alpha:.4g} is inside the range that Theorem 1 asks for")
        else:
            told.append(
                f"{row.method}: alpha = {found.alpha:.4g} is outside the range that Theorem 1 asks for; "
                f"with the range enforced it certifies {certifies}"
            )
        verified = accounting.epsilon({event: participations}, delta, neighbours="replace-one")
        told.append(
            f"{row.method}: noise {row.noise:.4g} has verified epsilon {shown_digits(verified)} "
            f"(fixed, replace-one, pld, delta {delta:g})"
        )
    if delta >= 1 / records:
        told.append(f"delta {delta:g} is not below 1/records = {1 / records:.3g}: it allows a record to be published")
    return told
