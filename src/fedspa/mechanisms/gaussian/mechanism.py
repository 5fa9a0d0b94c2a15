"""The room of Gaussian noise, as the rest of the house knows it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, cast

from fedspa.errors import PrivacyError
from fedspa.mechanisms.base import Asked, Mechanism, check_one_given, relation
from fedspa.mechanisms.gaussian.calibrate import noise_multiplier
from fedspa.mechanisms.gaussian.event import CLIP_FROM_DATA, KIND, GaussianEvent
from fedspa.mechanisms.gaussian.plan import CLIP_READ, GaussianPlan
from fedspa.mechanisms.gaussian.published import published_noise
from fedspa.privacy.event import Accountant, Event

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
    accountant = config["privacy.accountant"]
    if sampling == "fixed" and neighbours == "add-remove":
        raise ValueError(
            "privacy.neighbours is 'add-remove'; privacy.sampling 'fixed' has a sound accountant under "
            "'replace-one' only"
        )
    if sampling == "poisson" and neighbours == "replace-one" and accountant == "rdp":
        raise ValueError(
            "privacy.accountant is 'rdp'; Poisson sampling under 'replace-one' has a sound accountant in 'pld' only"
        )
    if accountant == "theorem-1" and sampling != "fixed":
        raise ValueError("privacy.accountant is 'theorem-1', which assumes privacy.sampling 'fixed'")


def notes(config: Mapping[str, Any]) -> list[str]:
    if config["privacy.accountant"] != "theorem-1":
        return []
    return ["the noise was calibrated by the paper's Theorem 1, which is not sound; epsilon is the verified one"]


def calibrated(asked: Asked) -> GaussianPlan:
    noise = asked.options["privacy.noise_multiplier"] or _least_noise(asked)
    drawn = asked.sampling, asked.batch, asked.records, asked.local_steps
    return of_event(GaussianEvent(*drawn, noise, unit=asked.unit), asked)


def of_event(event: Event, asked: Asked) -> GaussianPlan:
    if not isinstance(event, GaussianEvent):
        raise PrivacyError(f"the ledger holds events that are not of Gaussian noise: {event}")
    if event.clip_from_data and asked.clip_rule != "median":
        raise PrivacyError(
            f"the ledger says that the clip value was read off the data, the config clip_rule = {asked.clip_rule!r}: "
            "rely on no ε of this page"
        )
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
    if asked.accountant == "theorem-1":
        return published_noise(asked.target, asked.delta, corrected=False, **sizes)
    return noise_multiplier(
        asked.target,
        asked.delta,
        sampling=asked.sampling,
        neighbours=relation(asked.neighbours, asked.sampling),
        accountant=cast(Accountant, asked.accountant),
        **sizes,
    )


GAUSSIAN = Mechanism(
    name="gaussian",
    events={KIND: GaussianEvent, CLIP_FROM_DATA: partial(GaussianEvent, clip_from_data=True)},
    check=check,
    accountant=lambda config: "rdp" if config["privacy.accountant"] == "rdp" else "pld",
    calibrated=calibrated,
    of_event=of_event,
    record=_RECORD,
    of_record=of_record,
    caveats=(CLIP_READ,),
    notes=notes,
    published_by="Theorem 1",
    published_note="Published noise is not private: the clip value is read off the data, and Theorem 1 does not hold "
    "there. Its verified ε would hold if the clip value were given.",
)
