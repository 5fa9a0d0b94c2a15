"""The room of cpSGD's Binomial noise, as the rest of the house knows it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedspa.errors import PrivacyError
from fedspa.mechanisms.base import Asked, Mechanism
from fedspa.mechanisms.binomial.event import KIND, BinomialEvent
from fedspa.mechanisms.binomial.plan import BinomialPlan, trials_for_compression, with_least_trials
from fedspa.privacy.event import Event

# What a server announces of a plan, beside what every round has.
_RECORD: dict[str, type] = {
    "records": int,
    "participations": int,
    "clip": str,
    "clip_value": float,
    "bits": int,
    "trials": int,
    "rotation": bool,
    "adversary": str,
    "agents": int,
    "delta": float,
}


def calibrated(asked: Asked) -> BinomialPlan:
    options = asked.options
    trials = options["trials"] or 1
    if options["compression"] < 1:
        trials = trials_for_compression(options["compression"], options["bits"])
    drawn = BinomialEvent(
        batch=asked.batch,
        records=asked.records,
        steps=1,
        dimension=asked.dimension,
        bits=options["bits"],
        trials=trials,
        rotation=options["rotation"],
        aggregated=1,  # the plan's adversary decides
    )
    plan = of_event(drawn, asked)
    return plan if asked.epsilon is None else with_least_trials(plan, asked.epsilon)


def of_event(event: Event, asked: Asked) -> BinomialPlan:
    if not isinstance(event, BinomialEvent):
        raise PrivacyError(f"the ledger holds events that are not of Binomial noise: {event}")
    return BinomialPlan(
        dimension=event.dimension,
        clip=asked.clip,
        clip_value=asked.clip_value,
        bits=event.bits,
        trials=event.trials,
        rotation=event.rotation,
        adversary=asked.options["adversary"],
        agents=asked.agents,
        batch=event.batch,
        records=event.records,
        participations=asked.participations,
        delta=asked.delta,
    )


def of_record(values: Mapping[str, Any]) -> BinomialPlan:
    return BinomialPlan(**{key: values[key] for key in ("dimension", "batch", *_RECORD)})


BINOMIAL = Mechanism(
    name="binomial",
    events={KIND: BinomialEvent},
    calibrated=calibrated,
    of_event=of_event,
    record=_RECORD,
    of_record=of_record,
)
