"""A first setting for a federation, with the noise and the bytes to expect. Nothing is spent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedspa.data.dataset import Dataset
from fedspa.errors import ConfigError
from fedspa.mechanisms import Plan
from fedspa.privacy.event import Neighbours
from fedspa.runs.config import Config, calibrated_plan, flat, load
from fedspa.runs.defaults import FOLLOWING, figure, noise_to_signal, with_rates, with_steps
from fedspa.runs.setup import prepare
from fedspa.wire.payload import DEFAULT_STEP, HEADER_BYTES

# Noise over signal in the whole run, above which little is learned, and nothing. By measurement (docs/tuning.md).
LITTLE, NOTHING = 0.3, 1.0
UNPROTECTED = 10.0  # ε
# A value of Gaussian noise in steps of a share of its deviation, and what a coder adds.
BITS = 1.1 * math.log2(math.sqrt(2 * math.pi * math.e) / DEFAULT_STEP)
_SHOWN = (
    *("federation.agents", "federation.rounds", "federation.per_round", "algorithm.compression", *FOLLOWING),
    *("privacy.epsilon", "privacy.noise_multiplier", "privacy.delta", "privacy.neighbours"),
)
_SECTIONS = ("federation.", "algorithm.", "privacy.")


@dataclass(frozen=True, slots=True)
class Suggestion:
    """What to start with, and what to expect. `settings` are keys of a config. `smallest` says what the smallest agent
    costs all others, where it holds less than they do."""

    settings: dict[str, Any]
    dimension: int
    participations: int
    noise_multiplier: float
    noise_to_signal: float
    upload_bytes: float
    warnings: list[str]
    smallest: str | None = None

    @property
    def run_bytes(self) -> float:
        """Return what an agent sends in the whole run."""
        return self.participations * self.upload_bytes


def suggest(
    agents: int,
    records: int,
    dimension: int,
    epsilon: float,
    delta: float | None = None,
    per_round: int | None = None,
    rounds: int | None = None,
    compression: float = 1.0,
    neighbours: Neighbours | None = None,
) -> Suggestion:
    """Suggest settings for `agents` that hold at least `records` each, and a model of `dimension` parameters."""
    numbers = {"agents": agents, "records": records, "parameters": dimension, "per-round": per_round, "rounds": rounds}
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise ConfigError(f"--{name} is {number}; it must be at least 1")
    delta = min(1e-3, figure(0.1 / records)) if delta is None else delta
    if not 0 < delta < 1 / records:
        raise ConfigError(f"--delta is {delta:g}; it must lie between 0 and 1/records = {1 / records:.3g}")
    if not 0 < compression <= 1 or round(compression * dimension) < 1:
        raise ConfigError(
            f"--compression is {compression:g}; it must be at most 1, and leave a coordinate of {dimension}"
        )
    if per_round is not None and per_round > agents:
        raise ConfigError(f"--per-round is {per_round}; it must not exceed --agents = {agents}")
    given: dict[str, dict[str, Any]] = {
        "federation": {"agents": agents, "per_round": per_round, "rounds": rounds},
        "algorithm": {"compression": compression},
        "privacy": {"epsilon": epsilon, "delta": delta, "neighbours": neighbours},
    }
    config = load({name: {k: v for k, v in keys.items() if v is not None} for name, keys in given.items()})
    config = with_steps(config, records)
    plan = calibrated_plan(config, dimension, round(compression * dimension), records, "record")
    return _suggestion(with_rates(config, plan, classes=True), plan)


def suggest_for(config: Config, data: Dataset | None = None) -> Suggestion:
    """Suggest settings for the agents, the model and the ε of a config. Of its records only the numbers count."""
    given = config.model_dump(exclude_unset=True, exclude_none=True)
    for key in FOLLOWING:
        section, _, name = key.partition(".")
        given.get(section, {}).pop(name, None)
    given.get("run", {}).pop("chosen", None)
    job = prepare(load(given), data)
    if job.plan is None:
        raise ConfigError(f"{config.algorithm.name} has no ε and no noise: the settings here are those of noisy steps")
    smallest = _smallest([len(held) for held in job.holdings], job.agents, job.plan.unit)
    return _suggestion(job.config, job.plan, smallest)


def _suggestion(config: Config, plan: Plan, smallest: str | None = None) -> Suggestion:
    federation, values = config.federation, flat(config)
    uploads = federation.rounds * federation.per_round
    ratio = noise_to_signal(plan.noise_multiplier, plan.dimension, plan.batch, uploads, plan.local_steps)
    keys = [key for key in dict.fromkeys((*_SHOWN, *config.run.chosen)) if values[key] is not None]
    return Suggestion(
        {key: values[key] for section in _SECTIONS for key in keys if key.startswith(section)},
        plan.dimension,
        plan.participations,
        plan.noise_multiplier,
        ratio,
        HEADER_BYTES + plan.active * BITS / 8,
        _warnings(config.privacy.epsilon, ratio, plan.records),
        smallest,
    )


def _smallest(sizes: Sequence[int], names: Sequence[str], unit: str) -> str | None:
    """Say what the smallest agent costs: all have its batch, and so the noise of so few."""
    least, *others = sorted(sizes)
    if not others or others[0] == least:
        return None
    agents = len(sizes)
    more = others[0] / least * math.sqrt((agents - 1) / agents)
    then = f"about {1 - 1 / more:.0%} less noise" if more > 1 else "no less noise"
    return (
        f"{names[sizes.index(least)]} holds {least:,} {unit}s, the next {others[0]:,}: batch and noise of all agents "
        f"are for {least:,}; without it there would be {then} for the same signal"
    )


def _warnings(epsilon: float | None, ratio: float, records: int) -> list[str]:
    found = []
    if ratio >= LITTLE:
        outcome = "nothing can be learned" if ratio >= NOTHING else "little can be learned"
        found.append(
            f"{outcome}: the noise of the whole run is {ratio:.2g} times its signal, and models need less than "
            f"{LITTLE:g}; it falls with the parameters' root, and with 1/ε: as it is, take some "
            f"{math.ceil(records * ratio / LITTLE):,} records per agent, {(ratio / LITTLE) ** 2:.2g} times the agents, "
            "or fewer parameters"
        )
    if epsilon is not None and epsilon >= UNPROTECTED:
        sure = 1 / (1 + math.exp(-min(epsilon, 700.0)))
        found.append(
            f"hardly anything is protected: at ε = {epsilon:g} an adversary who sees the uploads may tell whether a "
            f"record was used and be right {'always' if sure > 0.99999 else f'in {sure:.3%} of cases'}; ε = 1 bounds "
            "that by 74 %"
        )
    return found
