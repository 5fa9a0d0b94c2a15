"""The room of discrete Gaussian shares, as the rest of the house knows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fedspa.errors import PrivacyError
from fedspa.mechanisms.base import Asked, Mechanism, check_one_given, relation
from fedspa.mechanisms.discrete_gaussian.event import FINE, KIND, MOST_BOUND, SIGMA, DiscreteGaussianEvent
from fedspa.mechanisms.discrete_gaussian.plan import DiscreteGaussianPlan
from fedspa.privacy import accounting
from fedspa.privacy.event import Event

# What a server announces of a plan, beside what every round has.
_RECORD: dict[str, type] = {
    "records": int,
    "participations": int,
    "clip_value": float,
    "bound": int,
    "neighbours": str,
    "delta": float,
    "unit": str,
    "members": int,
    "colluders": int,
    "most": int,
}
_MOST_MEMBERS = 2**31 - 1


def check(config: Mapping[str, Any]) -> None:
    only: tuple[tuple[str, tuple[object, ...], str], ...] = (
        ("algorithm.local_steps", (1,), "one step on all records"),
        ("algorithm.coding", ("int", None), "whole numbers travel"),
        ("privacy.sampling", ("poisson",), "every record takes part"),
        ("privacy.clip", ("l2",), "noise is a share of the bound on a gradient's norm"),
        ("privacy.clip_rule", ("given",), "all members' numbers must have one scale"),
    )
    for key, allowed, why in only:
        if config[key] not in allowed:
            shown = " or ".join("unset" if value is None else repr(value) for value in allowed)
            raise ValueError(f"{key} is {config[key]!r}; under secure aggregation it must be {shown}: {why}")
    if config["algorithm.mask"] == "per-agent" and config["algorithm.compression"] < 1:
        raise ValueError(
            "algorithm.mask is 'per-agent'; under secure aggregation it must be 'shared' or 'fixed': sums are over the "
            "same coordinates"
        )
    check_one_given(config)


def calibrated(asked: Asked) -> DiscreteGaussianPlan:
    cohort = asked.cohort
    if cohort is None:
        raise PrivacyError("shares of noise are for sums over agents: privacy.adversary = 'secure-aggregation'")
    if asked.batch != asked.records:
        raise PrivacyError(
            f"batch is {asked.batch}; under secure aggregation a step is on all records, of which an agent holds "
            f"{asked.records} at least: algorithm.batch = {asked.records}"
        )
    noise = asked.options["privacy.noise_multiplier"]
    bound = 1 if noise is None else _bound(noise)
    event = DiscreteGaussianEvent(asked.records, asked.active, bound, cohort.members, cohort.colluders, unit=asked.unit)
    return of_event(event if noise is not None else _with_most(event, asked), asked)


def _bound(noise: float) -> int:
    """The clip value in steps of the grid at which an agent's own share is this noise, or a little more."""
    if not SIGMA * FINE / MOST_BOUND <= noise <= SIGMA * FINE:
        raise PrivacyError(
            f"noise multiplier is {noise}; a share takes {SIGMA * FINE / MOST_BOUND:g} to {SIGMA * FINE:g}"
        )
    return int(SIGMA * FINE / noise)


def _with_most(event: DiscreteGaussianEvent, asked: Asked) -> DiscreteGaussianEvent:
    """The event with the largest bound, hence the least noise, at which all participations cost at most ε."""
    target = asked.target

    def fits(bound: int) -> bool:
        events: dict[Event, int] = {replace(event, bound=bound): asked.participations}
        neighbours = relation(asked.neighbours, asked.sampling)
        return accounting.epsilon(events, asked.delta, neighbours=neighbours) <= target

    if not fits(1):
        raise PrivacyError(
            f"no share of noise keeps epsilon at {target} with delta {asked.delta}; take a larger epsilon or delta, "
            "more members or fewer rounds"
        )
    enough, over = 1, MOST_BOUND + 1
    while over - enough > 1:
        middle = (enough + over) // 2
        enough, over = (middle, over) if fits(middle) else (enough, middle)
    return replace(event, bound=enough)


def of_event(event: Event, asked: Asked) -> DiscreteGaussianPlan:
    if not isinstance(event, DiscreteGaussianEvent):
        raise PrivacyError(f"the ledger holds events that are not of discrete Gaussian shares: {event}")
    return DiscreteGaussianPlan(
        dimension=asked.dimension,
        active=event.active,
        clip_value=asked.clip_value,
        records=event.records,
        participations=asked.participations,
        bound=event.bound,
        neighbours=relation(asked.neighbours, asked.sampling),
        delta=asked.delta,
        members=event.members,
        colluders=event.colluders,
        most=event.members if asked.cohort is None else asked.cohort.most,
        unit=event.unit,
    )


def of_record(values: Mapping[str, Any]) -> DiscreteGaussianPlan:
    plan = DiscreteGaussianPlan(**{key: values[key] for key in ("dimension", "active", *_RECORD)})
    for key in ("sampling", "batch", "local_steps"):
        if values[key] != getattr(plan, key):
            raise PrivacyError(f"{key} is {values[key]!r}; with shares of noise it must be {getattr(plan, key)!r}")
    return plan


DISCRETE_GAUSSIAN = Mechanism(
    name="discrete-gaussian",
    events={KIND: DiscreteGaussianEvent},
    check=check,
    calibrated=calibrated,
    of_event=of_event,
    record=_RECORD,
    of_record=of_record,
    limits={
        "bound": (1, MOST_BOUND),
        "members": (2, _MOST_MEMBERS),
        "colluders": (0, _MOST_MEMBERS),
        "most": (2, _MOST_MEMBERS),
    },
)
