"""The plan of a config: calibrated before a run, or made again from what its ledger holds, by the same few lines."""

from __future__ import annotations

from fedspa.data.participation import cap_for
from fedspa.mechanisms.binomial.plan import AnyPlan, BinomialPlan, calibrated, trials_for_compression
from fedspa.mechanisms.gaussian.plan import Plan
from fedspa.privacy.calibrate import noise_multiplier
from fedspa.privacy.event import BinomialEvent, Event, GaussianEvent, Neighbours, Sampling
from fedspa.privacy.published import published_noise
from fedspa.runs.config import Config, Privacy


def cap_of(config: Config) -> int:
    """The most rounds that an agent takes part in."""
    federation = config.federation
    return cap_for(federation.participation, federation.agents, federation.per_round, federation.rounds, federation.cap)


def plan_of(config: Config, event: Event, dimension: int, active: int) -> AnyPlan:
    """The plan whose participations are `event`; of the config, only what an event does not say is read."""
    privacy, cap = config.privacy, cap_of(config)
    if isinstance(event, BinomialEvent):
        return BinomialPlan(
            dimension=event.dimension,
            clip=privacy.clip,
            clip_value=privacy.clip_value,
            bits=event.bits,
            trials=event.trials,
            rotation=event.rotation,
            adversary=privacy.adversary,
            agents=config.federation.agents,
            batch=event.batch,
            records=event.records,
            participations=cap,
            delta=privacy.delta,
        )
    return Plan(
        dimension=dimension,
        active=active,
        clip=privacy.clip,
        clip_value=privacy.clip_value,
        sampling=event.sampling,
        batch=event.batch,
        records=event.records,
        local_steps=event.steps,
        participations=cap,
        noise_multiplier=event.noise_multiplier,
        neighbours=relation(privacy, event.sampling),
        delta=privacy.delta,
        clip_rule=privacy.clip_rule,
    )


def calibrated_plan(config: Config, dimension: int, active: int, records: int) -> AnyPlan:
    """The plan of a run that is to start, with the least noise that its ε allows."""
    algorithm, privacy = config.algorithm, config.privacy
    if algorithm.name != "cpsgd":
        noise = privacy.noise_multiplier or _calibrated(config, records)
        event = GaussianEvent(privacy.sampling, algorithm.batch, records, algorithm.local_steps, noise)
        return plan_of(config, event, dimension, active)
    trials = privacy.trials or 1
    if algorithm.compression < 1:
        trials = trials_for_compression(algorithm.compression, algorithm.bits)
    drawn = BinomialEvent(
        batch=algorithm.batch,
        records=records,
        steps=1,
        dimension=dimension,
        bits=algorithm.bits,
        trials=trials,
        rotation=algorithm.rotation,
        aggregated=1,  # the plan's adversary decides
    )
    plan = plan_of(config, drawn, dimension, active)
    assert isinstance(plan, BinomialPlan)
    return plan if privacy.epsilon is None else calibrated(plan, privacy.epsilon)


def relation(privacy: Privacy, sampling: Sampling) -> Neighbours:
    """The neighbouring relation that is asked for, or the one that fits the sampling."""
    return privacy.neighbours or ("add-remove" if sampling == "poisson" else "replace-one")


def _calibrated(config: Config, records: int) -> float:
    privacy, algorithm, cap = config.privacy, config.algorithm, cap_of(config)
    assert privacy.epsilon is not None  # the config has exactly one of epsilon and noise_multiplier
    if privacy.accountant == "theorem-1":
        return published_noise(
            privacy.epsilon,
            privacy.delta,
            batch=algorithm.batch,
            records=records,
            steps=algorithm.local_steps,
            participations=cap,
        )
    return noise_multiplier(
        privacy.epsilon,
        privacy.delta,
        sampling=privacy.sampling,
        batch=algorithm.batch,
        records=records,
        steps=algorithm.local_steps,
        participations=cap,
        neighbours=relation(privacy, privacy.sampling),
        accountant=privacy.accountant,
    )
