"""The noise for an ε, or the ε of a noise, for each sampling and relation that has an accountant."""

from __future__ import annotations

from dataclasses import dataclass

from fedspa.errors import PrivacyError
from fedspa.mechanisms.gaussian import calibrate
from fedspa.mechanisms.gaussian.event import GaussianEvent
from fedspa.privacy import accounting
from fedspa.privacy.event import Neighbours, Sampling

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
    """Return the noise that `epsilon` needs (and the ε that it then has), or the ε of `noise`, for each of `TERMS`."""
    if (epsilon is None) == (noise is None):
        raise PrivacyError("give exactly one of epsilon and noise")
    sizes = {"batch": batch, "records": records, "steps": local_steps, "participations": participations}
    table = []
    for sampling, neighbours in TERMS:
        needed = noise
        if epsilon is not None:
            needed = calibrate.noise_multiplier(epsilon, delta, sampling=sampling, neighbours=neighbours, **sizes)
        assert needed is not None
        event = GaussianEvent(sampling, batch, records, local_steps, needed)
        cost = accounting.epsilon({event: participations}, delta, neighbours=neighbours)
        table.append(Comparison(sampling, neighbours, event.accountant(neighbours), needed, cost))
    return table
