"""Registration of the Gaussian mechanism."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedspa.errors import PrivacyError
from fedspa.mechanisms.base import Asked, Mechanism, check_one_given, relation
from fedspa.mechanisms.gaussian.calibrate import noise_multiplier
from fedspa.mechanisms.gaussian.event import KIND, GaussianEvent
from fedspa.mechanisms.gaussian.plan import GaussianPlan
from fedspa.privacy.event import Event

# What a server announces of a plan, beside what every round has.
_RECORD: dict[str, type] = {
    "records": int,
    "participations": int,
    "clip": str,
    "clip_value": float,
    "clip_rule": str,
    "noise_multiplier": float,
    "neighbours": str,
    "delta": float,
    "unit": str,
}
_STEPS = ("dimension", "active", "sampling", "batch", "local_steps")


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


def of_record(values: Mapping[str, Any]) -> GaussianPlan:
    return GaussianPlan(**{key: values[key] for key in (*_STEPS, *_RECORD)})


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
    record=_RECORD,
    of_record=of_record,
)
