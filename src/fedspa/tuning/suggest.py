"""A first setting for a federation, by arithmetic alone: no record is looked at and nothing is spent.

All of it follows from public numbers. Every record in every step and one step per round has the least noise for an ε.
A clip far below all gradients makes every record weigh the same, and then only clip × rate matters. On a share p of the
coordinates a gradient is √p as long. So one number is left to choose: how far the model may walk in the whole run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from fedspa.errors import ConfigError
from fedspa.mechanisms.base import relation
from fedspa.mechanisms.gaussian.calibrate import noise_multiplier
from fedspa.privacy.event import Neighbours
from fedspa.runs.halving import Settings
from fedspa.wire.payload import DEFAULT_STEP, HEADER_BYTES

CLIP = 0.1  # of the whole gradient; below those of most models from their first to their last round
WALK = 30.0  # how far θ may get in the whole run, were all its steps in one direction
EMA = 0.8
ROUNDS = 40
PARTICIPATIONS = 5
# Noise over signal in the whole run, above which little is learned, and nothing. By measurement (docs/tuning.md).
LITTLE, NOTHING = 0.3, 1.0
UNPROTECTED = 10.0  # ε
# A value of Gaussian noise in steps of a share of its deviation, and what a coder adds.
BITS = 1.1 * math.log2(math.sqrt(2 * math.pi * math.e) / DEFAULT_STEP)


def walk_of(
    rounds: int, local_steps: int, local_lr: float, server_lr: float, compression: float, clip_norm: float
) -> float:
    """The farthest that θ can get by the mean of clipped gradients, of norm `clip_norm` on a share p of it."""
    return rounds * local_steps * local_lr * server_lr * math.sqrt(compression) * clip_norm


def first_settings(
    rounds: int, local_steps: int, local_lr: float, compression: float, clip: str, active: int
) -> Settings:
    """Clip, rate and average of the rule above, for a plan whose event is fixed."""
    norm = CLIP * math.sqrt(compression)
    rate = WALK / walk_of(rounds, local_steps, local_lr, 1.0, compression, norm)
    return {
        "algorithm.server": "average",
        "algorithm.server_lr": _figure(rate),
        "algorithm.ema": EMA,
        "privacy.clip_value": _figure(norm if clip == "l2" else norm / math.sqrt(active)),
    }


def noise_to_signal(noise: float, dimension: int, batch: int, uploads: int, local_steps: int) -> float:
    """Norm of all the run's noise over that of its signal if all gradients align. The same for every p."""
    return noise * math.sqrt(dimension) / (batch * math.sqrt(uploads * local_steps))


@dataclass(frozen=True, slots=True)
class Suggestion:
    """What to start with, and what to expect. `settings` are keys of a config."""

    settings: dict[str, Any]
    dimension: int
    participations: int
    noise_multiplier: float
    noise_to_signal: float
    upload_bytes: float
    warnings: list[str]

    @property
    def run_bytes(self) -> float:
        """What an agent sends in the whole run."""
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
    """For `agents` that hold at least `records` each, and a model of `dimension` parameters."""
    numbers = {"agents": agents, "records": records, "parameters": dimension, "per-round": per_round, "rounds": rounds}
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise ConfigError(f"--{name} is {number}; it must be at least 1")
    delta = min(1e-3, _figure(0.1 / records)) if delta is None else delta
    if not 0 < delta < 1 / records:
        raise ConfigError(f"--delta is {delta:g}; it must lie between 0 and 1/records = {1 / records:.3g}")
    if not 0 < compression <= 1 or round(compression * dimension) < 1:
        raise ConfigError(
            f"--compression is {compression:g}; it must be at most 1, and leave a coordinate of {dimension}"
        )
    per_round = min(agents, max(10, agents // 10)) if per_round is None else per_round
    if per_round > agents:
        raise ConfigError(f"--per-round is {per_round}; it must not exceed --agents = {agents}")
    rounds = max(ROUNDS, -(-PARTICIPATIONS * agents // per_round)) if rounds is None else rounds
    participations = -(-rounds * per_round // agents)
    noise = noise_multiplier(
        epsilon,
        delta,
        sampling="poisson",
        batch=records,
        records=records,
        steps=1,
        participations=participations,
        neighbours=relation(neighbours, "poisson"),
    )
    active = round(compression * dimension)
    ratio = noise_to_signal(noise, dimension, records, rounds * per_round, 1)
    settings = {
        "federation.agents": agents,
        "federation.rounds": rounds,
        "federation.per_round": per_round,
        "algorithm.compression": compression,
        "algorithm.local_steps": 1,
        "algorithm.batch": records,
        "algorithm.local_lr": 1.0,
        **first_settings(rounds, 1, 1.0, compression, "l2", active),
        "privacy.epsilon": epsilon,
        "privacy.delta": delta,
        **({} if neighbours is None else {"privacy.neighbours": neighbours}),
    }
    return Suggestion(
        settings,
        dimension,
        participations,
        noise,
        ratio,
        HEADER_BYTES + active * BITS / 8,
        _warnings(epsilon, ratio, records),
    )


def _warnings(epsilon: float, ratio: float, records: int) -> list[str]:
    found = []
    if ratio >= LITTLE:
        outcome = "nothing can be learned" if ratio >= NOTHING else "little can be learned"
        found.append(
            f"{outcome}: the noise of the whole run is {ratio:.2g} times its signal, and models need less than "
            f"{LITTLE:g}; it falls with the parameters' root, and with 1/ε: as it is, take some "
            f"{math.ceil(records * ratio / LITTLE):,} records per agent, {(ratio / LITTLE) ** 2:.2g} times the agents, "
            "or fewer parameters"
        )
    if epsilon >= UNPROTECTED:
        sure = 1 / (1 + math.exp(-min(epsilon, 700.0)))
        found.append(
            f"hardly anything is protected: at ε = {epsilon:g} whoever sees the uploads may tell whether a record was "
            f"used and be right {'always' if sure > 0.99999 else f'in {sure:.3%} of cases'}; ε = 1 bounds that by 74 %"
        )
    return found


def _figure(value: float) -> float:
    """Three significant digits: no more is known."""
    return float(f"{value:.3g}")
