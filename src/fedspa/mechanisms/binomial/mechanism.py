"""Registration of cpSGD's Binomial mechanism."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedspa.errors import PrivacyError
from fedspa.mechanisms.base import Asked, Mechanism
from fedspa.mechanisms.binomial.event import KIND, MOST_TRIALS, BinomialEvent
from fedspa.mechanisms.binomial.plan import BinomialPlan, trials_for_compression, with_least_trials
from fedspa.privacy.event import PLD, Event

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
    "unit": str,
    "members": int,
    "colluders": int,
}


def check(config: Mapping[str, Any]) -> None:
    """cpSGD takes one step per round, of every agent, on batches of a fixed size."""
    only: tuple[tuple[str, object, str], ...] = (
        ("federation.per_round", config["federation.agents"], "all agents take part in every round"),
        ("algorithm.local_steps", 1, "one step per round"),
        ("algorithm.coding", "int", "whole numbers travel"),
        ("privacy.sampling", "fixed", "batches of exactly B records"),
        ("privacy.neighbours", "replace-one", "batches are of a fixed size"),
        ("privacy.clip_rule", "given", "the levels lie within the clip value"),
        ("privacy.noise_multiplier", None, "its noise is Binomial: give privacy.trials"),
    )
    for key, allowed, why in only:
        value = config[key]
        if value != allowed and not (value is None and key in ("algorithm.coding", "privacy.neighbours")):
            shown = "unset" if allowed is None else repr(allowed)
            raise ValueError(f"{key} is {value!r}; for cpsgd it must be {shown}: {why}")
    if config["privacy.clip"] == "l2" and not config["algorithm.rotation"]:
        raise ValueError(
            "privacy.clip is 'l2'; cpsgd without algorithm.rotation needs 'coordinate': its levels span one coordinate"
        )
    asked = {
        "privacy.epsilon": config["privacy.epsilon"] is not None,
        "privacy.trials": config["privacy.trials"] is not None,
        "algorithm.compression (below 1)": config["algorithm.compression"] < 1,
    }
    given = [key for key, there in asked.items() if there]
    if len(given) != 1:
        raise ValueError(
            f"cpsgd takes exactly one of privacy.epsilon, privacy.trials and algorithm.compression (below 1); given: "
            f"{', '.join(given) or 'none'}"
        )


def calibrated(asked: Asked) -> BinomialPlan:
    options, cohort = asked.options, asked.cohort
    trials = options["privacy.trials"] or 1
    if options["algorithm.compression"] < 1:
        trials = trials_for_compression(options["algorithm.compression"], options["algorithm.bits"])
    drawn = BinomialEvent(
        batch=asked.batch,
        records=asked.records,
        steps=1,
        dimension=asked.dimension,
        bits=options["algorithm.bits"],
        trials=trials,
        rotation=options["algorithm.rotation"],
        aggregated=1 if cohort is None else cohort.members - cohort.colluders,
        unit=asked.unit,
        members=0 if cohort is None else cohort.members,
        colluders=0 if cohort is None else cohort.colluders,
    )
    plan = of_event(drawn, asked)
    return plan if asked.epsilon is None else with_least_trials(plan, asked.epsilon)


def of_event(event: Event, asked: Asked) -> BinomialPlan:
    if not isinstance(event, BinomialEvent):
        raise PrivacyError(f"the ledger holds events that are not of Binomial noise: {event}")
    adversary = asked.options["privacy.adversary"]
    if event.members and adversary == "local":
        raise PrivacyError(
            f"the ledger says that sums over {event.members} members were sent, the config privacy.adversary = "
            f"{adversary!r}: rely on no ε of this page"
        )
    return BinomialPlan(
        dimension=event.dimension,
        clip=asked.clip,
        clip_value=asked.clip_value,
        bits=event.bits,
        trials=event.trials,
        rotation=event.rotation,
        adversary=adversary,
        agents=asked.agents,
        batch=event.batch,
        records=event.records,
        participations=asked.participations,
        delta=asked.delta,
        unit=event.unit,
        members=event.members,
        colluders=event.colluders,
    )


def of_record(values: Mapping[str, Any]) -> BinomialPlan:
    return BinomialPlan(**{key: values[key] for key in ("dimension", "batch", *_RECORD)})


def upload(summary: Mapping[str, Any]) -> str:
    return f"p = {summary['compression']:.3g}: {2 ** summary['bits']} levels + Binomial({summary['trials']:,}, 1/2)"


BINOMIAL = Mechanism(
    name="binomial",
    events={KIND: BinomialEvent},
    check=check,
    calibrated=calibrated,
    of_event=of_event,
    record=_RECORD,
    of_record=of_record,
    options=(
        *("algorithm.compression", "algorithm.bits", "algorithm.rotation"),
        "privacy.trials",
    ),
    limits={"bits": (1, 16), "trials": (1, MOST_TRIALS), "members": (0, MOST_TRIALS), "colluders": (0, MOST_TRIALS)},
    accountant=lambda config: "binomial" if config["algorithm.rotation"] else PLD,
    upload=upload,
)
